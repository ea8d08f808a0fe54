"""Number of kernels of PPO on CartPole: per rollout step, per minibatch, and per iteration outside both loops.

    python benchmarks/kernels.py [--num-envs 4] [--loops]

Small programs are dominated by kernel launches, not arithmetic: an iteration of 4 environments x 128 steps, 4 epochs of
4 minibatches, launches about 8,000 kernels of a microsecond or less. `jaxrl.parallel.hlo` counts them in the program
compiled by XLA: every instruction except parameters, constants, tuples and views launches a kernel; a loop counts one
iteration. This does not need timing, and counts are the same on different machines. Writes
benchmarks/results/kernels.json; `tests/test_benchmarks.py` checks that counts with the locked JAX exceed it by at most
5 percent. `--loops` prints every loop of the program.
"""

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

from jaxrl.parallel import hlo  # noqa: E402

ROLLOUT, EPOCHS, MINIBATCHES = 128, 4, 4
_PRODUCTS = ("dot", "convolution", "custom-call")


def program(num_envs: int = 4) -> str:
    """Return the HLO text of a chunk of PPO on CartPole, as compiled by `jaxrl.train`."""
    import jaxrl

    env = jaxrl.make("gymnax:CartPole-v1")
    settings = {"rollout_length": ROLLOUT, "epochs": EPOCHS, "minibatches": MINIBATCHES}
    algo = record.resolved(jaxrl.PPO(**settings), env, num_envs)
    bound = jaxrl.Anakin(num_envs, devices=1).bind(algo, env)
    algo, env = bound.layout.place(algo), bound.layout.place(env)
    return bound.compile_chunk(algo, env, bound.template(algo, env, 0)).as_text()


def rows(text: str) -> list[dict[str, Any]]:
    """Return the recorded counts: the chunk's loop over iterations, and the two large loops inside it."""
    (iteration,) = [loop for loop in hlo.read(text).loops if loop.trips is None]
    step, minibatch = (
        max((loop for loop in iteration.loops if loop.trips == trips), key=lambda loop: sum(loop.kernels.values()))
        for trips in (ROLLOUT, EPOCHS * MINIBATCHES)
    )
    named = {"rollout step": step, "minibatch": minibatch, "iteration, beside these loops": iteration}
    found = []
    for name, loop in named.items():
        row = {"what": name, "kernels": sum(loop.kernels.values()), "copies": loop.kernels["copy"]}
        row |= {"products": sum(loop.kernels[kind] for kind in _PRODUCTS)}
        found.append(row | {"with all loops": loop.all_kernels()})
    return found


def text_of(loop: hlo.Loop, depth: int = 0) -> str:
    """Return the loops of a program, one per line."""
    line = f"{'  ' * depth}{loop.trips or '?'} x {sum(loop.kernels.values())} kernels {dict(loop.kernels)}"
    return "\n".join([line, *(text_of(inner, depth + 1) for inner in loop.loops)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--loops", action="store_true", help="print all loops without writing a record")
    arguments = parser.parse_args()
    text = program(arguments.num_envs)
    if arguments.loops:
        print(text_of(hlo.read(text)))
        return
    print(record.table(rows(text)))
    print(record.save("kernels", rows(text), num_envs=arguments.num_envs))


if __name__ == "__main__":
    main()
