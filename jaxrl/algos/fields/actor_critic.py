"""Fields of the off-policy actor-critics, and of their exploration."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.algos import q_learning
from jaxrl.algos.base import changed, field_group, number, static
from jaxrl.algos.fields.discount import DiscountFields
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Network
from jaxrl.networks import Actor, CategoricalValues, Critic, SelfPredictiveValues, resolve_network


@field_group
class ActorCriticFields(DiscountFields):
    """Policy, critics and their optimizers."""

    learning_rate: Scalar = number(3e-4, above=0, help="learning rate of the critics and values")
    policy_learning_rate: Scalar | None = number(None, above=0, help="learning rate of the policy; None: learning_rate")
    optimizer: Optimizer = number(Adam(eps=1e-8))
    policy: Network = static(Actor())
    critic: Critic = static(Critic())

    def resolved_networks(self, spec: EnvSpec) -> dict[str, Any]:
        """Return `policy` and `critic`, with unset torsos replaced by defaults for the observations."""
        return {"policy": resolve_network(self.policy, spec), "critic": resolve_network(self.critic, spec)}

    @property
    def critic_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the critics."""
        return self.optimizer(self.learning_rate)

    @property
    def policy_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the policy."""
        rate = self.policy_learning_rate
        return self.optimizer(self.learning_rate if rate is None else rate)


@field_group
class TargetFields:
    """Target networks that follow the networks by Polyak averaging."""

    tau: Scalar = number(
        0.005, above=0, high=1, help="soft update coefficient of the target networks (Polyak averaging)"
    )


# Kept when the networks are reset.
_UNCHANGED = ("statistics", "updates", "return_scale", "policy_loss", "policy_metrics")


@field_group
class ResetFields:
    """Resets of the networks, because networks trained early on little data learn worse later."""

    reset_at: tuple[int, ...] = static(
        (),
        help="update counts at which networks and optimizers are reset; replay and statistics stay (Nikishin, 2022)",
    )

    def problems(self) -> list[str]:
        """Explain why `reset_at` is invalid, one line."""
        updates, name = self.reset_at, type(self).__name__
        whole = isinstance(updates, tuple) and all(isinstance(x, int) and not isinstance(x, bool) for x in updates)
        if whole and all(0 < x < 2**31 for x in updates):
            return []
        return [f"{name}.reset_at={updates!r:.80} must be a tuple of update counts, such as (15_000, 50_000)"]

    def after_reset[State: Any](self: Any, state: State, key: jax.Array, spec: EnvSpec) -> State:
        """Return the state after an update, reinitialized except for statistics and counts if `reset_at` contains it.

        The new state is computed only if a reset is due; in vmapped runs, it is always computed.
        """
        if not self.reset_at:
            return state

        def again(state, key):
            unchanged = {name: getattr(state, name) for name in _UNCHANGED if hasattr(state, name)}
            return self.init(key, spec).replace(**unchanged)

        due = jnp.isin(state.updates, jnp.asarray(self.reset_at, state.updates.dtype))
        # Not the number of a shard, which others fold into the same key.
        key = jax.random.fold_in(key, 2**31 - 1)
        return jax.lax.cond(due, again, lambda same, _: same, state, key)


@field_group
class PeriodicTargetFields(TargetFields):
    """Target networks that are replaced every `target_period` updates."""

    tau: Scalar = changed(1.0)
    target_period: int = static(100, low=1, help="gradient updates between target network updates")


@field_group
class TemperatureFields(ActorCriticFields):
    """Weight of a policy's entropy, fixed or learned."""

    temperature_learning_rate: Scalar | None = number(
        None, above=0, only_with="learn_temperature", help="learning rate of the temperature; None: learning_rate"
    )
    temperature: Scalar = number(
        1.0, above=0, help="weight of the entropy (alpha); the initial weight if it is learned"
    )
    learn_temperature: bool = static(True, help="adapt the temperature to the target entropy")
    target_entropy: Scalar = number(
        -1.0,
        high=0.69,
        only_with="learn_temperature",
        help="target entropy per dimension of continuous actions, in nats",
    )
    target_entropy_fraction: Scalar = number(
        0.89,
        above=0,
        below=1,
        only_with="learn_temperature",
        help="discrete actions: target entropy as a fraction of the maximum",
    )

    @property
    def temperature_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer at the learning rate of the temperature."""
        rate = self.temperature_learning_rate
        return self.optimizer(self.learning_rate if rate is None else rate)


_SUPPORT = "critic.head=categoricalvalues or critic.head=selfpredictivevalues"


@field_group
class SupportFields:
    """Support of categorical values."""

    v_min: Scalar = number(-150.0, only_with=_SUPPORT, help="minimum of the categorical support")
    v_max: Scalar = number(150.0, only_with=_SUPPORT, help="maximum of the categorical support")

    @property
    def support(self) -> dict[str, Any]:
        """Return the ends of the support as keyword arguments of losses and targets."""
        return {"v_min": self.v_min, "v_max": self.v_max}

    def problems(self) -> list[str]:
        """Explain why the ends do not form an interval, if a head has a support."""
        network = getattr(self, "critic", None) or getattr(self, "network", None)
        if not isinstance(getattr(network, "head", None), CategoricalValues | SelfPredictiveValues):
            return []
        return q_learning.support_problems(type(self).__name__, self.v_min, self.v_max)


@field_group
class QuantileFields:
    """Loss of quantile heads."""

    quantile_huber: Scalar = number(
        1.0,
        above=0,
        only_with="critic.head=quantilevalues",
        help="Huber threshold of the quantile loss, above which it is linear",
    )


@field_group
class NormalizationFields:
    """Normalization of observations."""

    normalize_observation: bool = static(False, help="normalize observations by running mean and standard deviation")
    observation_clip: Scalar | None = number(
        10.0,
        above=0,
        only_with="normalize_observation",
        help="maximum absolute value of normalized observations; None: no clipping",
    )


@field_group
class NoiseFields:
    """Correlation of exploration noise in time."""

    noise_correlation: float = static(
        0.0,
        low=0,
        below=1,
        help="continuous actions: correlation of exploration noise between consecutive steps; 0: independent",
    )
    random_correlation: float | None = static(
        None,
        low=0,
        below=1,
        help="continuous actions: correlation of random actions before the first update; None: noise_correlation",
    )
    noise_hold: int = static(
        1,
        low=1,
        help="continuous actions: maximum steps of holding exploration noise; n steps have probability ~ 1 / n^2",
    )


@field_group
class ExplorationNoiseFields(NoiseFields):
    """Exploration noise of deterministic policies."""

    exploration_noise: Scalar = number(
        0.1, low=0, help="standard deviation of the exploration noise, in units of half the action range"
    )
    least_noise: Scalar | None = number(
        None,
        low=0,
        help="minimum noise standard deviation, sampled per episode up to exploration_noise; None: exploration_noise",
    )

    def problems(self) -> list[str]:
        """Explain why `least_noise` is invalid, one line."""
        low, high = self.least_noise, self.exploration_noise
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            return [f"{type(self).__name__}.least_noise={low:g} must be at most exploration_noise={high:g}"]
        return []


@field_group
class DelayedPolicyFields:
    """Delayed updates of a deterministic policy, and smoothed target actions (TD3)."""

    target_noise: Scalar = number(
        0.2, low=0, help="standard deviation of the target policy's noise, in units of half the action range"
    )
    target_noise_clip: Scalar = number(
        0.5, low=0, help="maximum absolute value of the target policy's noise, in the same units"
    )
    policy_delay: int = static(2, low=1, help="critic updates per update of the policy and the targets")
