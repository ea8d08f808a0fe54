"""Generative adversarial imitation (Ho & Ermon, 2016, arXiv:1606.03476), off-policy: SAC on learned rewards.

With a replay, a gradient penalty and absorbing states, it is discriminator-actor-critic (Kostrikov et al., 2019,
arXiv:1809.02925).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import optax

from jaxrl.algos import off_policy, q_learning, train_state
from jaxrl.algos.acting import StochasticActing
from jaxrl.algos.base import algorithm, changed, network_problems, number, static
from jaxrl.algos.fields import ReplayFields, TargetFields
from jaxrl.algos.histories import Observations
from jaxrl.algos.sac import SAC, SACState
from jaxrl.algos.temperature import TemperatureFields
from jaxrl.algos.train_state import TrainState, Variables, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.sources import Dataset
from jaxrl.core.types import (
    TRANSITION_INPUTS,
    EnvSpec,
    ModelState,
    PyTree,
    Replicas,
    Source,
    TransitionBatch,
    UpdateInfo,
)
from jaxrl.networks import ActionValues, Critic
from jaxrl.networks.torsos import to_float

_LEAST_NORM = 1e-6  # minimum norm of a gradient: a norm is not differentiable at 0


class GAILState(SACState):
    """State of the learner."""

    discriminator: TrainState  # parameters "network", and "absorbing", the logit of the absorbing state

    @classmethod
    def of(cls, sac: SACState, discriminator: TrainState) -> Self:
        """Combine SAC's state and the discriminator."""
        return cls(**vars(sac), discriminator=discriminator)


@algorithm
class GAIL(StochasticActing, ReplayFields, TargetFields, TemperatureFields):
    """Generative adversarial imitation: SAC with rewards from a discriminator trained on demonstrations."""

    gamma: Scalar = changed(0.99, low=0, below=1)
    batch_size: int = changed(256, help="transitions per update, and the same number of demonstrations")
    discriminator_learning_rate: Scalar | None = number(
        None, above=0, help="learning rate of the discriminator; None: learning_rate"
    )
    gradient_penalty: Scalar = number(10.0, low=0, help="weight of the discriminator's gradient penalty")
    reward: Literal["airl", "gail"] = static(
        "airl",
        choices=("airl", "gail"),
        help="airl: log D - log(1 - D), of either sign; gail: -log(1 - D), nonnegative",
    )
    absorbing: bool = static(
        True, help="terminations lead to an absorbing state with a learned reward; False: terminal states have value 0"
    )
    discriminator: Critic = static(Critic(widths=(100, 100), activation="tanh", ensemble=1))

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        found = self.actor_critic_problems(spec, stochastic=True, discrete=True, dropout=True)
        judge = self.discriminator
        plain = isinstance(judge, Critic) and isinstance(judge.head, ActionValues) and not judge.head.noisy
        if not (plain and judge.ensemble == 1):
            found.append(
                f"GAIL.discriminator={judge!r:.250} must be a Critic(ensemble=1) with ActionValues(noisy=False)"
            )
        return found or network_problems("GAIL.discriminator", judge, spec, TRANSITION_INPUTS)

    @property
    def experience(self) -> Mapping[str, Source]:
        return {"replay": self.source(), "demonstrations": Dataset(self.batch_size)}

    @property
    def sac(self) -> SAC:
        """Return SAC with the settings that it shares with GAIL; it learns from the discriminator's rewards."""
        names = [field.name for field in dataclasses.fields(SAC) if hasattr(self, field.name)]
        return SAC(**{name: getattr(self, name) for name in names})

    def init(self, key: jax.Array, spec: EnvSpec) -> GAILState:
        key, discriminator_key = jax.random.split(key)
        params, model_state = self.discriminator.init(discriminator_key, spec)
        params = {"network": params, "absorbing": jnp.float32(0.0)}
        return GAILState.of(
            self.sac.init(key, spec),
            train_state.create(params, model_state, self._optimizer),
        )

    def update(
        self, state: GAILState, batch: Mapping[str, Any], *, spec: EnvSpec, key: jax.Array, replicas: Replicas
    ) -> tuple[GAILState, UpdateInfo]:
        key, pair_key = jax.random.split(key)
        pair_key = q_learning.transition_keys(pair_key, batch["replay"].weight.shape[0], replicas)
        clip, expert = self.observation_clip, batch["demonstrations"]
        statistics, own = off_policy.learning_batch(state.statistics, batch, clip, replicas)
        own = own.replace(observation=own.observation.current)
        expert = expert.replace(observation=off_policy.normalize_observation(statistics, expert.observation, clip))

        def loss(learned):
            """Return the cross-entropy (Ho & Ermon, equation 17) plus the penalty."""
            params = learned.params
            variables = learned.replace(params=params["network"])
            parts = (own.observation, own.action), (expert.observation, expert.action)
            both = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
            logit, model_state = logits(self.discriminator, variables, *both, spec, train=True)
            of_own, of_expert = jnp.split(logit, 2)

            def entropy_of(sign, logit, batch):  # each termination is followed by one absorbing state
                logit = jnp.concatenate([logit, jnp.broadcast_to(params["absorbing"], logit.shape)])
                ended = batch.weight & jnp.logical_not(batch.bootstrap) & self.absorbing
                return weighted_mean(jax.nn.softplus(sign * logit), jnp.concatenate([batch.weight, ended]), replicas)

            entropy = entropy_of(1.0, of_own, own) + entropy_of(-1.0, of_expert, expert)
            penalty = gradient_penalty(self.discriminator, variables, own, expert, pair_key, spec)
            penalty = weighted_mean(penalty, own.weight & expert.weight, replicas)
            accuracy = 0.5 * weighted_mean((of_own < 0.0).astype(jnp.float32), own.weight, replicas)
            accuracy += 0.5 * weighted_mean((of_expert > 0.0).astype(jnp.float32), expert.weight, replicas)
            metrics = {"discriminator_loss": entropy, "discriminator_accuracy": accuracy, "gradient_penalty": penalty}
            return entropy + self.gradient_penalty * penalty, (metrics, model_state)

        discriminator, _, metrics = train_state.gradient(loss, state.discriminator).step(self._optimizer, replicas)

        # The environment's rewards are never read; learned rewards replace those of the batch below.
        variables = Variables(discriminator.params["network"], discriminator.model_state)
        reward = self._reward(logits(self.discriminator, variables, own.observation, own.action, spec)[0])
        metrics["learned_reward"] = weighted_mean(reward, own.weight, replicas)
        if self.absorbing:  # SAC's target ends at a termination, so the absorbing state's constant return is added here
            endless = self._reward(discriminator.params["absorbing"]) / (1.0 - self.gamma)
            reward = reward + jnp.where(own.bootstrap, 0.0, self.gamma * endless)
        replay = batch["replay"].replace(rewards=reward[:, None])
        learned, info = self.sac.update(state, {"replay": replay}, spec=spec, key=key, replicas=replicas)
        return GAILState.of(learned, discriminator), UpdateInfo(info.metrics | replicas.mean(metrics))

    def _reward(self, logit: jax.Array) -> jax.Array:
        """Return the reward, log D - log(1 - D) or -log(1 - D), for logits of D, the probability of a demonstration."""
        return logit if self.reward == "airl" else jax.nn.softplus(logit)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.optimizer_at(self.discriminator_learning_rate)


