"""A policy's life in an environment, as a stream of rows."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.parallel import rollout as ro
from jaxrl.policy import Policy
from jaxrl.types import Environment, HostRecipe, Trajectory
from jaxrl.watchdog import STEP_TIMEOUT, Supervised

_CHUNK_BYTES, _CHUNK_ROWS = 1 << 25, 512  # of all environments; of each


def play(
    policy: Policy, env: Environment | HostRecipe, *, env_index: np.ndarray, all_envs: int, seed: int, explore: bool
) -> Iterator[Trajectory]:
    """Rows `[T, B, ...]`, one stretch after another, without end; of the episodes that `evaluate` plays.

    JAX environments run in one compiled program a stretch, and the next runs while the one before is looked at. Host
    environments are stepped, and closed with the iterator.

    Args:
      env_index: which of `all_envs` environments are played here `[B]`, one after the other.
    """
    num_envs, first_env = len(env_index), int(env_index[0])
    length = _length(policy, num_envs)
    key = keys.evaluation_key(jax.random.key(seed))
    indices = jnp.asarray(env_index, jnp.int32)
    roots = keys.environment_keys(key, indices), keys.policy_keys(key, indices)
    carry = jax.vmap(lambda index: policy.algo.initial_carry(policy.spec, index, all_envs))(indices)
    if isinstance(env, Environment):
        yield from _play_compiled(policy, env, roots, carry, length, explore)
    else:
        host = Supervised(env, num_envs, keys.evaluation_seed(seed), first_env, step_timeout=STEP_TIMEOUT)
        yield from _play_on_host(policy, host, roots[1], carry, length, explore)


def _length(policy, num_envs):
    """Rows of a stretch, so that it takes a bounded part of the memory."""
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // (ro.row_bytes(policy.spec) * num_envs)))


# --- in JAX ----------------------------------------------------------------------------------------------------------


def _play_compiled(policy, env, roots, carry, length, explore):
    moment = (jnp.uint32(0), *_begin(env, roots[0], spec=policy.spec), carry)
    program = partial(_stretch, policy.algo, policy.actor, env, roots)
    options = {"spec": policy.spec, "length": length, "explore": explore}
    rows, moment = program(moment, **options)
    while True:
        following, moment = program(moment, **options)
        yield jax.device_get(rows)
        rows = following


@partial(jax.jit, static_argnames=("spec",))
def _begin(env, env_roots, *, spec):
    env_state, timestep = jax.vmap(env.reset)(keys.reset_keys(env_roots))
    return env_state, ro.first_timestep(timestep, spec)


@partial(jax.jit, static_argnames=("spec", "length", "explore"))
def _stretch(algo, actor, env, roots, moment, *, spec, length, explore):
    tick, *moment = moment
    env_roots, act_roots = roots

    def step(moment, tick_keys):
        env_state, timestep, carry = moment
        env_keys, act_keys = tick_keys
        output = algo.act(actor, timestep, carry, act_keys, spec=spec, explore=explore)
        env_state, following = jax.vmap(env.step)(env_state, output.action, env_keys)
        following = ro.with_previous_action(following, output.action)
        return (env_state, following, output.carry), (timestep, output.action)

    moment_keys = keys.tick_keys(env_roots, tick, length), keys.tick_keys(act_roots, tick, length)
    moment, (timesteps, action) = jax.lax.scan(step, tuple(moment), moment_keys)
    return ro.bare(_rows(timesteps, moment[1], action)), (tick + jnp.uint32(length), *moment)


def _rows(timesteps, final, action):
    return ro.assemble(timesteps, final, action, {}, carry=(), final_carry=(), statistics=(), whole_episodes=False).rows


# --- on the host -----------------------------------------------------------------------------------------------------


def _play_on_host(policy, host, act_roots, carry, length, explore):
    try:
        shown, tick = host.reset(), 0
        timestep = ro.first_timestep(jax.tree.map(jnp.asarray, shown), policy.spec)
        while True:
            timesteps, actions = [], []
            for _ in range(length):
                output = _act(
                    policy.algo,
                    policy.actor,
                    timestep,
                    carry,
                    act_roots,
                    np.uint32(tick),
                    spec=policy.spec,
                    explore=explore,
                )
                action = jax.device_get(output.action)
                timesteps.append(shown)
                actions.append(action)
                shown = host.step(action)
                timestep, carry, tick = _follow(shown, output.action), output.carry, tick + 1
            stacked, action = (
                jax.tree.map(lambda *x: np.stack(x), *timesteps),
                jax.tree.map(lambda *x: np.stack(x), *actions),
            )
            yield ro.bare(jax.device_get(_host_rows(stacked, shown, action)))
    finally:
        host.close()


@partial(jax.jit, static_argnames=("spec", "explore"))
def _act(algo, actor, timestep, carry, roots, tick, *, spec, explore):
    return algo.act(actor, timestep, carry, keys.tick_keys(roots, tick, 1)[0], spec=spec, explore=explore)


_follow = jax.jit(ro.with_previous_action)
_host_rows = jax.jit(_rows)
