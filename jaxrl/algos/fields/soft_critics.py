"""Fields in which the variants of soft actor-critic differ."""

from typing import Literal

from jaxrl.algos.base import field_group, number, static
from jaxrl.algos.fields.actor_critic import ActorCriticFields, QuantileFields, SupportFields
from jaxrl.core.schedules import Scalar


@field_group
class SoftCriticFields(SupportFields, QuantileFields, ActorCriticFields):
    """The targets of the critics, and the schedule and values of the policy's updates."""

    tau: Scalar | None = number(
        0.005,
        above=0,
        high=1,
        help="soft update coefficient of the target networks (Polyak averaging); None: no target networks",
    )
    joint_batch: bool = static(
        False,
        help="one batch of observations and next observations for critics and targets, in training mode",
    )
    joint_policy: bool = static(False, help="use one such batch also in the policy's loss")
    target_critics: int | None = static(
        None, low=1, help="number of critics sampled at each update to compute the targets; None: all"
    )
    target_value: Literal["min", "mean"] = static(
        "min",
        choices=("min", "mean"),
        help="reduction over the critics' values in the targets; min pools the quantiles of all critics",
    )
    dropped_quantiles: int = static(
        0,
        low=0,
        only_with="critic.head=quantilevalues",
        help="number of largest quantiles dropped from the targets, per critic (TQC)",
    )
    policy_delay: int = static(1, low=1, help="critic updates per update of the policy and the temperature")
    policy_value: Literal["min", "mean"] = static(
        "min", choices=("min", "mean"), help="reduction over the critics' values in the policy's loss"
    )

    def problems(self) -> list[str]:
        """Explain why there are too few critics, one line each."""
        name, found = type(self).__name__, []
        members, head = (getattr(self.critic, part, None) for part in ("ensemble", "head"))
        quantiles = getattr(head, "quantiles", None)
        if isinstance(members, int) and isinstance(self.target_critics, int) and self.target_critics > members:
            found.append(f"{name}.target_critics={self.target_critics} must be at most critic.ensemble={members}")
        if isinstance(quantiles, int) and isinstance(self.dropped_quantiles, int):
            if self.dropped_quantiles >= quantiles:
                found.append(
                    f"{name}.dropped_quantiles={self.dropped_quantiles} must be less than critic.head.quantiles="
                    f"{quantiles}"
                )
        return found
