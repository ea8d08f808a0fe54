"""Threshold of variation for normalization by a mean and a standard deviation."""

from typing import Any

LEAST_STD = 1e-6  # as in brax's normalizer
LEAST_RELATIVE_STD = 2.0**-19  # of the mean's magnitude: 16 to 32 steps between float32 numbers


def varies(mean: Any, std: Any, least: float = LEAST_STD) -> Any:
    """Return whether values with these moments vary by more than rounding, elementwise.

    Dividing values that hardly vary by their deviation would turn rounding differences of another simulator, or of the
    environment behind a dataset, into many deviations. A pressure of 101325 +- 3 Pa varies by 400 steps of float32.

    Args:
      mean, std: NumPy or JAX arrays of the same shape.
      least: standard deviation up to which values count as constant, for any mean.
    """
    return (std > least) & (std > LEAST_RELATIVE_STD * abs(mean))
