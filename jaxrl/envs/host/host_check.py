"""Checks of time steps against the environment contract, and the part of `check_env` for host environments."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys, spaces
from jaxrl.core.errors import EnvironmentContractError
from jaxrl.core.host_types import AsyncRecipe, only_instance
from jaxrl.core.limits import odd_discounts
from jaxrl.core.types import HostRecipe, PyTree, TimeStep

_BATCH, _READY = 4, 2
_ODD_DISCOUNT = (
    "discount is 0 or outside [-1, 1] where the task continues; set terminated where it ends, and use negative "
    "discounts only for turns of two players"
)


def broken(env: Any, problems: Iterable[str]) -> EnvironmentContractError:
    """Return an error that lists the problems of an environment, one per line."""
    own = env if isinstance(env, type) else type(env)
    name = getattr(env, "name", None) if own is not env else None
    heading = f"{name if isinstance(name, str) else own.__name__} breaks the environment contract:"
    return EnvironmentContractError("\n".join([heading, *dict.fromkeys(problems)]))


def raise_problems(env: Any, problems: Sequence[str]) -> None:
    """Raise an EnvironmentContractError that lists the problems of an environment, if there are any."""
    if problems:
        raise broken(env, problems)


def space_problems(env: Any) -> list[str]:
    """Return one error line per space of an environment that is not a space of jaxrl."""
    found = {name: getattr(env, name, None) for name in ("observation_space", "action_space")}
    return [
        f"{name} is {space!r}, which is not a space of jaxrl.spaces"
        for name, space in found.items()
        if not isinstance(space, spaces.Space)
    ]


def describe(leaf: Any) -> str:
    """Return the dtype and shape of an array, "nothing" for None, or the repr of anything else."""
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)


def type_problems(call: str, timestep: TimeStep[Any], space: spaces.Space, batch: tuple[int, ...] = ()) -> list[str]:
    """Return one error line per part of a time step that is missing, unknown, or of a wrong shape or type.

    Args:
      call: "reset" or "step".
      timestep: the time step to check: the output of `jax.eval_shape` for one JAX environment, or NumPy arrays for a
        batch of host environments.
      space: the observation space.
      batch: the batch shape: (num_envs,) for host environments, () for a JAX environment.
    """
    dtypes = {"reward": "float32", "terminated": "bool", "truncated": "bool", "first": "bool"}
    optional = {"discount": "float32", "active": "bool"}
    dtypes |= {name: dtype for name, dtype in optional.items() if getattr(timestep, name) is not None}
    dtypes |= {"episode.returns": "float32", "episode.length": "int32"} if batch else {}
    forms = {f".{name}": f"{dtype}{[*batch]}" for name, dtype in dtypes.items()}
    forms |= {f".info[{name!r}]": f"float32{[*batch]}" for name in timestep.info or ()}
    for path, part in spaces.leaves_with_path(space):
        dtype = part.dtype if batch else jax.dtypes.canonicalize_dtype(part.dtype)
        forms[f".observation{path}"] = f"{dtype.name}{[*batch, *part.shape]}"
    found, kind = by_path(timestep), np.ndarray if batch else jax.ShapeDtypeStruct
    problems = [
        f"{call}: TimeStep{path} is {describe(found.get(path))}; {'numpy of ' * len(batch)}{form} is required"
        for path, form in forms.items()
        if not isinstance(found.get(path), kind) or describe(found[path]) != form
    ]
    extra = [path for path in found if path.startswith(".observation") and path not in forms]
    return problems + [f"{call}: TimeStep{path} is not in the observation space" for path in extra]


def row_problems(space: spaces.Space, rows: TimeStep[Any], ended: Any, *, alone: bool = True) -> dict[str, Any]:
    """Return a dictionary from each possible problem of time steps to a bool array [B] that is True where it occurs.

    Args:
      space: the observation space.
      rows: time steps [B] of JAX or NumPy arrays, whose types are correct.
      ended: bool [B], True if the previous row ended its episode or there is no previous row.
      alone: whether the environment has a single agent; otherwise, an agent may repeat its last row until all agents
        have ended.
    """
    wrong = {
        "terminated and TimeStep.truncated are both set": rows.terminated & rows.truncated,
        "first is set together with terminated or truncated": rows.first & rows.last,
        "first is not set where an episode begins": ended & ~(rows.first if alone else rows.first | rows.last),
        "first is set within an episode": ~ended & rows.first,
        "reward is not 0 where first is set": rows.first & (rows.reward != 0),
        "reward is not finite": ~(abs(rows.reward) < np.inf),
    }
    if rows.discount is not None:
        wrong[_ODD_DISCOUNT] = ~rows.terminated & odd_discounts(rows.discount)
    for path, mask in jax.tree.leaves_with_path(rows.action_mask):
        wrong[f"action_mask{jax.tree_util.keystr(path)} allows nothing"] = ~mask.any(axis=-1)
    for path, part, leaf in spaces.leaves_with_path(space, rows.observation):
        nan = jnp.isnan(leaf).any(axis=tuple(range(1, leaf.ndim)))
        wrong[f"observation{path} contains NaN"] = nan
        wrong[f"observation{path} is outside its space {part}"] = ~jax.vmap(part.contains)(leaf) & ~nan
    return wrong


def lines(call: str, wrong: dict[str, Any]) -> list[str]:
    """Return one error line per problem in a result of `row_problems` that occurs."""
    return [f"{call}: TimeStep.{line}" for line, where in wrong.items() if np.any(where)]


def different(one: PyTree, other: PyTree) -> list[str]:
    """Return the paths of the leaves that differ between two trees of the same structure."""
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    ]


def check_recipe(recipe: HostRecipe, steps: int, seed: int) -> None:
    """Check a recipe by building 4 environments twice with the same seed, and stepping both batches `steps` times.

    The actions are random, but the same for both batches. If the recipe has only one instance, a single environment is
    built. Asynchronous environments are built a third time and stepped as they become ready; they must return the same
    time steps as the batches that were stepped synchronously.

    Raises:
      EnvironmentContractError: the recipe breaks the contract; the message lists problems, one per line.
    """
    raise_problems(recipe, space_problems(recipe))
    batch = _BATCH if only_instance(recipe) is None else 1
    sample, key = jax.jit(jax.vmap(recipe.action_space.sample)), keys.root_key(seed)
    actions = [jax.device_get(sample(of_step)) for of_step in jax.random.split(key, (steps, batch))]
    timesteps, copies = _play(recipe, actions, seed, batch)
    space = recipe.observation_space
    problems = type_problems("reset", timesteps[0], space, (batch,))
    for number, timestep in enumerate(timesteps[1:], 1):
        problems += type_problems("step", timestep, space, (batch,))
        if names := sorted(by_path(timestep).keys() ^ by_path(timesteps[0]).keys()):
            problems.append(
                f"TimeStep{names[0]} is in only one of reset and step {number}; always return the same parts"
            )
    raise_problems(recipe, problems)
    problems = [
        f"TimeStep{path} was overwritten after it had been returned; return a new array every time"
        for timestep, copy in zip(timesteps, copies, strict=True)
        for path in different(timestep, copy)
    ]
    problems += lines("reset", row_problems(space, copies[0], np.ones(batch, bool)))
    if steps:
        rows = jax.tree.map(lambda *x: np.concatenate(x), *copies)
        later = jax.tree.map(lambda x: x[batch:], rows)
        problems += lines("step", row_problems(space, later, rows.last[:-batch]))
    raise_problems(recipe, problems)
    again, _ = _play(recipe, actions, seed, batch)
    problems = [
        f"TimeStep{path} differs between two batches with the same seed and actions, first at step {number}"
        for number, (a, b) in enumerate(zip(timesteps, again, strict=True))
        for path in different(a, b)
    ]
    raise_problems(recipe, problems[:1])
    if isinstance(recipe, AsyncRecipe):
        raise_problems(recipe, _asynchronous_problems(recipe, actions, timesteps, seed))


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree, keyed by their paths as strings."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _asynchronous_problems(
    recipe: AsyncRecipe, actions: list[PyTree], timesteps: list[TimeStep[np.ndarray]], seed: int
) -> list[str]:
    """Step four environments as they become ready, two at a time; return the first difference from `timesteps`."""
    host = recipe.build_async(_BATCH, _READY, seed)
    taken, at_work = np.zeros(_BATCH, np.int32), set(range(_BATCH))  # steps of each environment; busy environments
    try:
        host.async_reset()
        while True:
            env_ids, timestep = host.recv()
            came = set(np.asarray(env_ids).tolist())
            if np.shape(env_ids) != (_READY,) or len(came) != _READY or not came <= at_work:
                return [
                    f"recv returns the indices {env_ids}; {_READY} distinct indices from {sorted(at_work)} are required"
                ]
            rows = [jax.tree.map(lambda x, i=i: x[i], timesteps[taken[i]]) for i in env_ids]
            paths = different(timestep, jax.tree.map(lambda *x: np.stack(x), *rows))
            if paths:
                where = f"environments {env_ids}, steps {taken[env_ids]}"
                return [f"TimeStep{paths[0]} of recv differs from the result of synchronous steps, first at {where}"]
            at_work -= came
            if taken[env_ids].max() == len(actions):
                return []
            chosen = [jax.tree.map(lambda x, i=i: x[i], actions[taken[i]]) for i in env_ids]
            host.send(jax.tree.map(lambda *x: np.stack(x), *chosen), env_ids)
            at_work |= came
            taken[env_ids] += 1
    finally:
        host.close()


def _play(
    recipe: HostRecipe, actions: list[PyTree], seed: int, batch: int
) -> tuple[list[TimeStep[np.ndarray]], list[TimeStep[np.ndarray]]]:
    """Step a new batch with `actions`; return the time steps, and copies that were made immediately after each call."""
    host = recipe.build(batch, seed)
    try:
        if host.num_envs != batch:
            raise_problems(recipe, [f"build({batch}, seed) makes num_envs={host.num_envs} environments, not {batch}"])
        timesteps, copies = [], []
        for action in (None, *actions):
            timestep = host.reset() if action is None else host.step(action)
            timesteps.append(timestep)
            copies.append(jax.tree.map(np.array, timestep))
    finally:
        host.close()
    host.close()  # closing twice must be allowed
    return timesteps, copies
