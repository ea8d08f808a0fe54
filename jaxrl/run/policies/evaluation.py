"""Evaluation of frozen policies on a fixed number of complete episodes per environment."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import keys
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import only_instance
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.matching import check_spaces
from jaxrl.core.types import ActorState, Algorithm, Environment, EnvSpec, HostRecipe, PyTree, num_agents
from jaxrl.envs.env_registry import EnvironmentLike, as_environment
from jaxrl.envs.host.watchdog import STEP_TIMEOUT, Supervised
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps, complete, in_this_thread, unroll
from jaxrl.run.policies.opponents import evaluated_rows, opposed
from jaxrl.run.policies.policy import Policy

MAX_STEPS = 27_000  # per episode: half an hour of Atari at 60 frames per second and four frames per step
EPISODES, HOST_EPISODES = 128, 10  # default episodes per evaluation in training, for JAX and host environments
_HOST_STEPS = 8  # steps of host environments between two checks for ended episodes


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, which is false if no episode was played.

    Attributes:
      returns, lengths: one number per complete episode.
      unfinished: number of episodes that reached the step limit, which are not in `returns`.
    """

    returns: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    unfinished: int = 0

    def __bool__(self) -> bool:
        return bool(self.episodes or self.unfinished)

    def __repr__(self) -> str:
        count = f"{self.episodes} episodes" + (f", {self.unfinished} unfinished" if self.unfinished else "")
        return f"Evaluation(return {self.return_mean:.4g} ± {self.return_std:.4g}, {count})"

    @property
    def return_mean(self) -> float:
        return float(np.mean(self.returns)) if self.episodes else math.nan

    @property
    def return_std(self) -> float:
        return float(np.std(self.returns)) if self.episodes else math.nan

    @property
    def episodes(self) -> int:
        return int(self.returns.size)

    def metrics(self) -> dict[str, float]:
        """Return the metrics, keyed by their names in logs and `result.json`."""
        return {
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "length_mean": float(np.mean(self.lengths)) if self.episodes else math.nan,
            "episodes": self.episodes,
            "unfinished": self.unfinished,
        }


def scores_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean return of each evaluation in the metrics of a run, keyed by step."""
    name = "evaluation/return_mean"
    return {row["step"]: row[name] for row in rows if name in row}


def default_episodes(env: Environment | HostRecipe) -> int:
    """Return the default number of episodes per evaluation, fewer for host environments."""
    return EPISODES if isinstance(env, Environment) else HOST_EPISODES


def layout(episodes: int, num_envs: int | None = None, agents: int = 1) -> tuple[int, int]:
    """Return `(num_envs, episodes per environment)`, with `num_envs` rounded up to a multiple of `agents`."""
    num_envs = min(episodes, 128) if num_envs is None else min(num_envs, episodes)
    num_envs = -(-num_envs // agents) * agents
    return num_envs, -(-episodes // num_envs)


def episodes_problems(name: str, episodes: int, num_envs: int | None = None, max_steps: int = MAX_STEPS) -> list[str]:
    """Return a list that contains an error message, with the argument's `name`, if `episodes` is too large."""
    num_envs, quota = layout(episodes, num_envs)
    most = (2**31 - 1) // (max_steps + 1)  # episodes per environment, because steps are counted in 32 bits
    if quota <= most:
        return []
    return [f"{name}={episodes} is too many for {num_envs} environments; at most {most * num_envs:,} can be played"]


@interruptible
@checked(episodes={"low": 1}, num_envs={"low": 1}, max_steps={"low": 0}, step_timeout={"above": 0})
def evaluate(
    algo: Algorithm,
    actor: ActorState,
    env: EnvironmentLike,
    spec: EnvSpec,
    *,
    seed: int = 0,
    episodes: int = 128,
    num_envs: int | None = None,
    max_steps: int = MAX_STEPS,
    explore: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    opponent: Policy | str | os.PathLike | None = None,
) -> Evaluation:
    """Evaluate a policy on the same number of complete episodes per environment, so that short ones are not favored.

    Args:
      algo: the algorithm, with resolved schedules.
      actor: the actor state, whose statistics stay frozen.
      env: a JAX environment with auto-reset, a recipe of host environments, or a Gymnasium environment, class or
        function.
      spec: spec of the environment that the policy was trained on.
      seed: seed of the episodes and of action sampling. A run with this seed has the same episodes in its evaluations,
        but other episodes in training. If evaluations were used to select the policy, pass a different
        seed than theirs (`jaxrl.core.keys.held_out_seed`).
      episodes: number of episodes, rounded up to a multiple of the number of environments.
      num_envs: number of environments; None: the number of episodes, at most 128.
      max_steps: maximum average length of the episodes of one environment; unfinished episodes are counted, but not
        included in the mean return.
      explore: sample actions as in training, instead of taking the best ones.
      step_timeout: maximum seconds of one step or reset of host environments.
      opponent: a policy, the directory of a run, or "random", which acts for all agents of an environment except one.
        Only the returns of that agent count; its index varies between environments. None: the policy acts for all
        agents, and all returns count.

    Raises:
      ConfigError: the spaces of `env` differ from those of `spec` (bounds may differ), the seed is invalid, there are
        too many episodes, or there is an opponent in an environment with one agent.
      EnvironmentFailedError: host environments hang or fail too often.
    """
    env = as_environment(env)
    if num_envs is None and only_instance(env) is not None:
        num_envs = 1
    check_spaces(spec, env)
    if problems := episodes_problems("episodes", episodes, num_envs, max_steps):
        raise ConfigError(problems)
    agents = num_agents(env)
    if opponent is not None:
        algo, actor = opposed(algo, actor, opponent, env)
        episodes *= agents
    # Against an opponent, the policy acts for each agent equally often.
    together = agents if opponent is None else agents**2
    seed, (num_envs, quota) = checked_seed("seed", seed), layout(episodes, num_envs, together)
    key = _root(seed)
    if isinstance(env, Environment):
        env, key, most = _on_devices_of(actor, (env, key, np.int32(max_steps)))
        scores = _play(algo, actor, env, key, most, spec=spec, num_envs=num_envs, quota=quota, explore=explore)
        returns, lengths, done = jax.device_get(scores)
    else:
        returns, lengths, done = _play_on_host(
            algo, actor, env, key, max_steps, spec, num_envs, quota, explore, seed, step_timeout
        )
    if opponent is not None:
        returns, lengths, done = (x[..., evaluated_rows(num_envs, agents)] for x in (returns, lengths, done))
    counts = np.arange(quota)[:, None] < done[None]
    return Evaluation(returns[counts], lengths[counts], int(counts.size - counts.sum()))


