"""Evaluation of a run in another process, which follows the run directory and evaluates each new checkpoint."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from jaxrl.core import files, interrupts, ownership
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Algorithm
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.parallel.multihost.place import have_learners_ended, own_place
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.loading import load_run
from jaxrl.run.directory.run_directory import EVALUATIONS, read_config
from jaxrl.run.directory.run_status import is_finished, is_of_launch
from jaxrl.run.loggers import JSONLLogger, read_metrics
from jaxrl.run.policies import policy_folder
from jaxrl.run.policies.evaluation import Evaluation, evaluate
from jaxrl.run.policies.opponents import as_opponent
from jaxrl.run.policies.policy import Policy
from jaxrl.run.settings import RunSettings

_LATE = 60.0  # seconds after which the last files of the learners are visible, even if NFS caches folders


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
    """Evaluate the checkpoints of a run that another process trains, on this or another machine.

    The call may be made before the run starts. Checkpoints that the run deletes before their evaluation are skipped.
    Results are appended to a file. Steps that are already in the file are not evaluated again, so a repeated call
    continues where the previous call stopped.

    Args:
      path: the run directory.
      episodes, seed, explore, step_timeout, opponent: arguments of every evaluation, as in `jaxrl.evaluate`; without a
        seed, the episodes differ from those of the run's own evaluations.
      algo: the algorithm to use instead of the one in `config.json`, as in `jaxrl.load`.
      env: another environment to evaluate in; None: the training environment.
      out: the file of the results; None: `evaluations.jsonl` in the run directory.
      poll: seconds between two checks for new checkpoints.

    Yields:
      A step and its evaluation, until the run has ended and its last checkpoint is evaluated.

    Raises:
      CheckpointError: the checkpoints do not match the configuration, or cannot be read.
      ConfigError: `out` is a file with other contents, there is an opponent but no `out`, `path` is an exported policy,
        or the seed is invalid.
    """
    path, seed = files.expand(path), None if seed is None else checked_seed("seed", seed)
    out = None if out is None else files.expand(out)
    if opponent is not None and out is None:
        raise ConfigError(f"opponent={opponent!r:.80} needs out=, a separate file for its evaluations")
    if out is not None:
        ownership.check_output(out, "evaluations")
    if policy_folder.is_policy_folder(path):
        raise ConfigError(f"{path} contains an exported policy, not a run; leave out --follow to evaluate it")
    if opponent is not None:
        opponent = as_opponent(opponent) or "random"  # loaded only once, because the opponent's run may continue
    while not (path / "config.json").exists():
        time.sleep(poll)
    read_config(path)  # raises the error for an invalid file at once, not at the first checkpoint
    out = out or path / EVALUATIONS
    log = JSONLLogger(out)
    known = {row["step"] for row in read_metrics(out)}
    try:
        while True:
            ended = is_finished(path) or have_learners_ended(_LATE)  # before the checkpoints are listed
            for step in checkpoint.complete_steps(path / "checkpoints"):
                if step in known:
                    continue
                try:
                    run = load_run(path, step=step, algo=algo, env=env)
                except CheckpointError:
                    if step in checkpoint.complete_steps(path / "checkpoints"):
                        raise
                    continue  # the run has deleted it
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
    """Follow the learners' run in the process of an evaluator that `jaxrl.launch` started.

    An earlier run in the directory is ignored until the learners have resumed it.

    Args:
      settings: resolved settings of the training run.
      poll: seconds between two checks for new checkpoints.

    Raises:
      SystemExit: with code 0, once the run has ended and its last checkpoint is evaluated.
      CheckpointError, ConfigError: as in `follow`.
    """
    place, path = own_place(), settings.run_dir
    assert place is not None and path is not None  # checked by `RunSettings.prepared`
    if threading.current_thread() is threading.main_thread() and not interrupts.owned():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, as for SIGTERM, instead of waiting for XLA
    ended = False
    while not is_of_launch(path, place.start):
        if ended:  # the learners ended without training in this directory
            raise SystemExit(0)
        time.sleep(poll)
        ended = have_learners_ended(_LATE)  # before the directory is checked again
    for _ in follow(
        path,
        episodes=settings.evaluation_episodes,
        explore=settings.explore_in_evaluation,
        step_timeout=settings.topology.step_timeout,
        algo=settings.algo,  # config.json cannot contain classes that are not registered
        env=settings.eval_env,
        poll=poll,
    ):
        pass
    raise SystemExit(0)
