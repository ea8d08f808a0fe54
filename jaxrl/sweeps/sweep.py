"""A sweep of seeds times settings, trained in one program."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.algos.base import as_algorithm, replace
from jaxrl.core import keys
from jaxrl.core.arguments import whole_arguments
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import count_problems, whole
from jaxrl.core.types import Algorithm, Environment
from jaxrl.envs.configs import to_config
from jaxrl.parallel.anakin import Anakin
from jaxrl.run.policies.evaluation import EPISODES
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.distributions import checked_seeds, configurations
from jaxrl.sweeps.make_train import bind_run
from jaxrl.sweeps.results import SweepResult, leave
from jaxrl.sweeps.sweep_loop import gathered, opened_session, settings_problems, train_many
from jaxrl.sweeps.vectorized import VectorizedRuns, devices_and_mapping, share


@interruptible
@whole_arguments
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
    """Train every setting with every seed in one compiled program, sharded over the devices.

    Where the runs of a device are mapped in turn, each run is bit for bit the run of that seed alone; under `vmap` it
    is equal up to rounding. With several processes (`jaxrl.parallel.multihost.distributed`) each trains a part of the
    runs, and all have the result.

    Args:
      algo, env, total_steps, topology: of every run, as for `make_train`.
      num_envs: number of environments, or a list to try; None: as in `jaxrl.train`.
      seeds: how many, from 0 on, or a list of seeds.
      num_samples: number of random draws from `space`; None: the full grid of its lists.
      search_seed: seed of the random search.
      devices: number of devices of this process to use; None: all of them. On a CPU, JAX is asked for one device per
        core if it has not started yet.
      mapping: how the runs of one device are mapped: "vmap", "in_turn", or None for the faster on this platform.
      points: number of points of the learning curves; fewer if a run has fewer iterations.
      evaluation_episodes: complete episodes of the final evaluation of each run; None: 128, or 10 where experiments
        on a Ray cluster train on the host.
      explore_in_evaluation: sample actions as in training in that evaluation.
      run_dir: keeps checkpoints here, from which the same call goes on after it was killed or interrupted, bit for bit;
        at the end also the curves, the table, a picture and the best policy, as `SweepResult.save` writes them; one
        process only. None: nothing is kept.
      checkpoint_every: environment steps of a run between two checkpoints, in whole points; None: a tenth of all.
      overwrite: delete an earlier sweep in `run_dir` and start again.
      progress: show a progress bar.
      **space: fields of the algorithm: a list of values, or `Uniform` / `LogUniform` with `num_samples`. Static fields
        may be swept too; each of their combinations is a separate program.

    Raises:
      ConfigError: all invalid settings.
      RunDirectoryError: `run_dir` is in use, holds another sweep or something else, or a file of somebody else under a
        name that jaxrl uses.
      KeyboardInterrupt, SystemExit: Ctrl-C; SIGTERM or a closed terminal; once what there is was saved in `run_dir`.
    """
    devices, mapping = devices_and_mapping(devices, mapping)
    run = RunSettings.of(locals())
    if run.evaluation_episodes is None:
        run = run.replace(evaluation_episodes=EPISODES)
    if problems := count_problems(points=(points, 1)) + settings_problems("a sweep", run, space):
        raise ConfigError(problems)
    seeds = checked_seeds(seeds)
    run = run.replace(algo=as_algorithm(run.algo))
    settings = _settings(run, num_samples, search_seed, space)
    runs = [_bound(run, setting) for setting in settings]
    identity = {"algorithm": encode(run.algo)}
    identity["environment"] = run.env if isinstance(run.env, str) else to_config(run.env)
    identity |= {"topology": encode(run.topology), "num_envs": encode(run.num_envs), "settings": encode(settings)}
    identity |= {"seeds": seeds, "mapping": mapping, "total_steps": run.total_steps, "points": points}
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(runs):
        groups.setdefault((jax.tree.structure(one.algo), one.program), []).append(index)
    points = min(points, *(one.iterations for one in runs))
    programs = [{"program": number, "devices": devices} for number in range(len(groups))]
    total = sum(one.iterations * one.rows for one in runs) * len(seeds) // jax.process_count()
    configs = [one.config(None) for one in runs]
    parts: dict[int, dict[str, Any]] = {}
    with opened_session(run, "a sweep", identity, programs, total, configs, seeds) as session:
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
        ordered = [parts[index] for index in range(len(settings))]
        names = set.intersection(*(set(part["metrics"]) for part in ordered))
        result = SweepResult(
            configurations=settings,
            seeds=seeds,
            steps=np.asarray([one.steps(points) for one in runs]),
            metrics={name: np.stack([part["metrics"][name] for part in ordered]) for name in sorted(names)},
            returns=np.stack([part["returns"] for part in ordered]),
            failed=np.stack([part["failed"].any(axis=-1) for part in ordered]),
            learners=[part["learner"] for part in ordered],
            configs=configs,
            **session.figures(),
        )
        return leave(result, session.run_dir, trained=bool(session.timed))


def _settings(run, num_samples, search_seed, space) -> list[dict[str, Any]]:
    """Return the settings to try, a dictionary per configuration, with `num_envs` if there are several.

    Raises:
      ConfigError: all invalid settings.
    """
    num_envs = run.num_envs
    if num_envs is not None and not isinstance(num_envs, int):
        if run.topology is not None:
            raise ConfigError(
                f"num_envs={num_envs} and topology={run.topology}: set num_envs in the topology, or no topology"
            )
        space = {"num_envs": list(map(whole, num_envs)) if isinstance(num_envs, Iterable) else num_envs} | space
    return configurations(num_samples, space, search_seed)


def _bound(run, setting):
    """Return the run of a configuration."""
    fields = dict(setting)
    num_envs = fields.pop("num_envs", run.num_envs)
    return bind_run(run.replace(algo=replace(run.algo, **fields), num_envs=num_envs))
