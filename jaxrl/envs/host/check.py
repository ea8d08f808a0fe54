"""The part of `check_env` for recipes of host environments."""

from typing import Any

import jax
import numpy as np

from jaxrl.core import spaces
from jaxrl.core.errors import EnvironmentContractError
from jaxrl.core.host_types import AsyncRecipe, only_instance
from jaxrl.core.limits import odd_discounts
from jaxrl.core.types import HostRecipe, PyTree, TimeStep

_BATCH, _READY = 4, 2
DISCOUNT_RANGE = (
    "TimeStep.discount is 0, or not in [-1, 1], where the task goes on; terminated says where it ends, and a negative "
    "one is for turns of two players"
)


def check_recipe(recipe: HostRecipe, steps: int, seed: int) -> None:
    """Check a recipe by building 4 environments twice with one seed, and taking `steps` random actions in both.

    If there is only one instance, it is used alone. Asynchronous environments are built once more: those that are ready
    first must return what they return in lockstep.

    Raises:
      EnvironmentContractError: lists all problems, one line each, with the leaf's name.
    """
    problems = [
        f"{name} is {getattr(recipe, name, None)!r}, which is no space of jaxrl.spaces"
        for name in ("observation_space", "action_space")
        if not isinstance(getattr(recipe, name, None), spaces.Space)
    ]
    _raise(recipe, problems)
    rng = np.random.default_rng(seed)
    batch = _BATCH if only_instance(recipe) is None else 1
    actions = [_random_actions(recipe.action_space, (batch,), rng) for _ in range(steps)]
    timesteps, copies = _play(recipe, actions, seed, batch)
    problems = [
        line for number, timestep in enumerate(timesteps) for line in _type_problems(recipe, number, timestep, batch)
    ]
    problems += [
        f"TimeStep.info has {sorted(timestep.info or ())} at step {number}, "
        f"{sorted(timesteps[0].info or ())} at reset: "
        "always give the same names"
        for number, timestep in enumerate(timesteps)
        if (timestep.info or {}).keys() != (timesteps[0].info or {}).keys()
    ]
    _raise(recipe, problems)
    overwritten = [
        f"TimeStep{path} was written to after it had been returned; give a fresh array every time"
        for timestep, copy in zip(timesteps, copies, strict=True)
        for path in _different(timestep, copy)
    ]
    _raise(recipe, overwritten + _row_problems(recipe, copies))
    again, _ = _play(recipe, actions, seed, batch)
    different = [
        f"TimeStep{path} differs between two batches of one seed and the same actions, first at step {number}"
        for number, (a, b) in enumerate(zip(timesteps, again, strict=True))
        for path in _different(a, b)
    ]
    _raise(recipe, different[:1])
    if isinstance(recipe, AsyncRecipe):
        _raise(recipe, _asynchronous_problems(recipe, actions, timesteps, seed))


def _asynchronous_problems(
    recipe: AsyncRecipe, actions: list[PyTree], timesteps: list[TimeStep[np.ndarray]], seed: int
) -> list[str]:
    """Return the first difference between two of four environments at a time and `timesteps`, in lockstep."""
    host = recipe.build_async(_BATCH, _READY, seed)
    taken, at_work = np.zeros(_BATCH, np.int32), set(range(_BATCH))  # steps of each
    try:
        host.async_reset()
        while True:
            env_ids, timestep = host.recv()
            came = set(np.asarray(env_ids).tolist())
            if np.shape(env_ids) != (_READY,) or len(came) != _READY or not came <= at_work:
                return [f"recv gives {env_ids}; {_READY} different ones of {sorted(at_work)} are required"]
            rows = [jax.tree.map(lambda x, i=i: x[i], timesteps[taken[i]]) for i in env_ids]
            paths = _different(timestep, jax.tree.map(lambda *x: np.stack(x), *rows))
            if paths:
                where = f"environments {env_ids}, steps {taken[env_ids]}"
                return [f"TimeStep{paths[0]} of recv is not what environments in step show, first at {where}"]
            at_work -= came
            if taken[env_ids].max() == len(actions):
                return []
            chosen = [jax.tree.map(lambda x, i=i: x[i], actions[taken[i]]) for i in env_ids]
            host.send(jax.tree.map(lambda *x: np.stack(x), *chosen), env_ids)
            at_work |= came
            taken[env_ids] += 1
    finally:
        host.close()


def _raise(recipe: Any, problems: list[str]) -> None:
    if problems:
        name = getattr(recipe, "name", type(recipe).__name__)
        lines = "\n".join(dict.fromkeys(problems))
        raise EnvironmentContractError(f"{name} breaks the contract of host environments:\n{lines}")


