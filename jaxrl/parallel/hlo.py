"""The kernels and collectives of each loop of a compiled program, parsed from XLA's text format (HLO)."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
# The groups are the type of an instruction's results, its operation, and its operands and attributes. Types may be
# tuples with layouts, but within a type, a word before "(" never follows a space.
_INSTRUCTION = re.compile(r" = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Operations that do not start a kernel: they only name values, or constrain their order.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
    "add-dependency",
    "domain",
}


@dataclasses.dataclass
class Loop:
    """A loop of a program, or the program itself.

    Attributes:
      trips: number of times that the body runs; None if the number is only known at run time.
      kernels: number of kernels, keyed by operation, that one run of the body and the condition starts outside the
        inner loops.
      collectives: number of collectives, keyed by kind, that one run of the body starts outside the inner loops.
      exchanged: bytes of the arrays that these collectives return on one device.
      loops: the inner loops, in the order of the program's text.
    """

    trips: int | None = 1
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    exchanged: int = 0
    loops: list["Loop"] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator[tuple["Loop", int]]:
        """Yield this loop and all inner loops, each with its number of runs; an unknown `trips` counts as 1."""
        yield self, 1
        for loop in self.loops:
            trips = 1 if loop.trips is None else loop.trips
            yield from ((inner, trips * runs) for inner, runs in loop.walk())

    def all_collectives(self) -> Counter[str]:
        """Return the number of collectives, keyed by kind, of one run of the body and all inner loops."""
        found = Counter()
        for loop, runs in self.walk():
            found.update({kind: runs * count for kind, count in loop.collectives.items()})
        return found

    def all_exchanged(self) -> int:
        """Return the bytes that one run of the body and all inner loops exchange, counted as in `exchanged`."""
        return sum(runs * loop.exchanged for loop, runs in self.walk())

    def all_kernels(self) -> int:
        """Return the number of kernels of one run of the body and all inner loops."""
        return sum(runs * loop.kernels.total() for loop, runs in self.walk())


def read(text: str) -> Loop:
    """Return the loops of a program.

    For a conditional, the branch with the most kernels is counted.

    Args:
      text: the text of an optimized module (`jax.stages.Compiled.as_text`).

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[re.Match[str]]] = {}
    entry, instructions = None, []
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            instructions = computations[begun[2]] = []
            entry = begun[2] if begun[1] else entry
        elif instruction := _INSTRUCTION.search(line.strip()):
            instructions.append(instruction)
    if entry is None:
        raise ValueError("the text has no entry computation")
    return _loop(computations, entry, 1)


def _loop(computations, name, trips):
    found = Loop(trips)
    for instruction in computations[name]:
        type_text, operation, value = instruction.groups()
        kind = operation.removesuffix("-start")
        if operation == "while":
            known, condition = _TRIPS.search(value), computations[_named(value, "condition")]
            inner = _loop(computations, _named(value, "body"), int(known[1]) if known else _counted_to(condition))
            _include(inner, _loop(computations, _named(value, "condition"), 1))
            found.loops.append(inner)
        elif kind in ("call", "async"):
            _include(found, _loop(computations, _named(value, "to_apply") or _named(value, "calls"), 1))
        elif operation == "conditional":
            names = [name for both in _BRANCHES.findall(value) for name in ", ".join(both).split(", ") if name]
            branches = [_loop(computations, name.lstrip("%"), 1) for name in names]
            _include(found, max(branches, key=lambda branch: (branch.all_kernels(), branch.all_collectives().total())))
        elif kind in COLLECTIVES:
            found.collectives[kind] += 1
            found.exchanged += _bytes(type_text, operation == "all-gather-start")
        elif operation not in _FREE and not operation.endswith(("-done", "-update")):
            found.kernels[kind] += 1
            if operation == "fusion":  # TPU compilers put collectives into some fusions
                within = _loop(computations, _named(value, "calls"), 1)
                found.collectives += within.all_collectives()
                found.exchanged += within.all_exchanged()
    return found


def _bytes(type_text, with_operands):
    """Return the bytes of a type's arrays; if `with_operands`, count only the second half, which are the results."""
    arrays = [(int(bits or 8), dimensions) for bits, dimensions in _ARRAY.findall(type_text)]
    arrays = arrays[len(arrays) // 2 :] if with_operands else arrays
    return sum(bits * math.prod(int(n) for n in shape.split(",") if n) for bits, shape in arrays) // 8


def _named(value, attribute):
    """Return the computation named by an attribute of an instruction, or ""."""
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", value)
    return found[1] if found else ""


def _counted_to(condition):
    """Return the number of trips if a loop's condition compares a counter with a constant, or None.

    JAX's loops count from 0 in steps of 1, and compilers that do not annotate the number of trips keep the comparison.
    """
    text = "\n".join(instruction.string for instruction in condition)
    compared = re.search(r"^ROOT .*compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", text, re.MULTILINE)
    limit = compared and re.search(rf"^%?{re.escape(compared[1])} = \S+ constant\((\d+)\)", text, re.MULTILINE)
    return int(limit[1]) if limit else None


def _include(loop, other):
    loop.kernels += other.kernels
    loop.collectives += other.collectives
    loop.exchanged += other.exchanged
    loop.loops += other.loops
