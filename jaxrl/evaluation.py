"""Evaluation: a fixed number of complete episodes of every environment, with everything about the policy frozen."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import keys
from jaxrl.parallel import rollout as ro
from jaxrl.types import ActorState, Algorithm, Environment, EnvSpec, HostRecipe
from jaxrl.watchdog import STEP_TIMEOUT, Supervised


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      returns, lengths: one entry a complete episode.
      unfinished: episodes that the step limit cut off; they are not among `returns`.
    """

    returns: np.ndarray
    lengths: np.ndarray
    unfinished: int

    @property
    def return_mean(self) -> float:
        return float(np.mean(self.returns)) if self.returns.size else float("nan")

    @property
    def return_std(self) -> float:
        return float(np.std(self.returns)) if self.returns.size else float("nan")

    @property
    def episodes(self) -> int:
        return int(self.returns.size)

    def metrics(self) -> dict[str, float]:
        """By the names that logs and `result.json` use."""
        return {
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "length_mean": float(np.mean(self.lengths)) if self.lengths.size else float("nan"),
            "episodes": self.episodes,
            "unfinished": self.unfinished,
        }


def layout(episodes: int, num_envs: int | None) -> tuple[int, int]:
    """How many environments play, and how many episodes each: at least `episodes` in all."""
    num_envs = min(episodes, 128) if num_envs is None else min(num_envs, episodes)
    return num_envs, -(-episodes // num_envs)


def evaluate(
    algo: Algorithm,
    actor: ActorState,
    env: Environment | HostRecipe,
    spec: EnvSpec,
    *,
    seed: int = 0,
    episodes: int = 128,
    num_envs: int | None = None,
    max_steps: int = 27_000,
    explore: bool = False,
    step_timeout: float = STEP_TIMEOUT,
) -> Evaluation:
    """Plays complete episodes, the same number in every environment, so that short ones are not favoured.

    Args:
      algo: the algorithm, its schedules resolved.
      actor: what acting needs; its statistics stay as they are.
      env: where to play; a JAX environment that resets by itself, or a recipe of host environments.
      spec: of `env`.
      seed: of episodes and of action sampling; training with the same one meets other episodes.
      episodes: how many, rounded up to a multiple of the environments.
      num_envs: environments side by side; None: as many as episodes, at most 128.
      max_steps: rows of each environment and episode; what is not finished then is counted, not averaged in.
      explore: sample actions as in training instead of taking the best.
      step_timeout: seconds that host environments have for one step or reset.

    Raises:
      EnvironmentFailedError: host environments hang, or failed too often.
    """
    num_envs, quota = layout(episodes, num_envs)
    key = _root(seed)
    limit = max_steps * quota
    if isinstance(env, Environment):
        env, key, steps = _beside(actor, (env, key, np.int32(limit)))
        scores = _play(algo, actor, env, key, steps, spec=spec, num_envs=num_envs, quota=quota, explore=explore)
        returns, lengths, done = jax.device_get(scores)
    else:
        returns, lengths, done = _play_on_host(
            algo, actor, env, key, limit, spec, num_envs, quota, explore, seed, step_timeout
        )
    counts = np.arange(quota)[:, None] < done[None]
    return Evaluation(returns[counts], lengths[counts], int(num_envs * quota - counts.sum()))


@functools.lru_cache(maxsize=8)
def _root(seed):
    """The root key of evaluations; kept, because making a key moves its seed to the device."""
    return keys.evaluation_key(jax.random.key(seed))


def _beside(actor, tree):
    """`tree` on the devices that hold the actor, moved there on purpose rather than by the call that needs it."""
    held = [x.sharding for x in jax.tree.leaves(actor) if isinstance(x, jax.Array)]
    return jax.device_put(tree, held[0] if held else None)


def _record(scores, timestep):
    """Writes down the episodes that ended at `timestep`; later ones than the quota are not."""
    returns, lengths, done = scores
    quota, num_envs = returns.shape
    complete = timestep.episode.complete
    ended = (timestep.last if complete is None else complete) & (done < quota)
    slot = jnp.minimum(done, quota - 1)
    column = jnp.arange(num_envs, dtype=jnp.int32)
    returns = returns.at[slot, column].set(jnp.where(ended, timestep.episode.returns, returns[slot, column]))
    lengths = lengths.at[slot, column].set(jnp.where(ended, timestep.episode.length, lengths[slot, column]))
    return returns, lengths, done + ended.astype(jnp.int32)


def _no_scores(num_envs, quota):
    return (
        jnp.zeros((quota, num_envs), jnp.float32),
        jnp.zeros((quota, num_envs), jnp.int32),
        jnp.zeros((num_envs,), jnp.int32),
    )


def _key_roots(key, num_envs):
    env_index = jnp.arange(num_envs, dtype=jnp.int32)
    return keys.environment_keys(key, env_index), keys.policy_keys(key, env_index), env_index


def play(
    algo: Algorithm,
    actor: ActorState,
    env: Environment,
    key: jax.Array,
    limit: jax.Array,
    *,
    spec: EnvSpec,
    num_envs: int,
    quota: int,
    explore: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plays `quota` episodes in each of `num_envs` environments, or `limit` rows of each; pure.

    Returns:
      Returns and lengths, each (quota, num_envs), and how many of them are filled, (num_envs,).
    """
    env_roots, act_roots, env_index = _key_roots(key, num_envs)
    env_state, timestep = jax.vmap(env.reset)(keys.reset_keys(env_roots))
    timestep = ro.first_timestep(timestep, spec)
    carry = jax.vmap(lambda index: algo.initial_carry(spec, index, num_envs))(env_index)

    def unfinished(moment):
        tick, *_, scores = moment
        return (tick < limit) & jnp.any(scores[2] < quota)

    def step(moment):
        tick, env_state, timestep, carry, scores = moment
        act_keys = keys.tick_keys(act_roots, tick.astype(jnp.uint32), 1)[0]
        output = algo.act(actor, timestep, carry, act_keys, spec=spec, explore=explore)
        env_keys = keys.tick_keys(env_roots, tick.astype(jnp.uint32), 1)[0]
        env_state, following = jax.vmap(env.step)(env_state, output.action, env_keys)
        following = ro.with_previous_action(following, output.action)
        return tick + 1, env_state, following, output.carry, _record(scores, following)

    start = (jnp.int32(0), env_state, timestep, carry, _no_scores(num_envs, quota))
    return jax.lax.while_loop(unfinished, step, start)[-1]


_play = jax.jit(play, static_argnames=("spec", "num_envs", "quota", "explore"))


@partial(jax.jit, static_argnames=("spec", "explore"))
def _act_on_host(algo, actor, timestep, carry, roots, tick, *, spec, explore):
    return algo.act(actor, timestep, carry, keys.tick_keys(roots, tick, 1)[0], spec=spec, explore=explore)


_record_on_host = jax.jit(_record)
_follow_on_host = jax.jit(ro.with_previous_action)


def _play_on_host(algo, actor, env, key, limit, spec, num_envs, quota, explore, seed, step_timeout):
    _, act_roots, env_index = _key_roots(key, num_envs)
    host = Supervised(env, num_envs, keys.evaluation_seed(seed), step_timeout=step_timeout)
    try:
        timestep = ro.first_timestep(jax.tree.map(jnp.asarray, host.reset()), spec)
        carry = jax.vmap(lambda index: algo.initial_carry(spec, index, num_envs))(env_index)
        scores, tick = _no_scores(num_envs, quota), 0
        while tick < limit and np.any(np.asarray(scores[2]) < quota):
            output = _act_on_host(algo, actor, timestep, carry, act_roots, jnp.uint32(tick), spec=spec, explore=explore)
            timestep = _follow_on_host(host.step(jax.device_get(output.action)), output.action)
            carry, scores, tick = output.carry, _record_on_host(scores, timestep), tick + 1
        return jax.device_get(scores)
    finally:
        host.close()
