"""Checks that environments follow the protocol in `jaxrl.core.types`, and preparation of environments for training."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core import keys, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Environment, HostRecipe, PyTree, TimeStep, num_agents
from jaxrl.envs.agents import as_rows
from jaxrl.envs.env_registry import EnvironmentLike, as_environment
from jaxrl.envs.episode import EpisodeStatistics, with_auto_reset
from jaxrl.envs.host import host_check as rules
from jaxrl.envs.parameters import has_layer, unwrapped
from jaxrl.envs.wrappers import ClipReward, ScaleReward

_BATCH = 4


@interruptible
@checked(steps={"low": 0})
def check_env(env: EnvironmentLike, *, steps: int = 100, seed: int = 0) -> None:
    """Check that `env` works in training by taking random steps under jit, vmap and scan, or on the host.

    Args:
      env: the environment, with or without auto-reset; a recipe of host environments; a name; or a Gymnasium
        environment, its class or a function that makes one.
      steps: number of random steps in each of 4 environments; 0 only checks the types and shapes of a JAX environment,
        without compiling anything.
      seed: the seed for actions and resets, from 0 to 2^63 - 1.

    Raises:
      EnvironmentContractError: the environment breaks the contract; the message lists all problems, one per line.
    """
    seed = checked_seed("seed", seed)
    env = as_environment(env)
    if not isinstance(env, Environment) and callable(getattr(env, "build", None)):
        return rules.check_recipe(env, steps, seed)
    env, key = check_types(env, weak=True), keys.root_key(seed)
    if steps == 0:
        return
    rules.raise_problems(env, _determinism_problems(env, key))
    rules.raise_problems(env, _rollout_problems(env, key, steps))


def check_types(env: Any, *, weak: bool) -> Environment:
    """Check that `env` can be traced and has correct types and shapes; return `as_rows(env)`.

    Nothing is compiled. In the result, a multi-agent environment resets itself and has one row per agent.

    Args:
      env: the environment.
      weak: whether to also reject weakly typed arrays, which training accepts because its loops make them strongly
        typed.

    Raises:
      EnvironmentContractError: the environment breaks the contract; the message lists all problems, one per line.
    """
    rules.raise_problems(env, _static_problems(env))
    env, key = _rows(env), keys.root_key(0)

    def problems(method, state, time_step):
        found = rules.type_problems(method, time_step, env.observation_space)
        found += _mask_problems(env.action_space, time_step.action_mask, f"{method}: TimeStep.action_mask")
        return found + (_weak_problems(method, state, time_step) if weak else [])

    state, time_step = _traced(env, "reset", env.reset, key)
    rules.raise_problems(env, problems("reset", state, time_step))
    action = jax.eval_shape(lambda key: env.action_space.sample(key), key)
    next_state, next_step = _traced(env, "step", env.step, state, action, key)
    found = problems("step", next_state, next_step)
    found += _difference("state", state, next_state) + _difference("time step", time_step, next_step)
    rules.raise_problems(env, found)
    return env


def _rows(env: Environment) -> Environment:
    agents, base = num_agents(env), unwrapped(env)
    if type(agents) is not int or agents < 1:
        rules.raise_problems(env, [f"num_agents is {agents!r:.80}; a whole number of at least 1 is required"])
    if agents > 1:
        shape = jnp.shape(_traced(base, "reset", base.reset, keys.root_key(0))[1].reward)
        if shape != (agents,):
            line = f"the environment has num_agents={agents}, but rewards have shape {shape} instead of ({agents},); "
            line += "return one reward per agent, or rename the attribute"
            rules.raise_problems(env, [line])
    return as_rows(env)


_METHODS = {"reset": ("key",), "step": ("state", "action", "key")}
_MISSING = object()


def _static_problems(env: Any) -> list[str]:
    if isinstance(env, type):
        return [f"the environment is a class; pass an instance, {env.__name__}()"]
    if not any(hasattr(type(env), name) for name in _METHODS):
        return [f"{env!r:.80} has neither reset nor step; make an environment with jaxrl.make('suite:name')"]
    found, problems = {}, []
    for name in ("name", "observation_space", "action_space", "resets", *_METHODS):
        try:
            found[name] = getattr(env, name)
        except Exception as error:
            missing = inspect.getattr_static(env, name, _MISSING) is _MISSING
            problems.append(f"it has no {name!r}" if missing else f"its {name} {_raised(error)}")
    if problems:
        return problems
    if not isinstance(found["name"], str):
        problems.append(f"name is {found['name']!r:.80}; a string such as 'my:Name' is required")
    if not isinstance(found["resets"], bool):
        problems.append(f"resets is {found['resets']!r:.80}; True or False is required, as an attribute or a property")
    problems += rules.space_problems(env)
    problems += [line for name in _METHODS for line in _signature_problems(name, found[name])]
    leaves, tree = jax.tree.flatten(env)
    if len(leaves) == 1 and leaves[0] is env:
        problems.append("the environment is not a pytree; make it a flax.struct.dataclass")
    try:
        hash(tree)
    except TypeError as error:
        problems.append(f"the static fields are not hashable ({error}); jit requires it")
    return problems


def _signature_problems(name, method):
    if not callable(method):
        return [f"{name} is {method!r:.80}; a method is required"]
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # such as functions written in C
        return []
    try:
        signature.bind(*_METHODS[name])
    except TypeError:
        return [f"{name} takes {signature}; {name}({', '.join(_METHODS[name])}) is required"]
    return []


def _raised(error: Exception) -> str:
    """Describe an error that an environment's code raised, with the file and line of that code."""
    reason = (str(error).strip() or "without a message").split("\n")[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"raises {type(error).__name__}: {reason}{where}"


def _is_library(file):
    return file.startswith((str(Path(jax.__file__).parent), str(Path(__file__).parents[1]), "<"))


def _traced(env: Any, method: str, function: Callable, *args: Any) -> tuple[PyTree, TimeStep]:
    try:
        result = jax.eval_shape(function, *args)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError) or "key<" in reason:
            line = f"{method} cannot be traced by jit, vmap and scan: it {_raised(error)}"
        elif isinstance(error, EnvironmentContractError):
            line = f"{method}: {reason}"
        else:
            line = f"{method} {_raised(error)}"
        if "key<" in reason:  # such as keys of two types in one `where`; JAX's message names only one of them
            line += f"; {_KEYS}"
        raise rules.broken(env, [line]) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
        made = "jaxrl.envs.episode.restart" if method == "reset" else "jaxrl.envs.episode.transition"
        line = f"{method} returns {_returned(result)}; the pair (state, TimeStep) is required (see {made})"
        rules.raise_problems(env, [line])
    return result


