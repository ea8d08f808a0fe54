"""Base of the on-policy algorithms: acting, normalization, advantages of rollouts, and gradient steps."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import normalization, returns, train_state
from jaxrl.algos.base import (
    Part,
    field_group,
    field_problems,
    network_problems,
    number,
    part,
    part_class,
    parts,
    required,
    static,
)
from jaxrl.algos.fields import DiscountFields
from jaxrl.algos.minibatches import MinibatchFields
from jaxrl.algos.optimizers import Adam, Optimizer, clip_by_norm, clip_factor, clipped, global_norm
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
    penalty: PyTree = ()  # state of `kl_penalty`; () without a penalty


class PolicyCarry(struct.PyTreeNode):
    """Carry of an environment: the network's recurrent state, and the discounted return so far, for scaling rewards."""

    network: Carry
    discounted_return: PyTree


@part_class
class WholeEpisodes(Part):
    """Batches of complete episodes instead of rollouts."""

    episodes: int = static(25, low=1, help="number of episodes per batch")
    max_length: int = static(1000, low=1, help="maximum number of transitions per episode to learn from")


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
    whole_episodes: WholeEpisodes | None = part(
        WholeEpisodes,
        was={"whole_episodes": "episodes", "max_episode_length": "max_length"},
        help="batches of complete episodes; None: batches are rollouts",
    )
    bootstrap_truncated: bool = static(True, help="bootstrap at time limits; False treats them as terminations")

    def rollouts(self, *, max_policy_lag: int | None, unit: int | None = 1) -> Rollouts | Episodes:
        """Return the source of rollouts, or of whole episodes padded to a multiple of `unit` rows."""
        length = 1 if self.rollout_length is None else self.rollout_length  # None: not resolved yet
        if (whole := self.whole_episodes) is None:
            return Rollouts(length, max_policy_lag)
        return Episodes(whole.episodes, whole.max_length, length, max_policy_lag, unit or 1)

    def resolved_normalization(self, spec: EnvSpec) -> dict[str, bool]:
        """Return whether observations and rewards are normalized, by field name; by default for continuous actions."""
        continuous = spaces.is_continuous(spec.action_space)
        chosen = {"normalize_observation": self.normalize_observation, "normalize_reward": self.normalize_reward}
        return {name: continuous if value is None else value for name, value in chosen.items()}

    def init_statistics(self, spec: EnvSpec) -> Statistics:
        """Return empty statistics of the observations and rewards that are normalized."""
        return Statistics(
            observation=normalization.init(spec.observation_space) if self.normalize_observation else (),
            reward=normalization.init(spaces.Box(-jnp.inf, jnp.inf, ())) if self.normalize_reward else (),
        )

    def first_carry(self, network: Network, spec: EnvSpec) -> PolicyCarry:
        """Return the carry of one environment before its first step, for the acting `network`."""
        return PolicyCarry(network.initial_carry(spec), jnp.float32(0.0) if self.normalize_reward else ())

    def preprocess(self, timesteps: TimeStep) -> TimeStep:
        """Return time steps transformed for the networks and the update; by default, unchanged."""
        return timesteps

    def prepare(
        self, statistics: Statistics, batch: Mapping[str, Any], replicas: Replicas
    ) -> tuple[Statistics, Rollout]:
        """Return the next statistics, and the preprocessed rollout to learn from.

        The batch is merged into the statistics for the next actor state, but an update uses the statistics with which
        its batch was collected, so the first batch is not normalized; only REPPO scales its rewards with the merged
        statistics. If the first observations were normalized by their own moments, probability ratios would compare
        policies on two different inputs: in brax's inverted pendulum with 1M steps, this lowered PPO's score from 992
        to 930 (5 and 6 seeds).
        """
        rollout: Rollout = batch["rollout"]
        rollout = rollout.replace(timesteps=self.preprocess(rollout.timesteps))
        return update_statistics(statistics, rollout, self.gamma, replicas), rollout

    def valued(self, rollout: Rollout, values: jax.Array, bootstrap_value: jax.Array) -> returns.Segment:
        """Return the rollout's scaled rewards and endings, with `values` [T, B] and `bootstrap_value` [B]."""
        rows, reward = rollout.rows, scaled_reward(rollout, self.reward_clip)
        terminated = rows.terminated if self.bootstrap_truncated else rows.terminated | rows.truncated
        return returns.Segment.of_rows(rows, values, bootstrap_value).replace(rewards=reward, terminated=terminated)


