"""Functions shared by the on-policy algorithms: acting, carries, normalization, and advantages of rollouts."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import normalization, returns, train_state
from jaxrl.algos.base import field_group, field_problems, network_problems, number, static, unresolved
from jaxrl.algos.fields import DiscountFields
from jaxrl.algos.minibatches import MinibatchFields
from jaxrl.algos.optimizers import Adam, Optimizer, clip_by_norm, clip_factor, clipped, global_norm
from jaxrl.algos.rnd import RND
from jaxrl.algos.train_state import TrainState, Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import (
    SEQUENCE_INPUTS,
    ActorOutput,
    ActorState,
    Carry,
    EnvSpec,
    Episodes,
    Metrics,
    ModelState,
    Network,
    NetworkInputs,
    Params,
    PyTree,
    Replicas,
    Rollout,
    Rollouts,
    TimeStep,
    ValueNetwork,
)
from jaxrl.networks import ActorCritic, PolicyValue, resolve_network


@field_group
class RolloutFields(DiscountFields):
    """Rollouts and their normalization."""

    max_grad_norm: Scalar | None = number(0.5, above=0, help="clip gradients to this norm; None: no clipping")
    observation_clip: Scalar = number(
        10.0, above=0, only_with="normalize_observation", help="maximum absolute value of normalized observations"
    )
    reward_clip: Scalar = number(
        10.0, above=0, only_with="normalize_reward", help="maximum absolute value of normalized rewards"
    )
    rollout_length: int | None = static(
        128,
        low=1,
        help="steps per environment and batch; with whole_episodes: between checks for finished episodes",
    )
    normalize_observation: bool | None = static(
        None,
        choices=(None, True, False),
        help="normalize observations by running mean and standard deviation; None: only for continuous actions",
    )
    normalize_reward: bool | None = static(
        None,
        choices=(None, True, False),
        help="divide rewards by the running deviation of discounted returns; None: only for continuous actions",
    )
    whole_episodes: int = static(0, low=0, help="number of complete episodes per batch; 0: batches are rollouts")
    max_episode_length: int = static(
        1000, low=1, only_with="whole_episodes", help="maximum number of transitions per episode to learn from"
    )
    bootstrap_truncated: bool = static(True, help="bootstrap at time limits; False treats them as terminations")


@field_group
class AdvantageFields:
    """Generalized advantage estimation."""

    gae_lambda: Scalar = number(
        0.95, low=0, high=1, help="lambda of GAE; 0: one-step TD errors, 1: returns of the whole rollout"
    )


@field_group
class BonusFields:
    """Exploration bonus added to the rewards, for policies that learn from advantages."""

    exploration_bonus: RND | None = number(
        None, options=RND, help="intrinsic reward for novel observations; None: no bonus"
    )


@field_group
class OnPolicyFields(RolloutFields):
    """Policy, value and their optimizer."""

    learning_rate: Scalar | None = number(
        None, above=0, help="learning rate (of the policy, if value_learning_rate is set)"
    )
    value_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the value; None: learning_rate")
    value_cost: Scalar = number(0.5, low=0, help="weight of the value loss")
    entropy_cost: Scalar | None = number(
        None, low=0, help="weight of the entropy bonus; None: 0.01 for discrete actions, 0 for continuous ones"
    )
    joint_grad_norm: bool = static(
        False,
        help="clip policy and value gradients by their joint norm; False: separate networks by their own norms",
    )
    optimizer: Optimizer = number(Adam(eps=1e-5))
    network: ValueNetwork = static(ActorCritic())


class Statistics(struct.PyTreeNode):
    """Running statistics of observations and of rewards; `()` if they are not normalized."""

    observation: PyTree = ()
    reward: PyTree = ()


class PolicyState(struct.PyTreeNode):
    """State of an on-policy learner."""

    network: TrainState
    statistics: Statistics
    updates: jax.Array  # int32, the version of the actor state
    bonus: PyTree = ()  # state of `exploration_bonus`; () without a bonus
    penalty: PyTree = ()  # PPO's adaptive weight of the divergence; () without a penalty


class ActingState(Protocol):
    """Subset of a learner's state that is needed for acting."""

    @property
    def network(self) -> TrainState: ...
    @property
    def statistics(self) -> Statistics: ...


class PolicyCarry(struct.PyTreeNode):
    """Carry of an environment: the network's recurrent state, and the discounted return so far, for scaling rewards."""

    network: Carry
    discounted_return: PyTree


