"""Random network distillation (Burda et al., 2018, arXiv:1810.12894): a bonus for novel observations.

A network learns to predict the output of a fixed random network. Its error, the *intrinsic reward*, is large for
observations unlike any seen before. This reward has a separate discount and value function, and its returns continue
over the ends of episodes. Otherwise, ending an episode would forfeit all future novelty, and the policy would avoid it.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxrl.algos import minibatches, normalization, q_learning, returns, train_state
from jaxrl.algos.base import Part, field_group, network_problems, number, static
from jaxrl.algos.normalization import RunningStatistics
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import registry, spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import SEQUENCE_INPUTS, EnvSpec, Metrics, NetworkInputs, PyTree, Replicas, Rollout
from jaxrl.networks import Embedding, Torso, default_torso


class RNDState(struct.PyTreeNode):
    """State of the bonus, which is part of a learner's state."""

    learned: TrainState  # "predictor", and "value" of intrinsic rewards
    target: Variables  # the random network as initialized
    observation: RunningStatistics
    returns: RunningStatistics  # of the discounted sum of errors up to each step
    mean: jax.Array  # float32, mean of that sum over environments at the end of the last rollout
    deviation: jax.Array  # float32, standard deviation of that sum over environments


@field_group
class RND(Part):
    """Random network distillation: an intrinsic reward for observations that a network cannot predict yet."""

    learning_rate: Scalar = number(1e-3, above=0, help="learning rate of the predictor and the intrinsic value")
    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor of intrinsic rewards")
    gae_lambda: Scalar = number(0.95, low=0, high=1, help="lambda of the advantages of intrinsic rewards")
    extrinsic_weight: Scalar = number(2.0, low=0, help="weight of the advantages of the environment's rewards")
    intrinsic_weight: Scalar = number(1.0, low=0, help="weight of the advantages of intrinsic rewards")
    observation_clip: Scalar = number(5.0, above=0, help="maximum absolute value of normalized observations")
    predictor_fraction: Scalar = number(
        1.0, above=0, high=1, help="fraction of each batch that the predictor is trained on"
    )
    features: int = static(512, low=1, help="number of outputs of the random network and its predictor")
    widths: tuple[int, ...] = static((512, 512), help="widths of the predictor's additional dense layers")
    torso: Torso | None = static(
        None, help="torso of each of the three networks; None: depends on the observation space"
    )

    def resolve(self, spec: EnvSpec) -> Self:
        """Return the bonus with `torso` set, by default to `default_torso` of the observation space."""
        return dataclasses.replace(self, torso=self.torso or default_torso(spec.observation_space))

    def fit_problems(self, spec: EnvSpec) -> list[str]:
        """Explain why the networks do not fit the observations."""
        lines = [network_problems("RND", network, spec, SEQUENCE_INPUTS) for network in self._networks.values()]
        return list(dict.fromkeys(sum(lines, [])))

    def init(self, key: jax.Array, spec: EnvSpec) -> RNDState:
        """Return the initial state.

        Args:
          key: the key of the algorithm's `init`.
          spec: the environment's spec.

        Raises:
          ConfigError: the torso does not fit the observations.
        """
        keys = dict(zip(self._networks, jax.random.split(_own_key(key), 3), strict=True))
        made = {name: Variables(*network.init(keys[name], spec)) for name, network in self._networks.items()}
        target = made.pop("target")
        params = {name: variables.params for name, variables in made.items()}
        model_state = {name: variables.model_state for name, variables in made.items()}
        return RNDState(
            learned=train_state.create(params, model_state, self._optimizer),
            target=target,
            observation=normalization.init(spec.observation_space, integers=True),
            returns=normalization.init(spaces.Box(-jnp.inf, jnp.inf, ())),
            mean=jnp.float32(0.0),
            deviation=jnp.float32(0.0),
        )

    def update(
        self,
        state: RNDState,
        rollout: Rollout,
        *,
        spec: EnvSpec,
        key: jax.Array,
        replicas: Replicas,
        epochs: int,
        count: int,
    ) -> tuple[RNDState, jax.Array, Metrics]:
        """Learn from a rollout of T steps of B environments.

        Args:
          state: the current state.
          rollout: the algorithm's rollout.
          spec: the environment's spec.
          key: the key of the algorithm's update.
          replicas: as passed to an algorithm's `update`.
          epochs, count: passes over the rollout, and minibatches per pass.

        Returns:
          The next state; the advantages [T, B] of intrinsic rewards, computed with the parameters before the
          update; and metrics.
        """
        timesteps, weight = rollout.timesteps, rollout.rows.weight
        # Observations form one stream: a reset is a step like any other, and may lead to novel observations. Only rows
        # after a whole episode belong to another stream.
        counts = weight if rollout.whole_episodes else jnp.ones_like(weight)
        seen = normalization.update(state.observation, timesteps[1:].observation, counts, replicas)

        def apply(name: str, variables: Variables, observation: PyTree, train: bool = False):
            observation = normalization.normalize(seen, observation, self.observation_clip)
            inputs = NetworkInputs(observation=observation)
            output, _, model_state = self._networks[name].apply(
                variables.params, inputs, (), spec=spec, model_state=variables.model_state, train=train
            )
            return output, model_state

        learned = _parts(state.learned.variables)
        target, _ = apply("target", state.target, timesteps[1:].observation)
        predicted, _ = apply("predictor", learned["predictor"], timesteps[1:].observation)
        error = jnp.mean(jnp.square(predicted - target), axis=-1)
        value = apply("value", learned["value"], timesteps.observation)[0][..., 0]
        reward, scale = self._normalized(state, error, counts, replicas)
        never = jnp.zeros_like(counts)
        segment = returns.Segment(reward, value[:-1], value[-1], never, never, counts)
        advantages = returns.gae(segment, self.gamma, self.gae_lambda)

        index_key, chance_key = jax.random.split(_own_key(key))
        length, envs = counts.shape
        keys = q_learning.transition_keys(chance_key, envs, replicas)
        chance = jax.vmap(lambda k: jax.random.uniform(k, (length,), jnp.float32))(keys).T
        data = {"embedding": target, "return": advantages + value[:-1], "counts": counts, "chance": chance}
        data, observation = minibatches.flatten_rows((data, timesteps.observation))

        def loss(learned: Variables, indices: jax.Array, turn: jax.Array):
            parts = _parts(learned)
            rows = minibatches.take_rows(data, indices)
            # The row of an environment's next step is `envs` rows later.
            now, following = (minibatches.take_rows(observation, i) for i in (indices, indices + envs))
            predicted, predictor_state = apply("predictor", parts["predictor"], following, train=True)
            value, value_state = apply("value", parts["value"], now, train=True)
            # Each pass trains on different rows, and over all passes, every row is used equally often.
            chosen = rows["counts"] & ((rows["chance"] + turn) % 1.0 < self.predictor_fraction)
            errors = jnp.mean(jnp.square(predicted - rows["embedding"]), axis=-1)
            predictor_loss = weighted_mean(errors, chosen, replicas)
            value_loss = weighted_mean(0.5 * jnp.square(value[..., 0] - rows["return"]), rows["counts"], replicas)
            metrics = {"predictor_loss": predictor_loss, "intrinsic_value_loss": value_loss}
            return predictor_loss + value_loss, (metrics, {"predictor": predictor_state, "value": value_state})

        def step(learned: TrainState, index):
            learned, _, metrics = train_state.gradient(loss, learned, *index).step(self._optimizer, replicas)
            return learned, metrics

        indices = minibatches.minibatch_indices(
            index_key, rows=length, num_envs=envs, count=count, replicas=replicas, epochs=epochs
        )
        turns = jnp.repeat(jnp.arange(epochs, dtype=jnp.float32) / epochs, count)
        network, metrics = minibatches.steps_over_minibatches(step, state.learned, (indices, turns))
        metrics["intrinsic_reward"] = weighted_mean(reward, weight, replicas)
        new = RNDState(network, state.target, seen, *scale)
        return new, advantages, replicas.mean(metrics)

    def _normalized(
        self, state: RNDState, error: jax.Array, counts: jax.Array, replicas: Replicas
    ) -> tuple[jax.Array, tuple[RunningStatistics, jax.Array, jax.Array]]:
        """Divide errors [T, B] by the running deviation of their discounted sums; return them and the next statistics.

        Each environment's sum continues from rollout to rollout (section 2.4). Only two moments over environments are
        stored from the previous rollout, so each sum begins at the mean and counts as two sums: one deviation above and
        one below.
        """

        def add(total, row):
            error, counts = row
            total = jnp.where(counts, self.gamma * total + error, total)
            return total, total

        envs = jnp.ones_like(error[0])
        last, sums = jax.lax.scan(add, envs * state.mean, (error, counts))
        spread, spreads = jax.lax.scan(add, envs * state.deviation, (jnp.zeros_like(error), counts))
        both = jnp.stack([sums + spreads, sums - spreads])
        seen = normalization.update(state.returns, both, jnp.stack([counts, counts]), replicas)
        mean = replicas.mean(jnp.mean(last))
        variance = replicas.mean(jnp.mean(jnp.square(last - mean) + jnp.square(spread)))
        return normalization.scale_reward(seen, error, jnp.inf), (seen, mean, jnp.sqrt(variance))

    @property
    def _networks(self) -> dict[str, Embedding]:
        return {
            "target": Embedding(self.torso, (), self.features),
            "predictor": Embedding(self.torso, self.widths, self.features),
            "value": Embedding(self.torso, (), 1),
        }

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return Adam()(self.learning_rate)


def with_bonus(bonus: RND | None, advantages: jax.Array, intrinsic: jax.Array | None) -> jax.Array:
    """Return the weighted sum of advantages and of those returned by `RND.update` (Burda et al., 2018, section 2.3)."""
    if bonus is None or intrinsic is None:
        return advantages
    return bonus.extrinsic_weight * advantages + bonus.intrinsic_weight * intrinsic


def _own_key(key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, 1)


def _parts(learned: Variables) -> dict[str, Variables]:
    """Return the variables of each trained network."""
    return {name: Variables(params, learned.model_state[name]) for name, params in learned.params.items()}


registry.add("exploration", RND)
