"""Fields of epsilon-greedy exploration."""

from jaxrl.algos.base import field_group, number, static
from jaxrl.core.schedules import Linear, Scalar


@field_group
class EpsilonGreedyFields:
    """How often actions are random, and for how long."""

    epsilon: Scalar = number(Linear(1.0, 0.05, 0.1), low=0, high=1, help="probability of a random action")
    ladder_exponent: Scalar = number(7.0, low=0, only_with="ladder", help="last environment uses epsilon^(1 + this)")
    random_persistence: float | None = static(
        0.0, low=0, below=1, help="probability that a random action is repeated at the next step"
    )
    ladder: bool = static(False, help="Ape-X ladder: epsilon decreases from the first environment to the last")
