"""Conversion and checks of public functions' arguments according to their annotations, before compilation."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems, number_problems, seed_problems, whole

Limits = Mapping[str, Any]
SEEDS = ("seed", "search_seed")  # only integers: floats cannot represent large ones
_WORDS = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    os.PathLike: "a path",
    Path: "a path",
    str: "a string",
}


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a union annotation; for any other annotation, return a tuple of only this annotation."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def is_whole(annotation: Any) -> bool:
    """Return whether an annotation allows int but not float, such as `int`, `int | None` or `int | Sequence[int]`."""
    return int in members(annotation) and float not in members(annotation)


def whole_arguments[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that its integer arguments, except seeds, accept whole numbers of any type, such as `1e6`."""
    parameters = inspect.signature(function).parameters
    counts = {name: whole for name, p in parameters.items() if is_whole(p.annotation) and name not in SEEDS}
    return converting(function, list(parameters), counts)


def converting[**P, R](
    function: Callable[P, R], order: Sequence[str], converters: Mapping[str, Callable[[Any], Any]]
) -> Callable[P, R]:
    """Wrap `function` so that its arguments are converted before the call.

    Args:
      function: the function.
      order: names of the function's arguments, in order.
      converters: conversion functions by argument name; other arguments are passed unchanged.
    """

    def converted(name, value):
        return converters[name](value) if name in converters else value

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        named = {name: converted(name, value) for name, value in kwargs.items()}
        # The type checker cannot see that the converted arguments still match the function's parameters.
        return function(*map(converted, order, args), *args[len(order) :], **named)  # ty: ignore[invalid-argument-type]

    return call


def problems_of(function: Callable, values: Mapping[str, Any], **limits: Limits) -> list[str]:
    """Return one line per argument value that violates its annotation or limits (see `checked`)."""
    problems = []
    for name, parameter in inspect.signature(function).parameters.items():
        several = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name in values and not several and parameter.annotation is not parameter.empty:
            problems += _problems(name, parameter.annotation, values[name], limits.get(name, {}))
    return problems


def checked[**P, R](**limits: Limits) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks arguments against their annotations and raises one `ConfigError` for all problems.

    It checks arguments annotated with `int`, `float`, `bool`, `str`, a path, a class, or one of these in a union with
    None, and with literals. Whole numbers of any type are converted to `int`.

    Args:
      **limits: limits of each argument, by name: `episodes={"low": 1}`.
    """

    def decorate(function):
        converted, signature = whole_arguments(function), inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError:  # Python's own error names the function
                return function(*args, **kwargs)
            if problems := problems_of(function, bound, **limits):
                raise ConfigError(problems)
            return converted(*args, **kwargs)

        return call

    return decorate


def _problems(name: str, annotation: Any, value: Any, limits: Limits) -> list[str]:
    allowed = members(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return [] if value in choices else [f"{name}={value!r:.80} is not one of {', '.join(map(repr, choices))}"]
    kinds = [kind for kind in allowed if kind is not types.NoneType]
    if Any in kinds or not all(isinstance(kind, type) and not getattr(kind, "_is_protocol", False) for kind in kinds):
        return []
    if kinds == [int] and name in SEEDS and value is not None:
        return seed_problems(name, value)
    if kinds == [int] and value is not None:
        number = whole(value)
        return count_problems(**{name: (number, -(2**63))}) or number_problems(name, number, limits)
    if kinds == [float] and value is not None:
        return number_problems(name, value, limits)
    if isinstance(value, (*allowed, *(os.PathLike for kind in kinds if kind is Path))):
        return []
    return [f"{name}={value!r:.80} must be {' or '.join(_WORDS.get(kind, kind.__name__) for kind in kinds)}"]
