"""What a compiled program does, read from XLA's text of it: kernels and collectives, loop by loop."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
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
# What starts no kernel: names of values, control flow that is counted by its body, and the second half of what is
# started before.
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
    "copy-done",
    "async-done",
    "async-update",
}


@dataclasses.dataclass
class Loop:
    """A loop of a program, or the program itself.

    Attributes:
      trips: how often the body runs; None where the program finds out.
      kernels: what one run of the body starts outside of its loops, by operation.
      collectives: what one run of the body exchanges between devices outside of its loops, by kind.
      loops: the loops within, in the order of the text.
    """

    trips: int | None = 1
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    loops: list["Loop"] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator["Loop"]:
        """Yield this loop and all loops within."""
        yield self
        for loop in self.loops:
            yield from loop.walk()

    def all_collectives(self) -> Counter[str]:
        """Return the collectives of one run of the body with all loops within; unknown numbers of trips count once."""
        found = Counter(self.collectives)
        for loop in self.loops:
            for kind, count in loop.all_collectives().items():
                found[kind] += count * (1 if loop.trips is None else loop.trips)
        return found

    def all_kernels(self) -> int:
        """Return the kernels of one run of the body with all loops within; unknown numbers of trips count once."""
        within = (loop.all_kernels() * (1 if loop.trips is None else loop.trips) for loop in self.loops)
        return sum(self.kernels.values()) + sum(within)


def read(text: str) -> Loop:
    """Return the loops of a program.

    Of a branch the one with most kernels counts.

    Args:
      text: of an optimized module (`jax.stages.Compiled.as_text`).

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            lines = computations[begun[2]] = []
            entry = begun[2] if begun[1] else entry
        elif " = " in line:
            lines.append(line.strip())
    if entry is None:
        raise ValueError("the text has no entry computation")
    return _loop(computations, entry, 1)


def _loop(computations, name, trips):
    found = Loop(trips)
    for line in computations.get(name, ()):
        value = line.split(" = ", 1)[1]
        operation = _operation(value)
        if operation == "while":
            body, condition = _named(value, "body"), _named(value, "condition")
            known = _TRIPS.search(value)
            trips = int(known[1]) if known else _counted_to(computations.get(condition, ()))
            found.loops.append(_loop(computations, body, trips))
        elif operation == "call":
            _include(found, _loop(computations, _named(value, "to_apply"), 1))
        elif operation == "conditional":
            named = [name for both in _BRANCHES.findall(value) for name in ", ".join(both).split(", ") if name]
            branches = [_loop(computations, name.lstrip("%"), 1) for name in named]
            if branches:
                _include(found, max(branches, key=Loop.all_kernels))
        elif operation is not None and (kind := operation.removesuffix("-start")) in COLLECTIVES:
            found.collectives[kind] += 1
        elif operation is not None and operation not in _FREE and not operation.endswith("-done"):
            found.kernels[operation.removesuffix("-start")] += 1
    return found


def _named(value, attribute):
    """The computation that an instruction names under this attribute."""
    found = re.search(rf"{attribute}=%?([\w.\-]+)", value)
    return found[1] if found else ""


def _counted_to(condition):
    """The number of trips by the condition of a loop: compilers that do not write it down count from 0 by one."""
    text = "\n".join(condition)
    compared = re.search(r"ROOT .*compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", text)
    limit = compared and re.search(rf"%?{re.escape(compared[1])} = \S+ constant\((\d+)\)", text)
    return int(limit[1]) if limit else None


def _include(loop, other):
    loop.kernels += other.kernels
    loop.collectives += other.collectives
    loop.loops += other.loops


def _operation(value):
    """The operation of an instruction, given what stands after the equals sign: the first word before a parenthesis.

    Those within the type before it, which may be a tuple and has layouts, are skipped by depth.
    """
    depth = 0
    for part in re.finditer(r"[(){}\[\]]|[a-z][a-z\-]*\(", value):
        if len(part[0]) > 1 and depth == 0:
            return part[0][:-1]
        depth += 1 if part[0][-1] in "({[" else -1
    return None
