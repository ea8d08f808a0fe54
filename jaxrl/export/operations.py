"""A traced program as a flat list of operations."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Literal

_LOOPS = ("scan", "while", "cond")


class Equation(NamedTuple):
    """One operation, whose inputs are variables, literals, or constant arrays of the program."""

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    parameters: dict[str, Any]


def flat_equations(program: ClosedJaxpr) -> tuple[list[Equation], list[Any]]:
    """Return the operations of a program, with called functions inlined, and the program's outputs.

    Literals and the program's inputs remain JAX objects. Constants and results become `Value`s; each call of a function
    gets new ones.
    """
    equations: list[Equation] = []

    def add(jaxpr, consts, inputs):
        value = {x: Value(x.aval, array) for x, array in zip(jaxpr.constvars, consts, strict=True)}
        value |= dict(zip(jaxpr.invars, inputs, strict=True))

        def known(x):
            return x if isinstance(x, Literal) else value[x]

        for equation in jaxpr.eqns:
            inner, inputs = _called(equation), tuple(map(known, equation.invars))
            if inner is not None:
                value |= dict(zip(equation.outvars, add(inner.jaxpr, inner.consts, inputs), strict=True))
                continue
            outputs = tuple(Value(x.aval) for x in equation.outvars)
            value |= dict(zip(equation.outvars, outputs, strict=True))
            equations.append(Equation(equation.primitive.name, inputs, outputs, equation.params))
        return [known(x) for x in jaxpr.outvars]

    outputs = add(program.jaxpr, program.consts, program.jaxpr.invars)
    return equations, outputs


class Value:
    """The result of an operation, or a constant array of a program."""

    def __init__(self, aval: Any, array: Any = None):
        self.aval, self.array = aval, array


def reachable(equations: Iterable[Equation], outputs: Iterable[Any]) -> set[Any]:
    """Return the variables and constants that the outputs depend on."""
    read = {x for x in outputs if not isinstance(x, Literal)}
    for equation in reversed(list(equations)):
        if not read.isdisjoint(equation.outputs):
            read |= {x for x in equation.inputs if not isinstance(x, Literal)}
    return read


def _called(equation) -> ClosedJaxpr | None:
    """Return the program of an operation that only calls another program, or None for any other operation."""
    if equation.primitive.name in _LOOPS:
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if inner is None or len(getattr(inner, "jaxpr", inner).invars) != len(equation.invars):
        return None
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