def _returned(result):
    if not isinstance(result, tuple):
        return "nothing" if result is None else _kind(result)
    return f"{len(result)} values ({', '.join(map(_kind, result))})"


def _kind(value):
    return rules.describe(value) if hasattr(value, "dtype") else type(value).__name__


def _mask_problems(space: spaces.Space, mask: PyTree | None, where: str) -> list[str]:
    if mask is None:
        return []
    if isinstance(space, spaces.Composite):
        try:
            parts = spaces.optional_parts(space, mask)
        except ConfigError as error:
            return [f"{where} has {error}"]
        return [line for key, child in space.items for line in _mask_problems(child, parts[key], f"{where}[{key!r}]")]
    if isinstance(space, spaces.Box):
        return [f"{where} is {rules.describe(mask)}; boxes have no mask, so None is required"]
    required = f"bool[{space.n if isinstance(space, spaces.Discrete) else sum(space.nvec)}]"
    return [] if rules.describe(mask) == required else [f"{where} is {rules.describe(mask)}; {required} is required"]


def _weak_problems(method: str, state: PyTree, time_step: TimeStep) -> list[str]:
    return [
        f"{method}: {where}{jax.tree_util.keystr(path)} is weakly typed {leaf.dtype} (a Python number?); "
        f"use jnp.asarray(..., jnp.{leaf.dtype})"
        for where, tree in (("state", state), ("TimeStep", time_step))
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.weak_type
    ]


