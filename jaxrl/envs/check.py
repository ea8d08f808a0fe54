"""`check_env`: does an environment keep the protocol of `jaxrl.core.types.Environment`, or of `HostRecipe`?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Environment, HostRecipe, PyTree, TimeStep
from jaxrl.envs.host.check import check_recipe
from jaxrl.envs.wrappers import with_auto_reset

_BATCH = 4


@interruptible
@checked(steps={"low": 1})
def check_env(env: Environment | HostRecipe, *, steps: int = 100, seed: int = 0) -> None:
    """Tries `env` in every way that training uses it: traced, compiled, mapped and scanned; or built and stepped.

    Args:
      env: the environment, with or without auto-reset, or a recipe of host environments.
      steps: how many random steps each of 4 environments takes; 0 compiles nothing, and sees types and shapes only.
      seed: of the actions and resets, from 0 to 2^63 - 1.

    Raises:
      EnvironmentContractError: all that is wrong, one line each, with the leaf's name.
    """
    seed = checked_seed("seed", seed)
    if not isinstance(env, Environment) and callable(getattr(env, "build", None)):
        return check_recipe(env, steps, seed)
    env = _checked(env)
    check_types(env, weak=True)
    if steps == 0:
        return
    key = keys.root_key(seed)
    _raise(env, _determinism_problems(env, key))
    _raise(env, _rollout_problems(env, key, steps))


def check_types(env: Environment, *, weak: bool) -> None:
    """The part of `check_env` that compiles nothing: types, shapes, and whether it can be traced.

    Args:
      env: the environment.
      weak: refuse weakly typed leaves too; a loop makes them strong, so that training does without.

    Raises:
      EnvironmentContractError: all that is wrong, one line each, with the leaf's name.
    """
    env, key = _checked(env), keys.root_key(0)

    def problems(method, state, time_step):
        return _time_step_problems(env, method, time_step) + (_weak_problems(method, state, time_step) if weak else [])

    state, time_step = _traced(env, "reset", env.reset, key)
    _raise(env, problems("reset", state, time_step))
    action = jax.eval_shape(lambda key: env.action_space.sample(key), key)
    next_state, next_step = _traced(env, "step", env.step, state, action, key)
    found = problems("step", next_state, next_step)
    found += _difference("state", "reset gives", state, "step gives", next_state)
    found += _difference("time step", "reset gives", time_step, "step gives", next_step)
    _raise(env, found)


def _raise(env: Any, problems: list[str]) -> None:
    if problems:
        name = getattr(env, "name", type(env).__name__)
        raise EnvironmentContractError(f"{name} breaks the contract of environments:\n" + "\n".join(problems))


def _checked(env: Any) -> Environment:
    """The environment, in which nothing is missing."""
    _raise(env, _static_problems(env))
    return env


def _static_problems(env: Any) -> list[str]:
    missing = [
        a for a in ("name", "observation_space", "action_space", "resets", "reset", "step") if not hasattr(env, a)
    ]
    if missing:
        return [f"it has no {name!r}" for name in missing]
    problems = []
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name), spaces.Space):
            problems.append(f"{name} is {getattr(env, name)!r}, which is no space of jaxrl.spaces")
    leaves, tree = jax.tree.flatten(env)
    if len(leaves) == 1 and leaves[0] is env:
        problems.append("it is not a pytree; make it a flax.struct.dataclass")
    try:
        hash(tree)
    except TypeError as error:
        problems.append(f"its static fields are not hashable ({error}); jit needs them to be")
    return problems


def _traced(env: Any, method: str, function: Callable, *args: Any) -> tuple[PyTree, TimeStep]:
    try:
        result = jax.eval_shape(function, *args)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        line = f"{method} cannot be traced by jit, vmap and scan: {type(error).__name__}: {reason}"
        if "key<" in reason:  # two kinds of keys in one `where`, say, of which JAX names only one
            line += f"; {_KEYS}"
        raise EnvironmentContractError(f"{env.name} breaks the contract of environments:\n{line}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
        _raise(env, [f"{method} returns {type(result).__name__}, not the pair (state, TimeStep)"])
    return result


def _time_step_problems(env: Environment, method: str, time_step: TimeStep) -> list[str]:
    problems = []
    for name, dtype in (("reward", "float32"), ("terminated", "bool"), ("truncated", "bool"), ("first", "bool")):
        leaf = getattr(time_step, name)
        if not hasattr(leaf, "dtype") or leaf.shape != () or leaf.dtype != dtype:
            problems.append(f"{method}: TimeStep.{name} is {_describe(leaf)}; a scalar of {dtype} is required")
    for name, leaf in (time_step.info or {}).items():
        if not hasattr(leaf, "dtype") or leaf.shape != () or leaf.dtype != "float32":
            problems.append(f"{method}: TimeStep.info[{name!r}] is {_describe(leaf)}; a scalar of float32 is required")
    expected = jax.eval_shape(lambda: spaces.zeros(env.observation_space))
    where = "TimeStep.observation"
    problems += _difference(where, "the space says", expected, f"{method} gives", time_step.observation)
    return problems + _mask_problems(env.action_space, time_step.action_mask, f"{method}: TimeStep.action_mask")


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
        return [f"{where} is {_describe(mask)}; boxes have no mask, so None is required"]
    required = f"bool[{space.n if isinstance(space, spaces.Discrete) else sum(space.nvec)}]"
    return [] if _describe(mask) == required else [f"{where} is {_describe(mask)}; {required} is required"]


def _weak_problems(method: str, state: PyTree, time_step: TimeStep) -> list[str]:
    return [
        f"{method}: {where}{jax.tree_util.keystr(path)} is weakly typed {leaf.dtype} (a Python number?); "
        f"make it jnp.asarray(..., jnp.{leaf.dtype})"
        for where, tree in (("state", state), ("TimeStep", time_step))
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.weak_type
    ]


def _difference(where: str, said_a: str, a: PyTree, said_b: str, b: PyTree) -> list[str]:
    leaves_a = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(a)}
    leaves_b = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(b)}
    problems = []
    for path in dict.fromkeys([*leaves_a, *leaves_b]):
        leaf_a, leaf_b = leaves_a.get(path), leaves_b.get(path)
        left, right = _describe(leaf_a), _describe(leaf_b)
        if _are_keys(leaf_a, leaf_b) and keys.kind(leaf_a) != keys.kind(leaf_b):
            problems.append(f"{where}{path}: reset and step give keys of two kinds; {_KEYS}")
        elif left != right:
            problems.append(f"{where}{path}: {said_a} {left}, {said_b} {right}")
    if not problems and jax.tree.structure(a) != jax.tree.structure(b):
        problems.append(f"{where}: {said_a} {jax.tree.structure(a)}, {said_b} {jax.tree.structure(b)}")
    return problems


_KEYS = "make every key from the one that is given, by jax.random.split or fold_in, not by jax.random.key"


def _are_keys(*leaves: Any) -> bool:
    return all(hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)


def _determinism_problems(env: Environment, key: jax.Array) -> list[str]:
    state, action = env.reset(key)[0], env.action_space.sample(key)
    return [
        f"{method} with one key gives two results, at {jax.tree_util.keystr(path)}; draw all randomness from the key"
        for method, call in (("reset", env.reset), ("step", lambda key: env.step(state, action, key)))
        for path, a, b in _run_twice(call, key)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    ]


def _run_twice(call, key):
    # Two functions, hence two traces: a number drawn by numpy while tracing would differ.
    runs = [jax.jit(lambda key: _plain(call(key)))(key) for _ in range(2)]
    one, other = jax.tree.leaves_with_path(runs[0]), jax.tree.leaves(runs[1])
    return [(path, a, b) for (path, a), b in zip(one, other, strict=True)]


def _plain(tree: PyTree) -> PyTree:
    """Typed keys as their words, to be compared."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _are_keys(x) else x, tree)


