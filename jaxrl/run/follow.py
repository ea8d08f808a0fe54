"""An evaluator in a process of its own: it follows a run's directory and evaluates every checkpoint that appears."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from jaxrl.core import files, interrupts, ownership
from jaxrl.core.config import decode, encode
from jaxrl.core.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Algorithm
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.envs.registry import EnvironmentLike
from jaxrl.parallel.multihost.place import have_learners_ended, own_place
from jaxrl.run import checkpoint, policy_folder
from jaxrl.run.directory import EVALUATIONS, read_config
from jaxrl.run.evaluation import Evaluation, evaluate
from jaxrl.run.loading import load_run
from jaxrl.run.loggers import JSONLLogger, read_metrics
from jaxrl.run.opponents import as_opponent
from jaxrl.run.policy import Policy
from jaxrl.run.run_status import is_finished, is_of_launch
from jaxrl.run.settings import RunSettings

_LATE = 60.0  # seconds after which what learners wrote last is seen here, also if NFS keeps what it knows of a folder


def follow(
    path: str | Path,
    *,
    episodes: int = 128,
    seed: int | None = None,
    explore: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    opponent: Policy | str | os.PathLike | None = None,
    algo: Algorithm | None = None,
    env: EnvironmentLike | None = None,
    out: str | Path | None = None,
    poll: float = 1.0,
) -> Iterator[tuple[int, Evaluation]]:
    """Evaluates the checkpoints of a run that another process trains, here or on a machine that sees its directory.

    It may begin before the run does. A checkpoint that the run deleted before its turn came is passed over. What was
    found is appended to a file; steps that are in it are not played again, so the same call goes on where one stopped.

    Args:
      path: the run directory.
      episodes, seed, explore, step_timeout, opponent: of every evaluation, as `jaxrl.evaluate` takes them; without a
        seed they play other episodes than the run's own evaluations.
      algo: in place of the one in `config.json`, as `jaxrl.load` takes it.
      env: another environment to play in; None: the one that it is trained on.
      out: the file; None: `evaluations.jsonl` in the run directory.
      poll: seconds between two looks.

    Yields:
      Steps and what was found there, until the run has ended and its last checkpoint is evaluated.

    Raises:
      CheckpointError: the checkpoints do not fit the configuration, or cannot be read.
      ConfigError: `out` is a file with something else in it, an opponent has no file of its own, `path` is an
        exported policy, or the seed is not one.
    """
    path, seed = files.expand(path), None if seed is None else checked_seed("seed", seed)
    out = None if out is None else files.expand(out)
    if opponent is not None and out is None:
        raise ConfigError(f"opponent={opponent!r:.80} needs out=, a file apart from the evaluations without one")
    if out is not None:
        ownership.check_output(out, "evaluations")
    if policy_folder.is_policy_folder(path):
        raise ConfigError(
            f"{path} holds one policy, and no run that could be followed; leave out --follow to evaluate it"
        )
    if opponent is not None:
        opponent = as_opponent(opponent) or "random"  # the same one each time, also of a run that goes on
    while not _begun(path):
        time.sleep(poll)
    out = out or path / EVALUATIONS
    log = JSONLLogger(out)
    known = {row["step"] for row in read_metrics(out)}
    try:
        while True:
            ended = is_finished(path) or have_learners_ended(_LATE)  # before the last look at what there is
            for step in checkpoint.complete_steps(path / "checkpoints"):
                if step in known:
                    continue
                try:
                    run = load_run(path, step=step, algo=algo, env=env)
                except CheckpointError:
                    if step in checkpoint.complete_steps(path / "checkpoints"):
                        raise
                    continue  # it was deleted meanwhile
                policy = run.policy
                found = evaluate(
                    policy.algo,
                    policy.actor,
                    run.env,
                    policy.spec,
                    seed=run.held_out_seed if seed is None else seed,
                    episodes=episodes,
                    explore=explore,
                    step_timeout=step_timeout,
                    opponent=opponent,
                )
                log.write(step, {f"evaluation/{name}": value for name, value in found.metrics().items()})
                known.add(step)
                yield step, found
            if ended:
                return
            time.sleep(poll)
    finally:
        log.close()


def follow_launched(settings: RunSettings, *, poll: float = 1.0) -> NoReturn:
    """What a training is in the process of an evaluator that `jaxrl.launch` started: follows the learners' run.

    An earlier run that is in the directory, or has ended there, is none of theirs until they have gone on with it.

    Args:
      settings: of the training, resolved.
      poll: seconds between two looks.

    Raises:
      SystemExit: with code 0, once the run has ended and its last checkpoint is evaluated.
      CheckpointError, ConfigError: as of `follow`.
    """
    place, path = own_place(), settings.run_dir
    assert place is not None and path is not None  # else there was a problem
    if threading.current_thread() is threading.main_thread() and not interrupts.owned():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, as by SIGTERM: XLA would be waited for
    ended = False
    while not is_of_launch(path, place.start):
        if ended:  # and trained nothing there
            raise SystemExit(0)
        time.sleep(poll)
        ended = have_learners_ended(_LATE)  # before the last look
    for _ in follow(
        path,
        episodes=settings.evaluation_episodes,
        explore=settings.explore_in_evaluation,
        step_timeout=settings.topology.step_timeout,
        algo=None if _can_be_read_back(settings.algo) else settings.algo,
        env=settings.eval_env,
        poll=poll,
    ):
        pass
    raise SystemExit(0)


def _can_be_read_back(algo):
    """Whether all of it is registered; else the program is at hand that made it."""
    try:
        decode(encode(algo))
    except ConfigError:
        return False
    return True


def _begun(path):
    try:
        read_config(path)
    except RunDirectoryError:
        if (path / "config.json").exists():
            raise
        return False
    return True
