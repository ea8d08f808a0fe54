"""Discount field of all algorithms with returns."""

from jaxrl.algos.base import field_group, number
from jaxrl.core.schedules import Scalar


@field_group
class DiscountFields:
    """Discounting of rewards."""

    gamma: Scalar = number(0.99, low=0, high=1, help="discount factor")