def _rollout_problems(env: Environment, key: jax.Array, steps: int) -> list[str]:
    resetting = with_auto_reset(env)

    def contained(time_step):
        return {
            path: jax.vmap(space.contains)(leaf)
            for path, space, leaf in spaces.leaves_with_path(env.observation_space, time_step.observation)
        }

    @jax.jit
    def rollout(env, key):
        key_reset, key_steps = jax.random.split(key)
        state, time_step = jax.vmap(env.reset)(jax.random.split(key_reset, _BATCH))

        def one(carry, key):
            state, before = carry
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(env.action_space.sample)(jax.random.split(key_action, _BATCH))
            state, time_step = jax.vmap(env.step)(state, action, jax.random.split(key_step, _BATCH))
            wrong = {
                "TimeStep.terminated and TimeStep.truncated are both set": time_step.terminated & time_step.truncated,
                "TimeStep.first is not set on the step after an episode's end": before.last & ~time_step.first,
                "TimeStep.first is set within an episode": ~before.last & time_step.first,
                "TimeStep.reward is not 0 where first": time_step.first & (time_step.reward != 0),
                "TimeStep.reward is not finite": ~jnp.isfinite(time_step.reward),
            }
            if allowed := [jnp.any(m, axis=-1) for m in jax.tree.leaves(time_step.action_mask)]:
                wrong["TimeStep.action_mask allows nothing"] = ~jnp.all(jnp.stack(allowed), axis=0)
            return (state, time_step), (wrong, {path: ~ok for path, ok in contained(time_step).items()})

        first = {"TimeStep.first is not set by reset": ~time_step.first, "reset gives an end": time_step.last}
        outside = {path: ~ok for path, ok in contained(time_step).items()}
        wrong = jax.lax.scan(one, (state, time_step), jax.random.split(key_steps, steps))[1]
        return jax.tree.map(jnp.any, ((first, outside), wrong))

    (first, outside_first), (wrong, outside) = jax.device_get(rollout(resetting, key))
    problems = [line for line, bad in {**first, **wrong}.items() if bad]
    for when, flags in (("reset", outside_first), ("step", outside)):
        for path, bad in flags.items():
            if bad:
                problems.append(f"{when}: TimeStep.observation{path} leaves the space {env.observation_space}")
    return problems