def _random_actions(space: spaces.Space, shape: tuple[int, ...], rng: np.random.Generator) -> PyTree:
    """Sample actions uniformly within the bounds, or from a range of width 2 if there are none."""
    return spaces.tree_map(lambda space: _random_arrays(space, (*shape, *space.shape), rng), space)


def _random_arrays(space: spaces.ArraySpace, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if isinstance(space, spaces.Box):
        low = np.where(np.isfinite(space.low), space.low, np.where(np.isfinite(space.high), space.high - 2.0, -1.0))
        high = np.where(np.isfinite(space.high), space.high, low + 2.0)
        return rng.uniform(low, high, shape).astype(space.dtype)
    return rng.integers(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n, size=shape).astype(
        space.dtype
    )


def _play(
    recipe: HostRecipe, actions: list[PyTree], seed: int, batch: int
) -> tuple[list[TimeStep[np.ndarray]], list[TimeStep[np.ndarray]]]:
    """Return the time steps as they were returned, and copies that were made immediately."""
    host = recipe.build(batch, seed)
    try:
        if host.num_envs != batch:
            _raise(recipe, [f"build({batch}, seed) makes num_envs={host.num_envs} environments"])
        timesteps, copies = [], []
        for action in (None, *actions):
            timestep = host.reset() if action is None else host.step(action)
            timesteps.append(timestep)
            copies.append(jax.tree.map(np.array, timestep))
    finally:
        host.close()
    host.close()  # closing twice must be allowed
    return timesteps, copies


def _type_problems(recipe: HostRecipe, number: int, timestep: TimeStep[np.ndarray], batch: int) -> list[str]:
    call = "step" if number else "reset"
    if timestep.episode is None:
        return [f"{call}: TimeStep.episode is None; fill it in, or returns cannot be counted"]
    expected = {
        ".reward": ((), "float32"),
        ".terminated": ((), "bool"),
        ".truncated": ((), "bool"),
        ".first": ((), "bool"),
        ".episode.returns": ((), "float32"),
        ".episode.length": ((), "int32"),
    } | {f".info[{name!r}]": ((), "float32") for name in timestep.info or ()}
    if timestep.discount is not None:
        expected[".discount"] = (), "float32"
    expected |= {
        f".observation{path}": (space.shape, space.dtype.name)
        for path, space in spaces.leaves_with_path(recipe.observation_space)
    }
    found = {}
    for path, leaf in jax.tree.leaves_with_path(timestep):
        found[jax.tree_util.keystr(path)] = leaf
    problems = []
    for path, (shape, dtype) in expected.items():
        leaf = found.get(path)
        is_array = isinstance(leaf, np.ndarray)
        if not is_array or leaf.shape != (batch, *shape) or leaf.dtype.name != dtype:
            got = f"{leaf.dtype}{list(leaf.shape)}" if is_array else "nothing" if leaf is None else type(leaf).__name__
            problems.append(f"{call}: TimeStep{path} is {got}; numpy of {dtype}{[batch, *shape]} is required")
    extra = [path for path in found if path.startswith(".observation") and path not in expected]
    return problems + [f"{call}: TimeStep{path} is not in the observation space" for path in extra]


def _row_problems(recipe: HostRecipe, timesteps: list[TimeStep[np.ndarray]]) -> list[str]:
    problems = []
    ended = np.ones_like(timesteps[0].first)
    for number, timestep in enumerate(timesteps):
        discount = timestep.discount
        wrong = {
            "TimeStep.terminated and TimeStep.truncated are both set": timestep.terminated & timestep.truncated,
            "TimeStep.first and an ending are both set": timestep.first & timestep.last,
            "TimeStep.reward is not 0 where first": timestep.first & (timestep.reward != 0),
            "TimeStep.reward is not finite": ~np.isfinite(timestep.reward),
            DISCOUNT_RANGE: False if discount is None else ~timestep.terminated & odd_discounts(discount),
            "TimeStep.first is set within an episode": timestep.first & ~ended,
            "TimeStep.first is not set by reset"
            if number == 0
            else "TimeStep.first is not set on the step after an episode's end": ended & ~timestep.first,
        }
        problems += [line for line, where in wrong.items() if np.any(where)]
        leaves = jax.tree.leaves(timestep.observation)  # in the order of the space, which is sorted too
        problems += [
            f"TimeStep.observation{path} leaves the space {space}"
            for (path, space), leaf in zip(spaces.leaves_with_path(recipe.observation_space), leaves, strict=True)
            if not _inside(space, leaf)
        ]
        ended = timestep.last
    return problems


def _inside(space: Any, x: np.ndarray) -> bool:
    if isinstance(space, spaces.Box):
        return bool(np.all((x >= space.low) & (x <= space.high)))
    limit = np.asarray(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
    return bool(np.all((x >= 0) & (x < limit)))


def _different(one: TimeStep[np.ndarray], other: TimeStep[np.ndarray]) -> list[str]:
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    ]
