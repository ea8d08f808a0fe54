"""`jaxrl.sweep`: seeds and configurations trained in one program."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.algos.base import as_algorithm, replace
from jaxrl.core import arguments, interrupts, keys, limits
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment
from jaxrl.parallel.anakin import Anakin
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.distributions import COUNTS, checked_seeds, configurations
from jaxrl.sweeps.make_train import bind_run
from jaxrl.sweeps.results import SweepResult, leave
from jaxrl.sweeps.sweep_loop import gathered, identity_of, opened_session, settings_problems, train_many
from jaxrl.sweeps.vectorized import VectorizedRuns, devices_and_mapping, share


@interrupts.interruptible
@arguments.whole_arguments
def sweep(
    algo: Algorithm | str,
    env: Environment | str,
    *,
    total_steps: int,
    seeds: int | Sequence[int] = 8,
    num_samples: int | None = None,
    search_seed: int = 0,
    num_envs: int | Sequence[int] | None = None,
    topology: Anakin | None = None,
    devices: int | None = None,
    mapping: str | None = None,
    points: int = 50,
    evaluation_episodes: int | None = None,
    explore_in_evaluation: bool = False,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **space: Any,
) -> SweepResult:
    """Train every configuration with every seed in one compiled program, sharded over the devices.

    If `mapping` is "in_turn", each run equals the single run with the same seed bit for bit; with "vmap", they are
    equal up to rounding. With several processes (`jaxrl.parallel.multihost.distributed`), each process trains some of
    the runs, and all return the complete result, which can be written to a directory with `SweepResult.save`.

    Args:
      algo, env, topology: settings of every run, as for `make_train`.
      total_steps: environment steps per run, over all its environments; the last iteration may exceed it.
      seeds: number of seeds, starting from 0; or a list of seeds.
      num_samples: number of random samples of the settings; None: every combination of their values.
      search_seed: seed of the random samples.
      num_envs: number of environments, or a list of numbers to try; None: as in `jaxrl.train`.
      devices: number of devices of this process to use; None: all. On a CPU, JAX is set up with one device per core,
        unless it has started already.
      mapping: how the runs on one device are executed: together ("vmap") or one after another ("in_turn"); None: the
        faster way on this platform.
      points: number of points of the learning curves; fewer if a run has fewer iterations.
      evaluation_episodes: complete episodes of the final evaluation of each run; None: 128, or 10 for host environments
        on a Ray cluster.
      explore_in_evaluation: sample actions as in training in the final evaluation.
      run_dir: directory for checkpoints, from which the same call resumes bit for bit after it was killed or
        interrupted, and for the final curves, table, plot and best policy; one process only. None: nothing is saved.
      checkpoint_every: environment steps of a run between checkpoints, which are saved at points of the curves; None: a
        tenth of the run.
      overwrite: delete an earlier sweep in `run_dir` and start again.
      progress: show a progress bar.
      **space: fields of the algorithm, or of an object in one of them ("exploration_bonus.gamma"): a list of values, or
        `Uniform` / `LogUniform` with `num_samples`. Static fields are allowed too; each combination of their values is
        a separate program.

    Returns:
      The scores, learning curves and final learner states of all runs.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
      RunDirectoryError: `run_dir` is in use, contains anything other than this sweep, or contains a foreign file with
        a name that jaxrl uses.
      KeyboardInterrupt: after Ctrl-C, once progress is saved in `run_dir`.
      SystemExit: after SIGTERM or when the terminal is closed, once progress is saved in `run_dir`.
    """
    devices, mapping = devices_and_mapping(devices, mapping)
    run = RunSettings.of(locals())
    problems = arguments.problems_of(sweep, locals(), **COUNTS)
    if problems := problems + settings_problems("a sweep", run, space):
        raise ConfigError(problems)
    seeds = checked_seeds(seeds)
    run = run.replace(algo=as_algorithm(run.algo))
    settings = _settings(run, num_samples, search_seed, space)
    runs = [_bound(run, setting) for setting in settings]
    identity = identity_of(run, mapping) | {"num_envs": encode(run.num_envs), "settings": encode(settings)}
    identity |= {"seeds": seeds, "points": points}
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(runs):
        groups.setdefault((jax.tree.structure(one.algo), one.program), []).append(index)
    points = min(points, *(one.iterations for one in runs))
    programs = [{"program": number, "devices": devices} for number in range(len(groups))]
    total = sum(one.iterations * one.rows for one in runs) * len(seeds) // jax.process_count()
    configs = [one.config(None) for one in runs]
    parts: list[Any] = [None] * len(runs)
    with opened_session(runs[0].settings, "a sweep", identity, programs, total, configs, seeds) as session:
        for number, members in enumerate(groups.values()):
            first = runs[members[0]]
            mine = share([(runs[index].algo, seed) for index in members for seed in seeds])
            many = VectorizedRuns(first.program, devices, mapping, len(mine))
            algos = many.stack([variant for variant, _ in mine])
            roots = many.stack([keys.root_key(seed) for _, seed in mine])
            part = train_many(session, number, many, algos, first, roots, points)
            part["returns"] = many.evaluate(algos, part["learner"], roots, first.settings)
            part = gathered(part, len(mine))
            for position, index in enumerate(members):
                rows = slice(position * len(seeds), (position + 1) * len(seeds))
                parts[index] = jax.tree.map(lambda x, rows=rows: x[rows], part)
        names = set.intersection(*(set(part["metrics"]) for part in parts))
        result = SweepResult(
            configurations=settings,
            seeds=seeds,
            steps=np.asarray([one.steps(points) for one in runs]),
            metrics={name: np.stack([part["metrics"][name] for part in parts]) for name in sorted(names)},
            returns=np.stack([part["returns"] for part in parts]),
            failed=np.stack([part["failed"].any(axis=-1) for part in parts]),
            learners=[part["learner"] for part in parts],
            configs=configs,
            **session.figures(),
        )
        return leave(result, session.run_dir, trained=bool(session.timed))


def _settings(run, num_samples, search_seed, space) -> list[dict[str, Any]]:
    """Return the settings of each configuration, including `num_envs` if it has several values.

    Raises:
      ConfigError: settings are invalid; the message lists all of them.
    """
    num_envs = run.num_envs
    if num_envs is not None and not isinstance(num_envs, int):
        space = {"num_envs": list(map(limits.whole, num_envs)) if isinstance(num_envs, Iterable) else num_envs} | space
    return configurations(num_samples, space, search_seed)


def _bound(run, setting):
    """Return the compiled run of a configuration, which is the same for all seeds."""
    fields = dict(setting)
    num_envs = fields.pop("num_envs", run.num_envs)
    return bind_run(run.replace(algo=replace(run.algo, **fields), num_envs=num_envs))
