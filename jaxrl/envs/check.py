"""A check that environments follow the protocol of `jaxrl.core.types.Environment` or `HostRecipe`."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys, spaces
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, EnvironmentContractError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed, odd_discounts
from jaxrl.core.types import Environment, PyTree, TimeStep, num_agents
from jaxrl.envs.agents import as_rows
from jaxrl.envs.host.check import DISCOUNT_RANGE, check_recipe
from jaxrl.envs.parameters import unwrapped
from jaxrl.envs.registry import EnvironmentLike, as_environment
from jaxrl.envs.wrappers import with_auto_reset

_BATCH = 4


@interruptible
@checked(steps={"low": 0})
def check_env(env: EnvironmentLike, *, steps: int = 100, seed: int = 0) -> None:
    """Check `env` in every way that training uses it: traced, compiled, mapped and scanned; or built and stepped.

    Args:
      env: the environment, with or without auto-reset, or a recipe of host environments; also a
        name, or a Gymnasium environment, its class or a function that makes one.
      steps: number of random steps of each of 4 environments; 0 compiles nothing, and only checks types and shapes.
      seed: the seed of the actions and resets, from 0 to 2^63 - 1.

    Raises:
      EnvironmentContractError: lists all problems, one line each, with the leaf's name.
    """
    seed = checked_seed("seed", seed)
    env = as_environment(env)
    if not isinstance(env, Environment) and callable(getattr(env, "build", None)):
        return check_recipe(env, steps, seed)
    env = _checked(env)
    check_types(env, weak=True)
    if steps == 0:
        return
    env, key = _rows(env), keys.root_key(seed)
    _raise(env, _determinism_problems(env, key))
    _raise(env, _rollout_problems(env, key, steps))


def check_types(env: Environment, *, weak: bool) -> None:
    """Check types and shapes, and that `env` can be traced; the part of `check_env` that compiles nothing.

    Args:
      env: the environment.
      weak: also refuse weakly typed leaves; training accepts them, because a loop makes them strong.

    Raises:
      EnvironmentContractError: lists all problems, one line each, with the leaf's name.
    """
    env, key = _rows(_checked(env)), keys.root_key(0)

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


def _rows(env: Environment) -> Environment:
    """Return the environment as one row of a batch; several agents become rows, with auto-reset."""
    agents, base = num_agents(env), unwrapped(env)
    if type(agents) is not int or agents < 1:
        _raise(env, [f"num_agents is {agents!r:.80}; a whole number of at least 1 is required"])
    if agents > 1:
        shape = jnp.shape(_traced(base, "reset", base.reset, keys.root_key(0))[1].reward)
        if shape != (agents,):
            line = f"it has num_agents={agents}, but the rewards of its time steps have the shape {shape}: "
            _raise(env, [f"{line}({agents},) is required of several agents; else give the attribute another name"])
    return as_rows(env)


def _raise(env: Any, problems: list[str]) -> None:
    if problems:
        name = getattr(env, "name", None) if not isinstance(env, type) else None
        name = name if isinstance(name, str) else (env if isinstance(env, type) else type(env)).__name__
        raise EnvironmentContractError(f"{name} breaks the contract of environments:\n" + "\n".join(problems))


def _checked(env: Any) -> Environment:
    """Return the environment; raise if anything required is missing."""
    _raise(env, _static_problems(env))
    return env


_METHODS = {"reset": ("key",), "step": ("state", "action", "key")}
_MISSING = object()


def _static_problems(env: Any) -> list[str]:
    if isinstance(env, type):
        return [f"it is a class; pass one environment, {env.__name__}()"]
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
        problems.append(f"name is {found['name']!r:.80}; a text such as 'my:Name' is required")
    if not isinstance(found["resets"], bool):
        problems.append(f"resets is {found['resets']!r:.80}; True or False is required, as an attribute or a property")
    for name in ("observation_space", "action_space"):
        if not isinstance(found[name], spaces.Space):
            problems.append(f"{name} is {found[name]!r}, which is no space of jaxrl.spaces")
    problems += [line for name in _METHODS for line in _signature_problems(name, found[name])]
    leaves, tree = jax.tree.flatten(env)
    if len(leaves) == 1 and leaves[0] is env:
        problems.append("it is not a pytree; make it a flax.struct.dataclass")
    try:
        hash(tree)
    except TypeError as error:
        problems.append(f"its static fields are not hashable ({error}); jit needs them to be")
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
    """Describe an error in an environment's own code, and where it was raised."""
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
        if "key<" in reason:  # such as two kinds of keys in one `where`, of which JAX names only one
            line += f"; {_KEYS}"
        raise EnvironmentContractError(f"{env.name} breaks the contract of environments:\n{line}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
        made = "jaxrl.envs.episode.restart" if method == "reset" else "jaxrl.envs.episode.transition"
        _raise(
            env, [f"{method} returns {_returned(result)}; the pair (state, TimeStep) is required ({made} makes one)"]
        )
    return result


def _returned(result):
    if not isinstance(result, tuple):
        return "nothing" if result is None else _kind(result)
    return f"{len(result)} values ({', '.join(map(_kind, result))})"


def _kind(value):
    return _describe(value) if hasattr(value, "dtype") else type(value).__name__


def _time_step_problems(env: Environment, method: str, time_step: TimeStep) -> list[str]:
    problems = []
    required = {"reward": "float32", "terminated": "bool", "truncated": "bool", "first": "bool"}
    optional = {"discount": "float32", "active": "bool"}
    required |= {name: dtype for name, dtype in optional.items() if getattr(time_step, name) is not None}
    for name, dtype in required.items():
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
    """Replace typed keys by their words, to compare them."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _are_keys(x) else x, tree)


def _rollout_problems(env: Environment, key: jax.Array, steps: int) -> list[str]:
    resetting, batch, alone = with_auto_reset(env), _BATCH * num_agents(env), num_agents(env) == 1

    def misfits(time_step):
        found = {}
        for path, space, leaf in spaces.leaves_with_path(env.observation_space, time_step.observation):
            nothing = jnp.isnan(leaf).any(axis=tuple(range(1, leaf.ndim)))
            found[f"{path} holds NaN"] = nothing
            found[f"{path} leaves the space {space}"] = ~jax.vmap(space.contains)(leaf) & ~nothing
        return found

    @jax.jit
    def rollout(env, key):
        key_reset, key_steps = jax.random.split(key)
        state, time_step = jax.vmap(env.reset)(jax.random.split(key_reset, batch))

        def one(carry, key):
            state, before = carry
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(env.action_space.sample)(jax.random.split(key_action, batch))
            state, time_step = jax.vmap(env.step)(state, action, jax.random.split(key_step, batch))
            wrong = {
                "TimeStep.terminated and TimeStep.truncated are both set": time_step.terminated & time_step.truncated,
                "TimeStep.first is not set on the step after an episode's end": before.last
                & ~(time_step.first | (time_step.last & (not alone))),
                "TimeStep.first is set within an episode": ~before.last & time_step.first,
                "TimeStep.reward is not 0 where first": time_step.first & (time_step.reward != 0),
                "TimeStep.reward is not finite": ~jnp.isfinite(time_step.reward),
            }
            if (discount := time_step.discount) is not None:
                wrong[DISCOUNT_RANGE] = ~time_step.terminated & odd_discounts(discount)
            if allowed := [jnp.any(m, axis=-1) for m in jax.tree.leaves(time_step.action_mask)]:
                wrong["TimeStep.action_mask allows nothing"] = ~jnp.all(jnp.stack(allowed), axis=0)
            return (state, time_step), (wrong, misfits(time_step))

        first = {"TimeStep.first is not set by reset": ~time_step.first, "reset gives an end": time_step.last}
        outside = misfits(time_step)
        wrong = jax.lax.scan(one, (state, time_step), jax.random.split(key_steps, steps))[1]
        return jax.tree.map(jnp.any, ((first, outside), wrong))

    (first, outside_first), (wrong, outside) = jax.device_get(rollout(resetting, key))
    problems = [line for line, bad in {**first, **wrong}.items() if bad]
    for when, flags in (("reset", outside_first), ("step", outside)):
        problems += [f"{when}: TimeStep.observation{line}" for line, bad in flags.items() if bad]
    return problems
