"""Export of policies to one .npz file that needs only numpy to run."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxrl.core import files
from jaxrl.core.errors import ConfigError
from jaxrl.export import numpy_policy
from jaxrl.export.function import ActFunction
from jaxrl.export.operations import Equation, Value, flat_equations, reachable

# Parameters of operations that only concern compilers.
_OF_COMPILERS = ("accuracy", "out_sharding", "precision", "preferred_element_type", "sharding", "weak_type")


def write(path: Path, function: ActFunction, about: dict[str, Any]) -> None:
    """Write a policy to `path`, and the code that runs the policy to a file of the same name with the suffix ".py".

    Args:
      path: the .npz file.
      function: the policy.
      about: entries to store in the policy's description in addition to the operations.

    Raises:
      ConfigError: the policy has operations that numpy_policy.py lacks, such as convolutions.
      OSError: one of the files cannot be written.
    """
    content = _content(function, about)
    with files.replacing(path, "wb") as file:
        file.write(content)
    with files.replacing(path.with_suffix(".py")) as file:
        file.write(Path(numpy_policy.__file__).read_text(encoding="utf-8"))


def _content(function, about):
    program = function.traced()
    equations, outputs = flat_equations(program)
    read = reachable(equations, outputs)
    equations = [equation for equation in equations if not read.isdisjoint(equation.outputs)]
    known = numpy_policy.OPERATIONS
    if strange := sorted({one.name for one in equations if one.name not in known or _parameters(one) is None}):
        raise ConfigError(
            f"to='numpy' supports policies of dense layers with greedy actions only, but this one computes "
            f"{', '.join(strange)}; use to='stablehlo' or to='onnx'"
        )
    numbers: dict[Any, int] = {}
    constants: dict[int, np.ndarray] = {}

    def number(x):
        key = x if not isinstance(x, Literal) else (str(x.aval.dtype), np.asarray(x.val).item().__repr__())
        if key not in numbers:
            numbers[key] = len(numbers)
            if isinstance(x, Literal):
                constants[numbers[key]] = np.asarray(x.val, x.aval.dtype)
            elif isinstance(x, Value) and x.array is not None:
                constants[numbers[key]] = np.asarray(x.array)
        return numbers[key]

    variables, inputs = iter(program.jaxpr.invars), {}
    for name, argument in function.arguments.items():
        leaves = jax.tree.leaves(argument)
        places = [number(next(variables)) for _ in leaves]
        inputs[name] = [places, [_plain(x.shape[1:]) for x in leaves], [x.dtype.name for x in leaves]]
    operations: list[tuple[str, list[int], list[int], Any]] = []
    for equation in equations:
        name, parameters = equation.name, _parameters(equation)
        reads, writes = [number(x) for x in equation.inputs], [number(x) for x in equation.outputs]
        if f'"{numpy_policy.BATCH}"' in json.dumps(parameters) or not constants.keys() >= set(reads):
            operations.append((name, reads, writes, parameters))
            continue
        with np.errstate(all="ignore"):  # a constant result, computed once
            found = known[name](1, parameters, *(constants[x] for x in reads))
        constants |= zip(writes, found if isinstance(found, list) else [found], strict=True)
    results = [number(x) for x in outputs]
    used = {x for _, reads, _, _ in operations for x in reads} | set(results)
    constants = {place: array for place, array in constants.items() if place in used}
    form = jax.tree.structure(function.action)
    description = about | {
        "format": numpy_policy.FORMAT,
        "inputs": inputs,
        "operations": operations,
        "outputs": results,
        "action": jax.tree.unflatten(form, range(form.num_leaves)),
        "values": len(numbers),
        "constants": sorted(constants),
    }
    arrays: dict[str, Any] = {f"x{place}": array for place, array in constants.items()}
    arrays["description"] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _parameters(equation: Equation) -> dict[str, Any] | None:
    """Return the parameters of an operation as JSON values, or None if numpy_policy.py does not support them."""
    try:
        if equation.name == "gather":
            return _block(equation)
        if equation.name == "reshape":
            return {"new_sizes": _sizes(equation.parameters["new_sizes"])}
        return {name: _plain(x) for name, x in equation.parameters.items() if name not in _OF_COMPILERS}
    except TypeError:
        return None


def _sizes(sizes: Sequence[Any]) -> list[Any]:
    """Return the sizes of a reshape, with -1 for a multiple of the batch size, which numpy infers."""
    symbolic = [size for size in sizes if not isinstance(size, int | np.integer)]
    return [-1 if [size] == symbolic and str(size) != numpy_policy.BATCH else _plain(size) for size in sizes]


def _block(equation: Equation) -> dict[str, Any] | None:
    """Return the parameters of a gather that reads one contiguous slice; None for any other gather."""
    how, (x, start) = equation.parameters["dimension_numbers"], (value.aval for value in equation.inputs)
    axes, dropped = _plain(how.start_index_map), _plain(how.collapsed_slice_dims)
    in_order = tuple(how.offset_dims) == tuple(range(len(x.shape) - len(dropped)))
    if start.shape != (len(axes),) or not in_order or how.operand_batching_dims:
        return None
    return {"axes": axes, "dropped": dropped, "slice_sizes": _plain(equation.parameters["slice_sizes"])}


def _plain(value):
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None:
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if str(value) == numpy_policy.BATCH:
        return numpy_policy.BATCH
    raise TypeError(value)
