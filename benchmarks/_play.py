"""Random play of JAX environments in one compiled program, for benchmarks of environments without training."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Functions(NamedTuple):
    """The functions of one environment.

    Attributes:
      reset: from a key to a state.
      step: from a state, an action and a key to the next state and what there is to see: a pytree of arrays with the
        observation, the reward and the ending.
      resetting_step: as `step`, with an automatic reset of the suite's own; None if it has none.
    """

    reset: Callable[[jax.Array], Any]
    step: Callable[[Any, Any, jax.Array], tuple[Any, Any]]
    resetting_step: Callable[[Any, Any, jax.Array], tuple[Any, Any]] | None = None


def of_jaxrl(env: Any) -> Functions:
    """Return the functions of an environment of jaxrl, raw or with automatic resets."""

    def step(state, action, key):
        state, shown = env.step(state, action, key)
        return state, (shown.observation, shown.reward, shown.terminated, shown.truncated)

    return Functions(lambda key: env.reset(key)[0], step)


def plays(functions: Functions, action_space: Any, num_envs: int, steps: int) -> Callable[[], float]:
    """Return a function that plays on for `steps` steps and returns its seconds; compiled and warm.

    All observations, rewards and endings are added up, so that none is left out of the program.
    """

    @jax.jit
    def rollout(state, key):
        def one(state, key):
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(action_space.sample)(jax.random.split(key_action, num_envs))
            state, seen = jax.vmap(functions.step)(state, action, jax.random.split(key_step, num_envs))
            return state, sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(seen))

        return jax.lax.scan(one, state, jax.random.split(key, steps))

    state = jax.jit(jax.vmap(functions.reset))(jax.random.split(jax.random.key(0), num_envs))
    # States begin with Python's numbers, whose types a scan does not keep.
    first = jax.tree.map(lambda x: x[0], state)
    kept = jax.eval_shape(
        lambda state, key: functions.step(state, action_space.sample(key), key)[0], first, jax.random.key(0)
    )
    is_key = lambda kind: jnp.issubdtype(kind, jax.dtypes.extended)  # noqa: E731
    state = jax.tree.map(lambda x, to: x if is_key(to.dtype) else x.astype(to.dtype), state, kept)
    keys = iter(jax.random.split(jax.random.key(1), 10_000))

    def play() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(rollout(state, next(keys)))
        return time.perf_counter() - start

    play()
    return play


def at_least(seconds: float, play: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls `play` until it took so many seconds, and returns the seconds of one call."""

    def several() -> float:
        taken = [play()]
        while sum(taken) < seconds:
            taken.append(play())
        return sum(taken) / len(taken)

    return several


def progress(text: str) -> None:
    """Print a progress message."""
    print(text, file=sys.stderr, flush=True)