@field_group
class OnPolicy(RolloutFields):
    """Policy and value networks, acting, their optimizer and gradient steps."""

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
        help="clip policy and value gradients by their joint norm; False: by separate norms for separate networks",
    )
    optimizer: Optimizer = number(Adam(eps=1e-5))
    network: ValueNetwork = static(ActorCritic())
    has_target = False  # whether the state has a target network

    def resolve(self, spec: EnvSpec, num_envs: int) -> Self:
        return dataclasses.replace(self, **self.resolved(spec))

    def resolved(self, spec: EnvSpec, *, discrete_entropy: float = 0.01) -> dict[str, Any]:
        """Return the fields that depend on the environment, by name, with defaults for unset ones.

        For continuous actions, observations and rewards are normalized, and there is no entropy bonus. For discrete
        actions, neither is normalized, and the bonus is `discrete_entropy`. These defaults, and a bonus of 0.01, are
        common. Composite actions with a `Box` count as continuous.
        """
        entropy_cost = self.entropy_cost
        if entropy_cost is None:
            entropy_cost = 0.0 if spaces.is_continuous(spec.action_space) else discrete_entropy
        found = {"entropy_cost": entropy_cost, "network": resolve_network(self.network, spec)}
        found |= {name: part.resolve(spec) for name, part in parts(self).items()}
        return self.resolved_normalization(spec) | found

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        found = field_problems(self)
        if not found:
            found += [line for part in parts(self).values() for line in part.fit_problems(spec)]
        found += network_problems(f"{type(self).__name__}.network", self.network, spec, SEQUENCE_INPUTS)
        return found + self.minibatch_problems(num_envs, shards) if isinstance(self, MinibatchFields) else found

    def init(self, key: jax.Array, spec: EnvSpec) -> PolicyState:
        network = train_state.create(*self.network.init(key, spec), self.transformation, target=self.has_target)
        own = {name: part.init(key, spec) for name, part in parts(self).items()}
        bonus, penalty = (own.get(name, ()) for name in ("exploration_bonus", "kl_penalty"))
        return PolicyState(network, self.init_statistics(spec), jnp.int32(0), bonus, penalty)

    def actor(self, state: PolicyState) -> ActorState:
        network = state.network
        return ActorState(network.params, state.statistics, network.model_state)

    def initial_carry(self, spec: EnvSpec, env_index: jax.Array, num_envs: int) -> PolicyCarry:
        return self.first_carry(self.network, spec)

    def act(
        self, actor: ActorState, timestep: TimeStep, carry: PolicyCarry, key: jax.Array, *, spec: EnvSpec, explore: bool
    ) -> ActorOutput:
        """Return sampled actions with extras for the update; without exploration, the modes of the policy."""
        timestep = self.preprocess(timestep)
        inputs = network_inputs(timestep, actor.statistics, self.observation_clip)
        inputs, network = jax.tree.map(lambda x: x[None], inputs), Variables(actor.params, actor.model_state)
        output, network_carry, _ = self.unroll(network, inputs, carry.network, spec, train=False)
        distribution = jax.tree.map(lambda x: x[0], output.distribution)
        discounted = discounted_return(timestep, carry, self.gamma)
        carry = PolicyCarry(network_carry, discounted)
        if not explore:
            return ActorOutput(distribution.mode(), carry)
        action = distribution.sample(key)
        extras = {"log_prob": distribution.log_prob(action), "value": output.value[0], "distribution": distribution}
        if self.normalize_reward:
            extras["discounted_return"] = discounted
        return ActorOutput(action, carry, extras)

    def inputs(self, rollout: Rollout) -> NetworkInputs:
        """Return the network's inputs for the time steps [T, B] at which actions were taken."""
        return network_inputs(rollout.timesteps[:-1], rollout.statistics, self.observation_clip)

    def unroll(
        self, network: Variables, inputs: NetworkInputs, carry: Carry, spec: EnvSpec, *, train: bool
    ) -> tuple[PolicyValue, Carry, ModelState]:
        """Return the network's outputs over time steps `[T, B]`, its next carry, and the new model state."""
        return self.network.apply(
            network.params, inputs, carry, spec=spec, model_state=network.model_state, train=train
        )

    def segment(
        self, rollout: Rollout, network: Variables, values: jax.Array, carry: Carry, spec: EnvSpec
    ) -> returns.Segment:
        """Return the rollout with `values` [T, B], and with the network's value of its final time step.

        Args:
          rollout: as returned by `prepare`.
          network: the variables that evaluate the final time step.
          values: values of the rows.
          carry: the network's carry after the rows.
          spec: the environment's spec.
        """
        final = network_inputs(rollout.final, rollout.statistics, self.observation_clip)
        final = jax.tree.map(lambda x: x[None], final)
        value = self.network.value(network.params, final, carry, spec=spec, model_state=network.model_state)
        return self.valued(rollout, values, value[0])

    def recorded_segment(self, rollout: Rollout, network: Variables, spec: EnvSpec) -> returns.Segment:
        """Return `segment` with the values recorded while acting."""
        carry = rollout.carry.network
        if self.network.recurrent:  # recomputed, because the actors' carry may be from older parameters
            _, carry, _ = self.unroll(network, self.inputs(rollout), carry, spec, train=False)
        return self.segment(rollout, network, rollout.extras["value"], carry, spec)

    def explored(
        self, state: PolicyState, rollout: Rollout, *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[PyTree, jax.Array | None, Metrics]:
        """Return the next state, advantages [T, B] and metrics of the exploration bonus; without one, (), None and {}.

        The bonus takes as many steps as the algorithm; without minibatches, one on the whole rollout.
        """
        if (bonus := parts(self).get("exploration_bonus")) is None:
            return (), None, {}
        steps = {"epochs": getattr(self, "epochs", 1), "count": getattr(self, "minibatches", 1)}
        return bonus.update(state.bonus, rollout, spec=spec, key=key, replicas=replicas, **steps)

    def total_loss(self, policy_loss: jax.Array, value_loss: jax.Array, entropy: jax.Array) -> jax.Array:
        """Return the weighted sum of the three losses of an actor-critic; all are scalars.

        Raises:
          ConfigError: the algorithm was not resolved.
        """
        return policy_loss + self.value_cost * value_loss - required(self, "entropy_cost") * entropy

    @property
    def transformation(self) -> optax.GradientTransformation:
        """Return the optimizer with clipping; the parameters "value" use `value_learning_rate` if it is set.

        The gradients of separate networks are clipped by their own norms: for a value far from its targets, the
        gradient is hundreds of times the policy's, so clipping by the joint norm would almost stop the policy from
        learning.
        """
        steps = self.optimizer(required(self, "learning_rate"))
        if self.value_learning_rate is not None:
            steps = _partition(steps, self.optimizer(self.value_learning_rate), _value_and_rest)
        if self.max_grad_norm is None or self.joint_grad_norm:
            return clipped(steps, self.max_grad_norm)
        clip = clip_by_norm(self.max_grad_norm)
        return optax.chain(_partition(clip, clip, _separate_networks), steps)

    def gradient_step[Aux](
        self, loss: train_state.Loss[Aux], network: TrainState, replicas: Replicas, *inputs: Any
    ) -> tuple[TrainState, Metrics, Aux]:
        """Take a step down the gradient of `loss`, clipped by `transformation`.

        Args:
          loss, network, inputs: as for `train_state.gradient`.
          replicas: as passed to `update`.

        Returns:
          The state after the step, the metrics of `apply_gradients`, and the auxiliary outputs of the loss.
        """
        found = train_state.gradient(loss, network, *inputs)
        network, norms = self.apply_gradients(network, found.gradients, replicas, found.model_state)
        return network, norms, found.aux

    def apply_gradients(
        self, network: TrainState, gradients: Params, replicas: Replicas, model_state: ModelState
    ) -> tuple[TrainState, Metrics]:
        """Apply gradients with `transformation`, and return the gradients' norms as metrics.

        Returns:
          The state after the step; the gradient's global norm, and for separate networks the norm of each; and the
          factor by which each norm was clipped, 1 if it was not.
        """
        gradients = replicas.mean(gradients)
        labels = _separate_networks(gradients)
        if "value" in labels.values():
            norms = {f"{name}_gradient_norm": global_norm(gradients[name]) for name in labels}
            metrics = {"gradient_norm": optax.tree.norm(norms)} | norms
        else:
            metrics = {"gradient_norm": global_norm(gradients)}
        if self.max_grad_norm is not None:
            clipped_alone = [] if self.joint_grad_norm else [name for name in metrics if name != "gradient_norm"]
            for name in clipped_alone or ["gradient_norm"]:
                metrics[name.replace("gradient_norm", "clip_factor")] = clip_factor(metrics[name], self.max_grad_norm)
        network = train_state.apply_averaged(network, gradients, self.transformation, replicas, model_state)
        return network, metrics


def network_inputs(timesteps: TimeStep, statistics: Statistics, clip: Scalar) -> NetworkInputs:
    """Return the network's inputs for time steps, with observations normalized by frozen `statistics`, if any."""
    inputs = NetworkInputs.of_timesteps(timesteps)
    if isinstance(statistics.observation, tuple):
        return inputs
    return inputs.replace(observation=normalization.normalize(statistics.observation, inputs.observation, clip))


def discounted_return(timestep: TimeStep, carry: PolicyCarry, gamma: Scalar) -> PyTree:
    """Return the discounted returns [B] so far, including the time step's rewards; () without reward normalization."""
    if isinstance(carry.discounted_return, tuple):
        return ()
    return normalization.discounted_return(carry.discounted_return, timestep, gamma)


def scaled_reward(rollout: Rollout, clip: Scalar) -> jax.Array:
    """Return rewards [T, B], scaled with the statistics of the rollout, if any."""
    if isinstance(rollout.statistics.reward, tuple):
        return rollout.rows.reward
    return normalization.scale_reward(rollout.statistics.reward, rollout.rows.reward, clip)


def update_statistics(statistics: Statistics, batch: Rollout, gamma: Scalar, replicas: Replicas) -> Statistics:
    """Merge a batch from all replicas into the statistics; those that are () stay ()."""
    timesteps = batch.timesteps[:-1]
    # Last observations count too. With whole episodes, rows after an episode's end, or after its environment failed and
    # was rebuilt, are not part of the batch.
    real = jnp.ones_like(timesteps.first)
    if batch.whole_episodes:
        timesteps = batch.timesteps
        episode = jnp.cumsum(timesteps.first.astype(jnp.int32), axis=0, dtype=jnp.int32)
        real = episode == episode[:1]
    merged = statistics
    if not isinstance(statistics.observation, tuple):
        seen = normalization.update(statistics.observation, timesteps.observation, real, replicas)
        merged = merged.replace(observation=seen)
    if not isinstance(statistics.reward, tuple):
        arrived = batch.extras["discounted_return"]
        if batch.whole_episodes:  # also the reward of the time step after the last row
            final = normalization.discounted_return(arrived[-1], batch.final, gamma)
            arrived = jnp.concatenate([arrived, final[None]])
        counts = real & ~timesteps.first  # an episode's first observation has no reward
        merged = merged.replace(reward=normalization.update(statistics.reward, arrived, counts, replicas))
    return merged


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


def _partition(policy, value, label) -> optax.GradientTransformation:
    """Apply `value` to the entries of the parameters that `label` marks as "value", and `policy` to the others."""
    parts: dict[Hashable, optax.GradientTransformation] = {"policy": policy, "value": value}
    return optax.partition(parts, label)


def _value_and_rest(params: Params) -> dict[str, str]:
    return {name: "value" if name == "value" else "policy" for name in params}


def _separate_networks(params: Params) -> dict[str, str]:
    """Label the parameters of separate networks; if policy and value share parameters, label all "policy"."""
    return _value_and_rest(params) if set(params) == {"policy", "value"} else dict.fromkeys(params, "policy")
