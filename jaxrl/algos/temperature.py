"""Temperature of soft actor-critics, the weight of the entropy (Haarnoja et al., 2018, arXiv:1812.05905, section 5)."""

import jax
import jax.numpy as jnp
import optax

from jaxrl.algos import train_state
from jaxrl.algos.base import field_group, number, part, part_class, static
from jaxrl.algos.fields import ActorCriticFields
from jaxrl.algos.kl_limits import step_log
from jaxrl.algos.optimizers import Number
from jaxrl.algos.train_state import TrainState, weighted_mean
from jaxrl.core import spaces
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Replicas, TransitionBatch


@part_class
class Temperature:
    """Weight of a policy's entropy (alpha), fixed or learned."""

    initial: Scalar = number(1.0, above=0, help="weight of the entropy; the initial weight if it is learned")
    learned: bool = static(True, help="adapt the weight to the target entropy")
    learning_rate: Scalar | None = number(
        None, above=0, only_with="learned", help="learning rate of the weight; None: the algorithm's learning_rate"
    )
    target: Scalar = number(
        -1.0, high=0.69, only_with="learned", help="target entropy per dimension of continuous actions, in nats"
    )
    target_fraction: Scalar = number(
        0.89,
        above=0,
        below=1,
        only_with="learned",
        help="discrete actions: target entropy as a fraction of the maximum",
    )

    def init(self, optimizer: optax.GradientTransformation) -> TrainState:
        """Return the initial training state of log(alpha), a float32 scalar, or of () if the weight is fixed."""
        log = jnp.log(jnp.asarray(self.initial, jnp.float32)) if self.learned else ()
        return train_state.create(log, (), optimizer)

    def weight(self, log: TrainState) -> Number:
        """Return the weight of the entropy, learned or fixed."""
        return jnp.exp(log.params) if self.learned else self.initial

    def step(
        self,
        log: TrainState,
        optimizer: optax.GradientTransformation,
        batch: TransitionBatch,
        log_prob: jax.Array,
        spec: EnvSpec,
        replicas: Replicas,
    ) -> TrainState:
        """Take a step of log(alpha), if it is learned, towards the target entropy (equation 18).

        Args:
          log: the current training state of log(alpha).
          optimizer: as passed to `init`.
          batch: transitions.
          log_prob: log-probabilities [batch] of the policy's actions at these transitions.
          spec: the environment's spec.
          replicas: as passed to `update`.
        """
        if not self.learned:
            return log
        target = target_entropy(batch, self.target, self.target_fraction, spec)
        missing = weighted_mean(log_prob + target, batch.weight, replicas)
        # The loss is -log(alpha) times the missing entropy; log_prob is a sample without gradient.
        return step_log(log, -missing, optimizer, replicas)


def target_entropy(batch: TransitionBatch, per_dimension: Number, fraction: Number, spec: EnvSpec) -> jax.Array:
    """Return the temperature's target entropy [batch] for each transition's observation.

    Args:
      batch: transitions.
      per_dimension: target per dimension of a box in [-1, 1], in nats.
      fraction: target as a fraction of the maximum entropy over allowed discrete actions.
      spec: the environment's spec.
    """
    if isinstance(spec.action_space, spaces.Box):
        return jnp.full_like(batch.weight, per_dimension * spec.action_space.shape[0], jnp.float32)
    allowed = spaces.expect(spec.action_space, spaces.Discrete).n
    if batch.action_mask is not None:
        allowed = jnp.maximum(jnp.sum(batch.action_mask, axis=-1), 1)
    return jnp.broadcast_to(fraction * jnp.log(jnp.float32(allowed)), batch.weight.shape)


@field_group
class TemperatureFields(ActorCriticFields):
    """Policy with a weight of its entropy, and critics."""

    temperature: Temperature = part(
        Temperature,
        default=Temperature(),
        was={
            "temperature": "initial",
            "learn_temperature": "learned",
            "temperature_learning_rate": "learning_rate",
            "target_entropy": "target",
            "target_entropy_fraction": "target_fraction",
        },
        help="weight of the policy's entropy (alpha), fixed or learned",
    )

    @property
    def temperature_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the temperature."""
        return self.optimizer_at(self.temperature.learning_rate)
