"""What a run left behind, read back from its directory."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import checkpoint, envs, spaces
from jaxrl.config import decode
from jaxrl.errors import ConfigError, RunDirectoryError
from jaxrl.parallel.rollout import RunState
from jaxrl.policy import Policy
from jaxrl.run_directory import read_config
from jaxrl.schedules import at
from jaxrl.types import Algorithm, Environment, HostRecipe, env_spec

_NEEDED = ("algorithm", "environment", "topology", "total_steps")


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run at one of its checkpoints.

    Attributes:
      policy: as learnt by then, its statistics frozen.
      algo: the algorithm as configured, schedules and all.
      env: the environment it was trained on, ready to play in.
      config: what `config.json` holds.
      step: rows done at the checkpoint.
    """

    policy: Policy
    algo: Algorithm
    env: Environment | HostRecipe
    config: dict[str, Any]
    step: int


def load(
    path: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    algo: Algorithm | None = None,
    env: Environment | HostRecipe | str | None = None,
) -> Policy:
    """The policy of a run.

        policy = jaxrl.load("runs/cartpole")
        action, carry = policy(observation)

    Args:
      path: the run directory.
      step: of which checkpoint; None: the newest sound one.
      best: the checkpoint with the highest evaluation instead.
      algo, env: in place of those in `config.json`, needed where they hold classes of your own.

    Raises:
      RunDirectoryError: `path` is no run directory.
      CheckpointError: there is no such checkpoint, or none that is sound and fits.
      ConfigError: the configuration cannot be read back; says what to hand in.
    """
    return load_run(path, step=step, best=best, algo=algo, env=env).policy


def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    algo: Algorithm | None = None,
    env: Environment | HostRecipe | str | None = None,
) -> LoadedRun:
    """As `load`, with what the policy was trained on and by."""
    path = Path(path)
    if best and step is not None:
        raise ConfigError(f"step={step} beside best=True; give one of them")
    config = read_config(path)
    if missing := [name for name in _NEEDED if name not in config]:
        raise RunDirectoryError(f"{path} is no run directory: its config.json lacks {', '.join(missing)}")
    algo = decode(config["algorithm"]) if algo is None else algo
    if env is None:
        env = decode(config["environment"]["value"])
    else:
        env = envs.make(env) if isinstance(env, str) else env
        _check_spaces(config["environment"], env)
    env = envs.prepared(env)
    spec = env_spec(env)
    initial = at(algo, np.float32(0.0))
    learner = jax.eval_shape(lambda key: initial.init(key, spec), jax.random.key(0))
    # The rest of the state is left out of the template, and so is not read.
    template = RunState(
        learner, env_state=None, timestep=None, carry=None, buffers={}, key=None, ticks=None, empty_at=None
    )
    directory = path / "checkpoints"
    if best:
        step = checkpoint.best_step(directory)
    state, step, _ = checkpoint.restore(directory, template, step, partial=True)
    final = at(algo, np.float32(_progress(config, algo, step)))
    return LoadedRun(Policy(final, final.actor(state.learner), spec), algo, env, config, step)


def _check_spaces(trained_on, env):
    """Says that a policy cannot play in `env` before its parameters are found not to fit; bounds may differ."""
    try:
        trained = decode(trained_on["value"])
    except ConfigError:
        return  # of a class that cannot be read back: `env` is in its place
    problems = [
        f"{env.name} has {what} {there}, but the policy was trained on {here} ({trained.name})"
        for what, there, here in (
            ("observations", env.observation_space, trained.observation_space),
            ("actions", env.action_space, trained.action_space),
        )
        if _form(there) != _form(here)
    ]
    if problems:
        raise ConfigError(problems)


def _form(space):
    if isinstance(space, spaces.Dict):
        return {name: _form(child) for name, child in space.items}
    return (space.shape, space.dtype) if isinstance(space, spaces.Box) else space


def _progress(config, algo, step):
    """The fraction of the run that was done; a run ends with a whole iteration, which may go over `total_steps`."""
    total, topology = config["total_steps"], decode(config["topology"])
    if topology is not None:
        rows = topology.rows_per_iteration(algo)
        total = -(-total // rows) * rows
    return min(step / total, 1.0) if total else 1.0