def resolved(algo: OnPolicyFields, spec: EnvSpec, *, discrete_entropy: float = 0.01) -> dict[str, Any]:
    """Return an algorithm's fields that depend on the environment, by name, with defaults for unset ones.

    For continuous actions, observations and rewards are normalized, and there is no entropy bonus. For discrete
    actions, neither is normalized, and the bonus is `discrete_entropy`. These defaults, and a bonus of 0.01, are
    common. Composite actions with a `Box` count as continuous.
    """
    continuous = spaces.is_continuous(spec.action_space)
    entropy_cost = algo.entropy_cost
    if entropy_cost is None:
        entropy_cost = 0.0 if continuous else discrete_entropy
    network = resolve_network(algo.network, spec)
    found = {"entropy_cost": entropy_cost, "network": network}
    if isinstance(algo, BonusFields) and algo.exploration_bonus:
        found["exploration_bonus"] = algo.exploration_bonus.resolve(spec)
    return resolved_normalization(algo, spec) | found


def problems(algo: OnPolicyFields, spec: EnvSpec) -> list[str]:
    """Explain wrong fields, and networks that do not fit the environment."""
    found = field_problems(algo)
    if not found and isinstance(algo, BonusFields) and isinstance(algo.exploration_bonus, RND):
        found += algo.exploration_bonus.network_problems(spec)
    return found + network_problems(f"{type(algo).__name__}.network", algo.network, spec, SEQUENCE_INPUTS)


def resolved_normalization(algo: RolloutFields, spec: EnvSpec) -> dict[str, bool]:
    """Return whether observations and rewards are normalized, by field name; the default is continuous actions only."""
    continuous = spaces.is_continuous(spec.action_space)
    chosen = {"normalize_observation": algo.normalize_observation, "normalize_reward": algo.normalize_reward}
    return {name: continuous if value is None else value for name, value in chosen.items()}


def init(algo: OnPolicyFields, key: jax.Array, spec: EnvSpec, *, target: bool = False) -> PolicyState:
    """Return a new learner state; `target` adds a target network."""
    network = train_state.create(*algo.network.init(key, spec), transformation(algo), target=target)
    bonus = ()
    if isinstance(algo, BonusFields) and algo.exploration_bonus:
        bonus = algo.exploration_bonus.init(_bonus_key(key), spec)
    return PolicyState(network, init_statistics(algo, spec), jnp.int32(0), bonus)


def init_statistics(algo: RolloutFields, spec: EnvSpec) -> Statistics:
    """Return empty statistics of the observations and rewards that are normalized."""
    return Statistics(
        observation=normalization.init(spec.observation_space) if algo.normalize_observation else (),
        reward=normalization.init(spaces.Box(-jnp.inf, jnp.inf, ())) if algo.normalize_reward else (),
    )


def initial_carry(algo: RolloutFields, network: Network, spec: EnvSpec) -> PolicyCarry:
    """Return the carry of one environment before its first step, for the acting `network`."""
    return PolicyCarry(
        network=network.initial_carry(spec), discounted_return=jnp.float32(0.0) if algo.normalize_reward else ()
    )


def discounted_return(algo: RolloutFields, timestep: TimeStep, carry: PolicyCarry) -> PyTree:
    """Return the discounted returns [B] so far, including the time step's rewards; () without reward normalization."""
    if not algo.normalize_reward:
        return ()
    return normalization.discounted_return(carry.discounted_return, timestep, algo.gamma)


def network_inputs(algo: RolloutFields, timesteps: TimeStep, statistics: Statistics) -> NetworkInputs:
    """Return the network's inputs for time steps, with observations normalized by frozen `statistics`."""
    inputs = NetworkInputs.of_timesteps(timesteps)
    if not algo.normalize_observation:
        return inputs
    observation = normalization.normalize(statistics.observation, inputs.observation, algo.observation_clip)
    return inputs.replace(observation=observation)


