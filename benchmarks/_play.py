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
      step: from a state, an action and a key to the next state and the outputs: a pytree of arrays with the
        observation, the reward and the ending.
      resetting_step: as `step`, with the suite's own automatic reset; None if it has none.
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
    """Return a function that plays `steps` more steps and returns the seconds; compiled and warm.

    All observations, rewards and endings are summed, so that XLA does not remove them.
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
    # Initial states contain Python numbers, whose types a scan would change.
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
    """Return a function that calls `play` for at least a number of seconds, and returns the seconds per call."""

    def several() -> float:
        taken = [play()]
        while sum(taken) < seconds:
            taken.append(play())
        return sum(taken) / len(taken)

    return several


def progress(text: str) -> None:
    """Print a progress message."""
    print(text, file=sys.stderr, flush=True)
