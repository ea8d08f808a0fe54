"""What the on-policy algorithms share: acting, carrying, normalising, and turning a rollout into advantages."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl import spaces
from jaxrl.algos import minibatches, normalise, returns
from jaxrl.types import (
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Episodes,
    PyTree,
    Replicas,
    Rollout,
    RolloutBatch,
    TimeStep,
)


@struct.dataclass
class Statistics:
    """Running statistics of observations and of rewards; `()` for what is not normalised."""

    observation: PyTree = ()
    reward: PyTree = ()


@struct.dataclass
class PolicyState:
    """All that an on-policy learner is."""

    params: PyTree
    optimiser: PyTree
    statistics: Statistics
    updates: jax.Array  # int32, the version that actors are told
    penalty: PyTree = ()  # PPO's adaptive weight of the divergence; () where there is none


@struct.dataclass
class PolicyCarry:
    """Per environment: the network's recurrent state, and the discounted return so far (for scaling rewards)."""

    network: Carry
    discounted_return: PyTree


def init(algo: Any, key: jax.Array, spec: EnvSpec, penalty: PyTree = ()) -> PolicyState:
    """A new learner state; `algo` has `network`, `optimiser`, `normalize_observation` and `normalize_reward`."""
    params = algo.network.init(key, spec)
    statistics = Statistics(
        observation=normalise.init(spec.observation_space) if algo.normalize_observation else (),
        reward=normalise.init(spaces.Box(-jnp.inf, jnp.inf, ())) if algo.normalize_reward else (),
    )
    return PolicyState(
        params=params,
        optimiser=algo.optimiser.rule().init(params),
        statistics=statistics,
        updates=jnp.int32(0),
        penalty=penalty,
    )


def actor(state: PolicyState) -> ActorState:
    """What acting needs of a learner."""
    return ActorState(params=state.params, statistics=state.statistics)


def initial_carry(algo: Any, spec: EnvSpec) -> PolicyCarry:
    """What one environment carries from moment to moment, before its first."""
    return PolicyCarry(
        network=algo.network.initial_carry(spec), discounted_return=jnp.float32(0.0) if algo.normalize_reward else ()
    )


def observe(algo: Any, timesteps: TimeStep, statistics: Statistics) -> TimeStep:
    """The time steps as the network sees them: observations normalised with the given frozen statistics."""
    if not algo.normalize_observation:
        return timesteps
    clip = algo.observation_clip
    return timesteps.replace(observation=normalise.normalise(statistics.observation, timesteps.observation, clip))


def act(
    algo: Any,
    actor: ActorState,
    timestep: TimeStep,
    carry: PolicyCarry,
    key: jax.Array,
    *,
    spec: EnvSpec,
    explore: bool,
) -> ActorOutput:
    """One action for each environment, with what the update needs of this moment: log-probability and value."""
    seen = jax.tree.map(lambda x: x[None], observe(algo, timestep, actor.statistics))
    output, network_carry = algo.network.apply(actor.params, seen, carry.network, spec=spec)
    distribution = jax.tree.map(lambda x: x[0], output.distribution)
    discounted = ()
    if algo.normalize_reward:
        discounted = jnp.where(timestep.first, 0.0, algo.gamma * carry.discounted_return + timestep.reward)
    carry = PolicyCarry(network_carry, discounted)
    if not explore:
        return ActorOutput(distribution.mode(), carry)
    action = distribution.sample(key)
    extras = {"log_prob": distribution.log_prob(action), "value": output.value[0], "distribution": distribution}
    if algo.normalize_reward:
        extras["discounted_return"] = discounted
    return ActorOutput(action, carry, extras)


def rewards(algo: Any, batch: RolloutBatch) -> jax.Array:
    """Rewards [T, B], scaled with the statistics the rows were acted with."""
    if not algo.normalize_reward:
        return batch.rows.reward
    return normalise.scale_reward(batch.statistics.reward, batch.rows.reward, algo.reward_clip)


def bootstrap_value(algo: Any, params: PyTree, batch: RolloutBatch, spec: EnvSpec) -> jax.Array:
    """The value [B] of the moment after the last row."""
    final = jax.tree.map(lambda x: x[None], observe(algo, batch.final, batch.statistics))
    return algo.network.value(params, final, batch.final_carry.network, spec=spec)[0]


def update_statistics(algo: Any, statistics: Statistics, batch: RolloutBatch, replicas: Replicas) -> Statistics:
    """The statistics with this batch's rows merged in over all replicas; the next actor state will use them."""
    # Last observations are real ones too; but what follows the end of a whole episode is no part of the batch.
    real = batch.rows.weight if algo.whole_episodes else jnp.ones_like(batch.rows.weight)
    if algo.normalize_observation:
        merged = normalise.update(statistics.observation, batch.rows.observation, real, replicas)
        statistics = statistics.replace(observation=merged)
    if algo.normalize_reward:
        counts = real & ~batch.rows.first  # nothing arrived with an episode's first observation
        seen = batch.rows.extras["discounted_return"]
        statistics = statistics.replace(reward=normalise.update(statistics.reward, seen, counts, replicas))
    return statistics