@field_group
class PolicyValueActing(OnPolicyFields):
    """Acting with a network that returns a policy and a value, and the usual setup of such algorithms."""

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, **resolved(self, spec))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        found = problems(self, spec)
        return found + self.minibatch_problems(num_envs, shards) if isinstance(self, MinibatchFields) else found

    def init(self, key: jax.Array, spec: EnvSpec) -> ActingState:
        return init(self, key, spec)

    def preprocess(self, timesteps: TimeStep) -> TimeStep:
        """Return time steps transformed for the networks and the update; by default, unchanged."""
        return timesteps

    def actor(self, state: ActingState) -> ActorState:
        network = state.network
        return ActorState(params=network.params, statistics=state.statistics, model_state=network.model_state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> PolicyCarry:
        return initial_carry(self, self.network, spec)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: PolicyCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """Return sampled actions with extras for the update; without exploration, the modes of the policy."""
        timestep = self.preprocess(timestep)
        inputs = jax.tree.map(lambda x: x[None], network_inputs(self, timestep, actor.statistics))
        output, network_carry, _ = self.network.apply(
            actor.params, inputs, carry.network, spec=spec, model_state=actor.model_state, train=False
        )
        distribution = jax.tree.map(lambda x: x[0], output.distribution)
        discounted = discounted_return(self, timestep, carry)
        carry = PolicyCarry(network_carry, discounted)
        if not explore:
            return ActorOutput(distribution.mode(), carry)
        action = distribution.sample(key)
        extras = {"log_prob": distribution.log_prob(action), "value": output.value[0], "distribution": distribution}
        if self.normalize_reward:
            extras["discounted_return"] = discounted
        return ActorOutput(action, carry, extras)


def batch_inputs(algo: OnPolicyFields, batch: Rollout) -> NetworkInputs:
    """Return the network's inputs for the time steps [T, B] at which actions were taken."""
    return network_inputs(algo, batch.timesteps[:-1], batch.statistics)


def rewards(algo: RolloutFields, batch: Rollout) -> jax.Array:
    """Return rewards [T, B], scaled with the statistics of the batch."""
    if not algo.normalize_reward:
        return batch.rows.reward
    return normalization.scale_reward(batch.statistics.reward, batch.rows.reward, algo.reward_clip)


def bootstrap_value(algo: OnPolicyFields, network: Variables, batch: Rollout, carry: Carry, spec: EnvSpec) -> jax.Array:
    """Return the value [B] of the time step after the last row, given the network's `carry` before that time step."""
    final = jax.tree.map(lambda x: x[None], network_inputs(algo, batch.final, batch.statistics))
    return algo.network.value(network.params, final, carry, spec=spec, model_state=network.model_state)[0]


def update_statistics(algo: RolloutFields, statistics: Statistics, batch: Rollout, replicas: Replicas) -> Statistics:
    """Merge this batch from all replicas into the statistics, for the next actor state.

    An update uses the statistics with which its batch was collected, so the first batch is not normalized; only REPPO
    scales its rewards with the merged statistics. If the first observations were normalized by their own moments,
    probability ratios would compare policies on two different inputs: in brax's inverted pendulum with 1M steps, this
    lowered PPO's score from 992 to 930 (5 and 6 seeds).
    """
    timesteps = batch.timesteps[:-1]
    # Last observations count too. With whole episodes, rows after an episode's end, or after its environment failed and
    # was rebuilt, are not part of the batch.
    real = jnp.ones_like(timesteps.first)
    if algo.whole_episodes:
        timesteps = batch.timesteps
        episode = jnp.cumsum(timesteps.first.astype(jnp.int32), axis=0, dtype=jnp.int32)
        real = episode == episode[:1]
    merged = statistics
    if algo.normalize_observation:
        seen = normalization.update(statistics.observation, timesteps.observation, real, replicas)
        merged = merged.replace(observation=seen)
    if algo.normalize_reward:
        arrived = batch.extras["discounted_return"]
        if algo.whole_episodes:  # also the reward of the time step after the last row
            final = normalization.discounted_return(arrived[-1], batch.final, algo.gamma)
            arrived = jnp.concatenate([arrived, final[None]])
        counts = real & ~timesteps.first  # an episode's first observation has no reward
        merged = merged.replace(reward=normalization.update(statistics.reward, arrived, counts, replicas))
    return merged


def advantages(
    algo: OnPolicyFields, network: Variables, batch: Rollout, gae_lambda: Scalar, spec: EnvSpec
) -> tuple[jax.Array, jax.Array]:
    """Return generalized advantages and value targets, each [T, B], from the values recorded while acting."""
    rows, carry = batch.rows, batch.carry.network
    if algo.network.recurrent:  # recomputed, because the actors' carry may be from older parameters
        _, carry, _ = unroll(algo, network, batch_inputs(algo, batch), carry, spec, train=False)
    values = segment(algo, batch, rows.extras["value"], bootstrap_value(algo, network, batch, carry, spec))
    estimates = returns.gae(values, algo.gamma, gae_lambda)
    return estimates, estimates + rows.extras["value"]


def explore(
    algo: BonusFields, bonus: PyTree, batch: Rollout, *, spec: EnvSpec, key: jax.Array, replicas: Replicas
) -> tuple[PyTree, jax.Array | None, Metrics]:
    """Update `exploration_bonus`; return its state, advantages [T, B] and metrics; without a bonus, (), None and {}.

    The bonus learns from as many minibatches as the algorithm.
    """
    if algo.exploration_bonus is None:
        return bonus, None, {}
    # An algorithm without these fields takes one step on the whole batch.
    epochs, count = (getattr(algo, name, None) or 1 for name in ("epochs", "minibatches"))
    return algo.exploration_bonus.update(
        bonus, batch, spec=spec, key=_bonus_key(key), replicas=replicas, epochs=epochs, count=count
    )


def with_bonus(algo: BonusFields, advantages: jax.Array, intrinsic: jax.Array | None) -> jax.Array:
    """Return the weighted sum of advantages and of those returned by `explore` (Burda et al., 2018, section 2.3)."""
    bonus = algo.exploration_bonus
    if bonus is None or intrinsic is None:
        return advantages
    return bonus.extrinsic_weight * advantages + bonus.intrinsic_weight * intrinsic


def _bonus_key(key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, 1)


def segment(
    algo: RolloutFields, batch: Rollout, values: jax.Array, bootstrap_value: jax.Array, bonus: jax.Array | None = None
) -> returns.Segment:
    """Return the rollout's segment for computing returns, with `values` [T, B] and `bootstrap_value` [B].

    The rewards are the rollout's normalized rewards plus `bonus` [T, B], if given.
    """
    rows, reward = batch.rows, rewards(algo, batch)
    return returns.Segment(
        rewards=reward if bonus is None else reward + bonus,
        values=values,
        bootstrap_value=bootstrap_value,
        terminated=rows.terminated if algo.bootstrap_truncated else rows.terminated | rows.truncated,
        truncated=rows.truncated,
        weight=rows.weight,
        discount=rows.discount,
    )


def unroll(
    algo: OnPolicyFields, network: Variables, inputs: NetworkInputs, carry: Carry, spec: EnvSpec, *, train: bool
) -> tuple[PolicyValue, Carry, ModelState]:
    """Return the network's outputs over time steps `[T, B]`, its next carry, and the new model state."""
    return algo.network.apply(network.params, inputs, carry, spec=spec, model_state=network.model_state, train=train)


def acting(weight: jax.Array, active: jax.Array | None) -> jax.Array:
    """Select the rows from which the policy learns: rows with weight whose agent could act (`Rollout.active`).

    Values are learned from all rows with weight, because returns of earlier rows bootstrap from the values of inactive
    agents. MAPPO's authors do the same (github.com/marlbenchmark/on-policy at de66d7a: `active_masks` with the options
    of train_smac_scripts).
    """
    return weight if active is None else weight & active


def explained_variance(targets: jax.Array, values: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """Return 1 - Var(target - value) / Var(target) over the rows that count: 1 if perfect, 0 if targets hardly vary."""
    weight = weight.astype(targets.dtype)
    count = jnp.maximum(replicas.sum(jnp.sum(weight)), 1.0)

    def moments(x):
        mean = replicas.sum(jnp.sum(x * weight)) / count
        return mean, replicas.sum(jnp.sum(weight * jnp.square(x - mean))) / count

    mean, variance = moments(targets)
    varied = normalization.varies(mean, jnp.sqrt(variance), least=0.0)
    return jnp.where(varied, 1.0 - moments(targets - values)[1] / jnp.where(varied, variance, 1.0), 0.0)


def standardized(x: jax.Array, weight: jax.Array, replicas: Replicas) -> jax.Array:
    """Standardize `x` to mean 0 and standard deviation 1 over the entries that count, on all replicas together.

    If the entries hardly vary compared with their mean (see `normalization.varies`), return 0 for all of them: their
    deviations are rounding errors.
    """
    weight = weight.astype(x.dtype)
    moments = replicas.sum(jnp.stack([jnp.sum(weight), jnp.sum(x * weight)]))
    mean = moments[1] / jnp.maximum(moments[0], 1.0)
    variance = replicas.sum(jnp.sum(weight * jnp.square(x - mean))) / jnp.maximum(moments[0], 1.0)
    std = jnp.sqrt(variance)
    return jnp.where(normalization.varies(mean, std, least=0.0), (x - mean) / (std + 1e-8), 0.0)


def total_loss(algo: OnPolicyFields, policy_loss: jax.Array, value_loss: jax.Array, entropy: jax.Array) -> jax.Array:
    """Return the weighted sum of the three losses of an actor-critic; all are scalars.

    Raises:
      ConfigError: the algorithm was not resolved.
    """
    if algo.entropy_cost is None:
        raise unresolved(algo, "entropy_cost")
    return policy_loss + algo.value_cost * value_loss - algo.entropy_cost * entropy


def transformation(algo: OnPolicyFields) -> optax.GradientTransformation:
    """Return the optimizer with clipping; the parameters "value" use `value_learning_rate` if it is set.

    The gradients of separate networks are clipped by their own norms: for a value far from its targets, the gradient is
    hundreds of times the policy's, so clipping by the joint norm would almost stop the policy from learning.
    """
    if algo.learning_rate is None:
        raise unresolved(algo, "learning_rate")
    steps = algo.optimizer(algo.learning_rate)
    if algo.value_learning_rate is not None:
        steps = _partition(steps, algo.optimizer(algo.value_learning_rate), _value_and_rest)
    if algo.max_grad_norm is None or algo.joint_grad_norm:
        return clipped(steps, algo.max_grad_norm)
    clip = clip_by_norm(algo.max_grad_norm)
    return optax.chain(_partition(clip, clip, _separate_networks), steps)


def _partition(policy, value, label) -> optax.GradientTransformation:
    """Apply `value` to the entries of the parameters that `label` marks as "value", and `policy` to the others."""
    parts: dict[Hashable, optax.GradientTransformation] = {"policy": policy, "value": value}
    return optax.partition(parts, label)


def _value_and_rest(params: Params) -> dict[str, str]:
    return {name: "value" if name == "value" else "policy" for name in params}


def _separate_networks(params: Params) -> dict[str, str]:
    """Label the parameters of separate networks; if policy and value share parameters, label all "policy"."""
    return _value_and_rest(params) if set(params) == {"policy", "value"} else dict.fromkeys(params, "policy")


def gradient_step[Aux](
    algo: OnPolicyFields, loss: train_state.Loss[Aux], network: TrainState, replicas: Replicas, *inputs: Any
) -> tuple[TrainState, Metrics, Aux]:
    """Take a step down the gradient of `loss`, clipped by `transformation`.

    Args:
      algo: defines the optimizer and the clipping.
      loss, network, inputs: as for `train_state.gradient`.
      replicas: as passed to `update`.

    Returns:
      The state after the step, the metrics of `apply_gradients`, and the auxiliary outputs of the loss.
    """
    found = train_state.gradient(loss, network, *inputs)
    network, norms = apply_gradients(algo, network, found.gradients, replicas, found.model_state)
    return network, norms, found.aux


def apply_gradients(
    algo: OnPolicyFields, network: TrainState, gradients: Params, replicas: Replicas, model_state: ModelState
) -> tuple[TrainState, Metrics]:
    """Apply gradients with `transformation`, and return the gradients' norms as metrics.

    Returns:
      The state after the step; the gradient's global norm, and for separate networks the norm of each; and the factor
      by which each norm was clipped, 1 if it was not.
    """
    gradients = replicas.mean(gradients)
    labels = _separate_networks(gradients)
    if "value" in labels.values():
        parts = {f"{name}_gradient_norm": global_norm(gradients[name]) for name in labels}
        metrics = {"gradient_norm": optax.tree.norm(parts)} | parts
    else:
        metrics = {"gradient_norm": global_norm(gradients)}
    if algo.max_grad_norm is not None:
        clipped_alone = [] if algo.joint_grad_norm else [name for name in metrics if name != "gradient_norm"]
        for name in clipped_alone or ["gradient_norm"]:
            metrics[name.replace("gradient_norm", "clip_factor")] = clip_factor(metrics[name], algo.max_grad_norm)
    network = train_state.apply_averaged(network, gradients, transformation(algo), replicas, model_state)
    return network, metrics


def source(algo: RolloutFields, *, max_policy_lag: int | None) -> Rollouts | Episodes:
    """Return the source of an on-policy algorithm, with a policy lag of at most `max_policy_lag`."""
    length = 1 if algo.rollout_length is None else algo.rollout_length  # None: not resolved yet
    if not algo.whole_episodes:
        return Rollouts(length, max_policy_lag)
    unit = getattr(algo, "minibatches", None) or 1
    return Episodes(algo.whole_episodes, algo.max_episode_length, length, max_policy_lag, unit)