def logits(
    network: Critic, variables: Variables, observation: PyTree, action: jax.Array, spec: EnvSpec, *, train: bool = False
) -> tuple[jax.Array, ModelState]:
    """Return the logits [batch] of (observation, action) pairs being demonstrations, and the new model state."""
    discrete = isinstance(spec.action_space, spaces.Discrete)
    boxed = None if discrete else action
    inputs = Observations(observation)
    output, model_state = inputs.critic_output(network, variables, boxed, spec, train=train)
    taken = action if discrete else jnp.zeros(action.shape[:1], jnp.int32)
    return q_learning.of_action(output[0], taken)[:, 0], model_state


def gradient_penalty(
    network: Critic, variables: Variables, own: TransitionBatch, expert: TransitionBatch, key: jax.Array, spec: EnvSpec
) -> jax.Array:
    """Return (|gradient of the logit| - 1)^2 [batch] at random points between pairs (Gulrajani et al., 2017, eq. 3).

    The gradient is with respect to observations, images in [0, 1], and continuous actions scaled to [-1, 1].

    Args:
      network, variables: the discriminator.
      own, expert: the run's own transitions and the demonstrations, paired by position.
      key: keys [batch].
      spec: the environment's spec.
    """
    fraction = jax.vmap(jax.random.uniform)(key)

    def between(x, y, space):
        if isinstance(space, spaces.Dict):
            return {name: between(x[name], y[name], child) for name, child in space.items}
        if not isinstance(space, spaces.Box):
            return y  # categories are not interpolated
        x, y, part = to_float(x, space), to_float(y, space), fraction.reshape(-1, *[1] * (x.ndim - 1))
        return (1.0 - part) * x + part * y

    def total(observation, action):
        if not isinstance(spec.action_space, spaces.Discrete):
            return jnp.sum(logits(network, variables, observation, action, spec)[0])
        ends = [logits(network, variables, observation, x.action, spec)[0] for x in (own, expert)]
        return jnp.sum((1.0 - fraction) * ends[0] + fraction * ends[1])

    observation = between(own.observation, expert.observation, spec.observation_space)
    action = between(own.action, expert.action, spec.action_space)
    slopes, by_action = jax.grad(total, argnums=(0, 1), allow_int=True)(observation, action)
    slopes = [x for x in jax.tree.leaves(slopes) if x.dtype != jax.dtypes.float0]
    if isinstance(spec.action_space, spaces.Box):
        slopes.append(by_action * jnp.expand_dims(0.5 * (spec.action_space.high - spec.action_space.low), 0))
    square = sum((jnp.sum(jnp.square(x.reshape(len(fraction), -1)), axis=-1) for x in slopes), jnp.zeros_like(fraction))
    return jnp.square(jnp.sqrt(jnp.maximum(square, _LEAST_NORM**2)) - 1.0)
