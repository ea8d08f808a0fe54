"""How many kernels PPO on CartPole starts: a step of the rollout, a minibatch, and an iteration beside both loops.

    python benchmarks/kernels.py [--num-envs 4] [--loops]

Small programs are not arithmetic: an iteration of 4 environments x 128 steps, 4 epochs of 4 minibatches, is some
20,000 kernels of a microsecond or less. They are counted in the program as XLA compiled it (its HLO text): what is
not a parameter, a constant, a tuple or a view starts a kernel; a loop's are those of one turn. So no clock is needed,
and two machines give the same counts. Writes benchmarks/results/kernels.json, to which `tests/test_benchmarks.py` holds
the counts of the locked JAX, plus 5 percent. `--loops` prints every loop of the program.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

ROLLOUT, EPOCHS, MINIBATCHES = 128, 4, 4
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"}
_PRODUCTS = ("dot", "convolution", "custom-call")


@dataclasses.dataclass
class Loop:
    """The kernels of one turn of a loop, or of a whole program.

    Attributes:
      turns: how many it has; None where the program does not know.
      kernels: that a turn starts, without those of the loops in it.
      copies, products: of these, those that only copy, and matrix products and convolutions.
      loops: in it.
    """

    turns: int | None
    kernels: int = 0
    copies: int = 0
    products: int = 0
    loops: list["Loop"] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Kernels of a turn with those of all turns of the loops in it; a loop of unknown length counts once."""
        return self.kernels + sum((loop.turns or 1) * loop.total for loop in self.loops)

    def text(self, depth: int = 0) -> str:
        told = f"{self.turns or '?'} x {self.kernels} kernels ({self.copies} copies, {self.products} products)"
        return "\n".join(["  " * depth + told, *(loop.text(depth + 1) for loop in self.loops)])


def counted(program: str) -> Loop:
    """The kernels of a program, given as its HLO text."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif " = " in line:
            lines.append(line)
    whole = Loop(1)
    _count(computations, entry, whole)
    return whole


def _count(computations, name, loop):
    """Adds what the computation `name` starts."""
    for line in computations[name]:
        found = re.search(r" = .*? ([a-z][\w\-]*)\(", line)
        assert found is not None, line
        operation = found[1]
        if operation in _FREE:
            continue
        if operation == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            inner = Loop(int(turns[1]) if turns else None)
            for part in ("condition", "body"):
                _count(computations, _named(line, part), inner)
            loop.loops.append(inner)
        elif operation == "call":
            _count(computations, _named(line, "to_apply"), loop)
        elif operation == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", line)
            parts = (
                names[1].split(",") if names else [_named(line, f"{which}_computation") for which in ("true", "false")]
            )
            branches = [Loop(1) for _ in parts]
            for part, branch in zip(parts, branches, strict=True):
                _count(computations, part.strip().lstrip("%"), branch)
            loop.loops.append(max(branches, key=lambda branch: branch.total))
        else:
            loop.kernels += 1
            loop.copies += operation == "copy"
            loop.products += operation in _PRODUCTS


def _named(line, attribute):
    found = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    assert found is not None, line
    return found[1]


def program(num_envs: int = 4) -> str:
    """The HLO text of a chunk of PPO on CartPole, as `jaxrl.train` compiles it."""
    import jaxrl

    env = jaxrl.make("gymnax:CartPole-v1")
    settings = {"rollout_length": ROLLOUT, "epochs": EPOCHS, "minibatches": MINIBATCHES}
    algo = record.resolved(jaxrl.PPO(**settings), env, num_envs)
    bound = jaxrl.Anakin(num_envs, devices=1).bind(algo, env)
    algo, env = bound.layout.place(algo), bound.layout.place(env)
    return bound.compile_chunk(algo, env, bound.template(algo, env, 0)).as_text()


def rows(whole: Loop) -> list[dict[str, Any]]:
    """The counts that are held: of the chunk's one loop over iterations, and of the two large loops in it."""
    (iteration,) = [loop for loop in whole.loops if loop.turns is None]
    step = max((loop for loop in iteration.loops if loop.turns == ROLLOUT), key=lambda loop: loop.kernels)
    minibatch = max((loop for loop in iteration.loops if loop.turns == EPOCHS * MINIBATCHES), key=lambda x: x.kernels)
    named = {"rollout step": step, "minibatch": minibatch, "iteration, beside these loops": iteration}
    found = []
    for name, loop in named.items():
        row = {"what": name, "kernels": loop.kernels, "copies": loop.copies, "products": loop.products}
        found.append(row | {"with all loops": loop.total})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--loops", action="store_true", help="prints all of them, and writes nothing")
    arguments = parser.parse_args()
    whole = counted(program(arguments.num_envs))
    if arguments.loops:
        print(whole.text())
        return
    print(record.table(rows(whole)))
    print(record.save("kernels", rows(whole), num_envs=arguments.num_envs))


if __name__ == "__main__":
    main()
