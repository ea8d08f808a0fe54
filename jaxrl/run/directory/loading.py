"""Loading of policies and learner states from the directories of runs."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxrl import envs
from jaxrl.algos.base import field_problems
from jaxrl.core import registry
from jaxrl.core.arguments import checked
from jaxrl.core.config import decode
from jaxrl.core.errors import ConfigError, JaxrlError, RunDirectoryError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.keys import held_out_seed
from jaxrl.core.matching import check_spaces
from jaxrl.core.native import NativeSpaces, check_fits
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import Algorithm, Environment, EnvSpec, HostRecipe, NativeRecipe, PyTree, env_spec
from jaxrl.envs.configs import from_config, full_name
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.run.compile_cache import keep_compiled_programs
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.run_directory import read_config
from jaxrl.run.directory.sweep_directory import best_run
from jaxrl.run.policies import policy_folder
from jaxrl.run.policies.policy import Policy

_LONGEST_PROBLEM = 1000  # characters
_NEEDED = ("algorithm", "environment", "topology", "total_steps")


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run at one of its checkpoints.

    Attributes:
      policy: the policy at that step, with frozen statistics.
      algo: the algorithm as configured, with unresolved schedules.
      env: the training environment, prepared for evaluation.
      config: the contents of `config.json`.
      step: environment steps at the checkpoint.
      learner: the learner state of the algorithm; None for an exported policy.
    """

    policy: Policy
    algo: Algorithm
    env: Environment | HostRecipe
    config: dict[str, Any]
    step: int
    learner: PyTree = None

    @property
    def held_out_seed(self) -> int:
        """A seed whose episodes differ from those of the run's evaluations, for an unbiased evaluation."""
        seed = self.config.get("seed") or 0
        return held_out_seed(seed if type(seed) is int and seed >= 0 else 0)

    def __repr__(self) -> str:
        return f"LoadedRun({type(self.algo).__name__} on {self.env.name} at step {self.step:,})"


@interruptible
def load(
    path: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    algo: Algorithm | None = None,
    env: EnvironmentLike | None = None,
) -> Policy:
    """Load the policy of a run.

        policy = jaxrl.load("runs/cartpole")
        action, carry = policy(observation)

    Args:
      path: the run directory, the directory of a sweep (to load its best run), or a folder written by
        `export_policy(..., to="safetensors")`.
      step: the step of the checkpoint to load; None: the newest intact checkpoint.
      best: load the checkpoint with the highest evaluation return instead.
      algo, env: the algorithm and the environment to use instead of those in `config.json`; needed if one of their
        classes is not registered with `jaxrl.register`.

    Raises:
      RunDirectoryError: `path` is not a run directory.
      CheckpointError: there is no such checkpoint, or none that is intact and matches the configuration.
      ConfigError: the configuration cannot be decoded; the message names the argument to pass.
    """
    return load_run(path, step=step, best=best, algo=algo, env=env).policy


@checked(step={"low": 0})
def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    algo: Algorithm | None = None,
    env: EnvironmentLike | None = None,
) -> LoadedRun:
    """Load a run as `load` does; return its policy, algorithm, environment, configuration and learner state."""
    keep_compiled_programs()
    if best and step is not None:
        raise ConfigError(f"step={step} and best=True cannot be combined; pass one of them")
    path = best_run(path)
    holds_policy = policy_folder.is_policy_folder(path)
    if holds_policy and (best or step is not None):
        raise ConfigError(f"{path} contains a policy without checkpoints; leave out {chosen(step, best)}")
    config, algo, env, spec, total = _described_run(path, algo, env)
    with _described(path):
        initial = resolve_schedules(algo, 0.0)
        learner = jax.eval_shape(lambda key: initial.init(key, spec), jax.random.key(0))
        actor = jax.eval_shape(initial.actor, learner)
    if holds_policy:
        actor, step = policy_folder.read(path, actor)
        return LoadedRun(Policy(_resolved(algo, step, total), actor, spec, env), algo, env, config, step)
    directory = path / "checkpoints"
    if best:
        step = checkpoint.best_step(directory)
    template = {"learner": learner}  # as in `RunState`, whose other parts are not read
    state, step, _ = checkpoint.restore(directory, template, step, partial=True)
    final, learner = _resolved(algo, step, total), state["learner"]
    return LoadedRun(Policy(final, final.actor(learner), spec, env), algo, env, config, step, learner)


def chosen(step: int | None, best: bool) -> str:
    """Return the arguments that select a checkpoint, as text; empty for the newest checkpoint."""
    return ", ".join([f"step={step}"] * (step is not None) + ["best=True"] * best)


def _resolved(algo, step, total):
    """Return the algorithm with its schedules resolved at a step of the run."""
    return resolve_schedules(algo, min(step / total, 1.0) if total else 1.0)


def _described_run(path, algo, env):
    """Return the configuration in a run directory, its algorithm, environment and spec, and the total steps."""
    config = read_config(path)
    if missing := [name for name in _NEEDED if name not in config]:
        raise RunDirectoryError(f"{path} is not a run directory: its config.json lacks {', '.join(missing)}")
    made = None if env is None else envs.as_environment(env)
    with _described(path):
        algo = _algorithm(config["algorithm"]) if algo is None else algo
        if not isinstance(config["environment"], dict):
            raise ConfigError("config.json has no valid environment under 'environment'")
        if made is None:
            made = _with_native(from_config(config["environment"]), config.get("native"))
        else:
            trained_on = config["environment"]
            both = (decode(trained_on.get(f"{what}_space")) for what in ("observation", "action"))
            check_spaces(EnvSpec(full_name(trained_on), *both), made)  # clearer than the error of mismatched parameters
        env = envs.prepared(made)
        spec = env_spec(env)
        algo = algo.resolve(spec, 0)  # no training environments, because it only acts
        return config, algo, env, spec, _steps_in_all(config, algo)


@contextlib.contextmanager
def _described(path):
    """Convert unexpected errors in constructing the objects of config.json to a `ConfigError` that names the file."""
    try:
        yield
    except ConfigError as error:  # shortened, because it may quote the file's contents
        raise ConfigError([problem[:_LONGEST_PROBLEM] for problem in error.problems]) from error
    except JaxrlError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error!s:.500}"
        raise ConfigError(f"{path / 'config.json'} does not describe a valid run: {what}") from error


def _algorithm(config):
    algo = decode(config)
    if not (registry.name_of(type(algo)) or "").startswith("algorithm:"):
        raise ConfigError("config.json has no valid algorithm under 'algorithm'")
    if problems := field_problems(algo):
        raise ConfigError([f"config.json: {problem}" for problem in problems])
    return algo


def _with_native(env, config):
    """Return the environment with the native spaces in config.json, if there are any."""
    if config is None or not isinstance(env, NativeRecipe) or env.native is not None:
        return env
    native = decode(config)
    if not isinstance(native, NativeSpaces):
        raise ConfigError("config.json has no valid spaces under 'native'")
    check_fits(native.observation, env.observation_space)
    check_fits(native.action, env.action_space)
    return dataclasses.replace(env, native=native)


def _steps_in_all(config, algo):
    """Return the environment steps of the whole run: `total_steps`, rounded up to whole iterations."""
    total, topology = config["total_steps"], decode(config["topology"])
    if not isinstance(total, int) or total < 0:
        raise ConfigError(f"config.json: total_steps={total!r} must be a whole number")
    if topology is not None:
        if not (registry.name_of(type(topology)) or "").startswith("topology:"):
            raise ConfigError("config.json has no valid topology under 'topology'")
        rows = topology.steps_per_iteration(algo)
        total = -(-total // rows) * rows
    return total
