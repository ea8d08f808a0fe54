"""Generators of trajectory rows, which contain the steps of a policy in an environment."""

from collections.abc import Generator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys
from jaxrl.core.types import Environment, HostRecipe, Trajectory
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, Supervised
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps, complete, in_this_thread, unroll
from jaxrl.run.policies.policy import Policy

_CHUNK_BYTES, _CHUNK_ROWS = 1 << 25, 512  # limits of a chunk: bytes over all environments, and rows per environment


def play(
    policy: Policy, env: Environment | HostRecipe, *, env_index: np.ndarray, all_envs: int, seed: int, explore: bool
) -> Generator[Trajectory, None, None]:
    """Yield consecutive chunks of rows, of shape [T, B, ...], of the same episodes as in `evaluate`, endlessly.

    JAX environments run in one compiled call per chunk of rows, and the next chunk runs while the caller processes the
    previous one. Host environments are closed when the generator is closed.

    Args:
      policy: the policy to play.
      env, seed, explore: as for `evaluate`.
      env_index: indices of the environments to play, of shape [B]: consecutive numbers below `all_envs`.
      all_envs: number of environments over all processes.
    """
    num_envs, first_env = len(env_index), int(env_index[0])
    length = _length(policy, num_envs)
    key = keys.evaluation_key(keys.root_key(seed))
    indices = jnp.asarray(env_index, jnp.int32)
    if isinstance(env, Environment):
        yield from _play_compiled(policy, env, key, indices, all_envs, length, explore)
    else:
        host = Supervised(env, num_envs, keys.evaluation_seed(seed), first_env, step_timeout=STEP_TIMEOUT)
        steps = HostSteps(policy.spec, all_envs, num_envs, length, explore)
        yield from _play_on_host(policy, host, steps, key, indices)


def _length(policy, num_envs):
    """Return the number of rows per chunk, limited by memory."""
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // (ro.row_bytes(policy.spec) * num_envs)))


# --- in JAX ----------------------------------------------------------------------------------------------------------


def _play_compiled(policy, env, key, env_index, num_envs, length, explore):
    roots = keys.environment_keys(key, env_index), keys.policy_keys(key, env_index)
    acting = _begin(policy.algo, env, roots[0], env_index, spec=policy.spec, num_envs=num_envs)
    program = partial(_stretch, policy.algo, policy.actor, env, roots)
    options = {"spec": policy.spec, "length": length, "explore": explore}
    rows, position = program((jnp.uint32(0), acting), **options)
    while True:
        following, position = program(position, **options)
        yield jax.device_get(rows)
        rows = following


_begin = jax.jit(ro.begin, static_argnames=("spec", "num_envs"))


@partial(jax.jit, static_argnames=("spec", "length", "explore"))
def _stretch(algo, actor, env, roots, position, *, spec, length, explore):
    tick, acting = position
    step_keys = keys.tick_keys(roots[0], tick, length), keys.tick_keys(roots[1], tick, length)
    acting, rollout = ro.unroll(algo, actor, env, acting, step_keys, spec=spec, explore=explore)
    return ro.bare(rollout.rows, spec), (tick + jnp.uint32(length), acting)


# --- on the host -----------------------------------------------------------------------------------------------------


def _play_on_host(policy, host, steps, key, env_index):
    try:
        acting = steps.begin(policy.algo, host.reset(), key, env_index)
        while True:
            rollout = complete(unroll(steps, policy.algo, policy.actor, acting, in_this_thread(host.step)))
            yield jax.device_get(_bare_rows(rollout, policy.spec))
    finally:
        host.close()


_bare_rows = jax.jit(lambda rollout, spec: ro.bare(rollout.rows, spec), static_argnums=1)