def _difference(where: str, first: PyTree, later: PyTree) -> list[str]:
    """Return one error line per difference in structure, type or shape between the results of reset and step."""
    both, problems = [rules.by_path(tree) for tree in (first, later)], []
    for path in both[0] | both[1]:
        leaves = [one.get(path) for one in both]
        before, after = map(rules.describe, leaves)
        if _are_keys(*leaves) and len({keys.kind(leaf) for leaf in leaves}) > 1:
            problems.append(f"{where}{path}: reset and step return keys of different types; {_KEYS}")
        elif before != after:
            problems.append(f"{where}{path}: reset returns {before}, step returns {after}")
    structures = [jax.tree.structure(tree) for tree in (first, later)]
    if not problems and structures[0] != structures[1]:
        problems.append(f"{where}: reset returns {structures[0]}, step returns {structures[1]}")
    return problems


_KEYS = "derive every key from the argument with jax.random.split or fold_in, not with jax.random.key"


def _are_keys(*leaves: Any) -> bool:
    return all(hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)


def _determinism_problems(env: Environment, key: jax.Array) -> list[str]:
    state, action = env.reset(key)[0], env.action_space.sample(key)
    return [
        f"{method} returns different results for the same key, at {path}; use the key for all randomness"
        for method, call in (("reset", env.reset), ("step", lambda key: env.step(state, action, key)))
        # The two jitted functions are traced separately, so a number that numpy samples during tracing differs.
        for path in rules.different(*(jax.jit(lambda key, call=call: _plain(call(key)))(key) for _ in range(2)))
    ]


def _plain(tree: PyTree) -> PyTree:
    """Replace typed keys with their data, so that they can be compared."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _are_keys(x) else x, tree)


def _rollout_problems(env: Environment, key: jax.Array, steps: int) -> list[str]:
    space, batch, alone = env.observation_space, _BATCH * num_agents(env), num_agents(env) == 1

    @jax.jit
    def rollout(env, key):
        key_reset, key_steps = jax.random.split(key)
        state, time_step = jax.vmap(env.reset)(jax.random.split(key_reset, batch))

        def one(carry, key):
            state, before = carry
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(env.action_space.sample)(jax.random.split(key_action, batch))
            state, time_step = jax.vmap(env.step)(state, action, jax.random.split(key_step, batch))
            return (state, time_step), rules.row_problems(space, time_step, before.last, alone=alone)

        first = rules.row_problems(space, time_step, jnp.ones(batch, bool), alone=alone)
        return first, jax.lax.scan(one, (state, time_step), jax.random.split(key_steps, steps))[1]

    first, wrong = jax.device_get(rollout(with_auto_reset(env), key))
    return rules.lines("reset", first) + rules.lines("step", wrong)


def prepared(env: EnvironmentLike) -> Environment | HostRecipe:
    """Return `as_environment(env)`, with episode statistics and auto-reset added to a JAX environment that lacks them.

    The statistics use the original rewards, even if `ClipReward` or `ScaleReward` is among the wrappers.

    Raises:
      ConfigError: `env` is neither a JAX environment nor a recipe of host environments.
      EnvironmentContractError: the environment breaks the contract, for example because types do not match its spaces.
    """
    env = as_environment(env)
    if isinstance(env, Environment):
        if not _has_statistics(env):
            check_types(env, weak=False)  # an environment of the user, not checked yet
            env = _counted(env) if num_agents(env) == 1 else as_rows(env)
        return with_auto_reset(env)
    if not callable(getattr(env, "build", None)):
        raise ConfigError(
            f"{env!r} is not an environment: it has neither the methods `reset` and `step` of jaxrl.types.Environment "
            "nor `build` of HostRecipe; make one with jaxrl.make('suite:name'), or pass a gymnasium.Env"
        )
    return env


def _has_statistics(env: Environment) -> bool:
    try:
        return jax.eval_shape(lambda key: env.reset(key)[1], keys.root_key(0)).episode is not None
    except Exception:  # `check_types` raises a better error
        return False


def _counted(env: Environment) -> Environment:
    """Add statistics under the innermost wrapper that changes rewards, or around all wrappers if none does."""
    wrapper: Any = env
    if "env" not in getattr(env, "__dataclass_fields__", ()) or not has_layer(env, ClipReward | ScaleReward):
        return EpisodeStatistics(env)
    return dataclasses.replace(wrapper, env=_counted(wrapper.env))
