"""The threshold of variation for normalization by a mean and a standard deviation."""

from typing import Any

LEAST_STD = 1e-6  # as in brax's normalizer
LEAST_RELATIVE_STD = 2.0**-15  # of the mean's magnitude: hundreds of roundings of float32


def varies(mean: Any, std: Any, least: float = LEAST_STD) -> Any:
    """Return whether values with these moments vary by more than rounding, elementwise.

    What hardly varies carries no information, and to divide by its deviation would turn the slightest difference
    between two simulators, or between a dataset and an environment, into many deviations.

    Args:
      mean, std: NumPy or JAX arrays of the same shape.
      least: standard deviation up to which nothing varies, whatever the mean.
    """
    return (std > least) & (std > LEAST_RELATIVE_STD * abs(mean))
