"""The field that every algorithm of returns has."""

from jaxrl.algos.base import field_group, number
from jaxrl.core.schedules import Scalar


@field_group
class DiscountFields:
    """How much later rewards count."""

    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")
