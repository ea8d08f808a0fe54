"""Schedules: numbers that change over a run, in the place of a number in an algorithm's field."""

from jaxrl.core.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    PiecewiseConstant,
    Scalar,
    Schedule,
    resolve_schedules,
)

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Linear",
    "PiecewiseConstant",
    "Scalar",
    "Schedule",
    "resolve_schedules",
]


def __dir__() -> list[str]:
    return __all__