def compile_evaluation(
    algo: Algorithm,
    actor: ActorState,
    env: Environment,
    spec: EnvSpec,
    *,
    seed: int = 0,
    episodes: int = 128,
    explore: bool = False,
    place: Callable[[PyTree], PyTree] | None = None,
) -> jax.stages.Compiled:
    """Compile the program of `evaluate` for the same arguments, without running it.

    Args:
      algo, actor: as for `evaluate`, or their shapes and shardings.
      env, spec, seed, episodes, explore: as for `evaluate`.
      place: function that places arrays on the actor's devices; None: use the devices of the actor's arrays.
    """
    num_envs, quota = layout(episodes, agents=num_agents(env))
    place = functools.partial(_on_devices_of, actor) if place is None else place
    env, key, most = place((env, _root(seed), np.int32(0)))
    how = {"spec": spec, "num_envs": num_envs, "quota": quota, "explore": explore}
    return _play.lower(algo, actor, env, key, most, **how).compile()


@functools.lru_cache(maxsize=8)
def _root(seed):
    """Return a run's root key; cached, because creating a key moves its seed to the device."""
    return keys.root_key(seed)


def _steps_in_all(max_steps, quota):
    """Return the maximum steps of one environment, including the resets between `quota` episodes."""
    return quota * max_steps + (quota - 1) * jnp.minimum(max_steps, 1)


def _on_devices_of(actor, tree):
    """Return `tree` on the devices of the actor, so that the compiled call does not have to move it."""
    held = [x.sharding for x in jax.tree.leaves(actor) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    return jax.device_put(tree, held[0] if held else None)


def _record(scores, timestep):
    """Add the episodes that ended at `timestep` to `scores`, up to the quota, and return the new scores."""
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


def play(
    algo: Algorithm,
    actor: ActorState,
    env: Environment,
    key: jax.Array,
    max_steps: jax.Array,
    *,
    spec: EnvSpec,
    num_envs: int,
    quota: int,
    explore: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Play `quota` episodes in each of `num_envs` environments; a pure function.

    All evaluations in JAX environments use this function, so that the same seed gives the same episodes, which differ
    from those of training.

    Args:
      algo, actor, env, spec, num_envs, quota, explore: as for `evaluate`.
      key: the run's root key, from which the key of evaluations is derived.
      max_steps: as for `evaluate`, int32.

    Returns:
      Returns and lengths of shape (quota, num_envs), and the number of ended episodes of shape (num_envs,).
    """
    env_index = jnp.arange(num_envs, dtype=jnp.int32)
    key, limit = keys.evaluation_key(key), _steps_in_all(max_steps, quota)
    env_roots, act_roots = keys.environment_keys(key, env_index), keys.policy_keys(key, env_index)
    acting = ro.begin(algo, env, env_roots, env_index, spec=spec, num_envs=num_envs)

    def unfinished(carried):
        tick, _, scores = carried
        return (tick < limit) & jnp.any(scores[2] < quota)

    def step(carried):
        tick, acting, scores = carried
        now = tick.astype(jnp.uint32)
        step_keys = keys.tick_keys(env_roots, now, 1), keys.tick_keys(act_roots, now, 1)
        acting, _ = ro.unroll(algo, actor, env, acting, step_keys, spec=spec, explore=explore)
        return tick + 1, acting, _record(scores, acting.timestep)

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), acting, _no_scores(num_envs, quota)))[-1]


_play = jax.jit(play, static_argnames=("spec", "num_envs", "quota", "explore"))


@jax.jit
def _record_rollout(scores, timesteps):
    """Add the episodes that ended after an action of a rollout to `scores`, and return the new scores."""
    return jax.lax.scan(lambda scores, timestep: (_record(scores, timestep), None), scores, timesteps[1:])[0]


def _play_on_host(algo, actor, env, key, max_steps, spec, num_envs, quota, explore, seed, step_timeout):
    key, limit = keys.evaluation_key(key), int(_steps_in_all(max_steps, quota))
    host = Supervised(env, num_envs, keys.evaluation_seed(seed), step_timeout=step_timeout)
    steps = HostSteps(spec, num_envs, num_envs, _HOST_STEPS, explore)
    try:
        acting = steps.begin(algo, host.reset(), key, jnp.arange(num_envs, dtype=jnp.int32))
        scores = _no_scores(num_envs, quota)
        while acting.steps_per_env < limit and np.any(np.asarray(scores[2]) < quota):
            some = dataclasses.replace(steps, length=min(_HOST_STEPS, limit - acting.steps_per_env))
            rollout = complete(unroll(some, algo, actor, acting, in_this_thread(host.step)))
            scores = _record_rollout(scores, rollout.timesteps.replace(observation=(), action_mask=None))
        return jax.device_get(scores)
    finally:
        host.close()