def advantages(algo: Any, params: PyTree, batch: RolloutBatch, spec: EnvSpec) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and value targets, each [T, B], from the values recorded while acting."""
    rows = batch.rows
    terminated = rows.terminated if algo.bootstrap_truncated else rows.terminated | rows.truncated
    estimates = returns.gae(
        rewards(algo, batch),
        rows.extras["value"],
        bootstrap_value(algo, params, batch, spec),
        terminated,
        rows.truncated,
        rows.weight,
        algo.gamma,
        algo.gae_lambda,
    )
    return estimates, estimates + rows.extras["value"]


def unrolled(algo: Any, params: PyTree, timesteps: TimeStep, carry: PolicyCarry, spec: EnvSpec) -> Any:
    """The network's outputs over given moments `[T, B]` (already as the network sees them)."""
    return algo.network.apply(params, timesteps, carry.network, spec=spec)[0]


def explained_variance(targets: jax.Array, values: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """1 - Var(target - value) / Var(target) over the rows that count; 1 is a perfect critic."""
    weight = weight.astype(targets.dtype)
    count = jnp.maximum(replicas.sum(jnp.sum(weight)), 1.0)

    def variance(x):
        mean = replicas.sum(jnp.sum(x * weight)) / count
        return replicas.sum(jnp.sum(weight * jnp.square(x - mean))) / count

    return 1.0 - variance(targets - values) / jnp.maximum(variance(targets), 1e-8)


def standardised(x: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """`x` with mean 0 and standard deviation 1 over the entries that count, on all replicas together."""
    weight = weight.astype(x.dtype)
    moments = replicas.sum(jnp.stack([jnp.sum(weight), jnp.sum(x * weight)]))
    mean = moments[1] / jnp.maximum(moments[0], 1.0)
    variance = replicas.sum(jnp.sum(weight * jnp.square(x - mean))) / jnp.maximum(moments[0], 1.0)
    return (x - mean) / (jnp.sqrt(variance) + 1e-8)


def learning_rates(algo: Any) -> dict[str, Any]:
    """By part of the parameters; the value's own where it has one."""
    value = algo.learning_rate if algo.value_learning_rate is None else algo.value_learning_rate
    return {"policy": algo.learning_rate, "value": value}


def source(algo: Any) -> Rollout | Episodes:
    """The experience that an on-policy algorithm asks for."""
    return Episodes(algo.rollout_length) if algo.whole_episodes else Rollout(algo.rollout_length)


def minibatch_problems(algo: Any, num_envs: int, shards: int) -> list[str]:
    """Why `num_envs` environments in `shards` groups cannot be cut into `algo.minibatches`; empty if they can."""
    by = "environment" if algo.recurrent else "row"
    return minibatches.minibatch_problems(
        rows=algo.rollout_length, num_envs=num_envs, shards=shards, count=algo.minibatches, by=by
    )


def network_problems(algo: Any, spec: EnvSpec) -> list[str]:
    """Why the network does not fit the environment's spaces; empty if it does."""
    try:
        jax.eval_shape(lambda key: algo.network.init(key, spec), jax.random.key(0))
    except ValueError as error:
        return [str(error)]
    return []


def is_recurrent(network: Any) -> bool:
    """Whether the network says that it carries a state from moment to moment."""
    return bool(network.recurrent)


@struct.dataclass
class Cutter:
    """A batch and how it is cut into minibatches: by rows, or, for recurrent networks, by whole environments."""

    indices: jax.Array  # [epochs * minibatches, size]
    data: PyTree  # [rows, ...] or [time, environment, ...]
    carry: PolicyCarry
    recurrent: bool = struct.field(pytree_node=False)

    def take(self, indices: jax.Array) -> tuple[PyTree, PolicyCarry]:
        """One minibatch, time-major, and the carry at its first row."""
        if self.recurrent:
            data = minibatches.take_environments(self.data, indices)
            return data, minibatches.take_environments(self.carry, indices, axis=0)
        return jax.tree.map(lambda x: x[None], minibatches.take_rows(self.data, indices)), self.carry


def minibatch_cutter(algo: Any, data: PyTree, carry: PolicyCarry, key: jax.Array, replicas: Replicas) -> Cutter:
    """Cuts `data` [T, B, ...] into `algo.epochs` times `algo.minibatches` minibatches, shuffled anew every epoch."""
    rows, envs = jax.tree.leaves(data)[0].shape[:2]
    indices = minibatches.minibatch_indices(
        key,
        rows=rows,
        num_envs=envs,
        count=algo.minibatches,
        replicas=replicas,
        by="environment" if algo.recurrent else "row",
        epochs=algo.epochs,
    )
    return Cutter(indices, data if algo.recurrent else minibatches.flatten_rows(data), carry, algo.recurrent)
