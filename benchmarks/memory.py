"""Memory of training predicted by the compiler, as printed by `jaxrl compile`, compared with the measured memory.

    python benchmarks/memory.py [--only WORK ...]

Predicted: peak of the arguments, outputs and temporaries of the training program. Measured, on a CPU: the peak increase
of a process's resident memory from before the run to after three iterations. Each run has a separate process that
compiled beforehand, to exclude the compiler's memory. On devices that report their memory,
`benchmarks/accelerator.py --only memory` does the same.
"""

import argparse
import ctypes
import gc
import json
import pathlib
import subprocess
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

WORKS = {
    "PPO CartPole, 2048 environments": ("ppo", "gymnax:CartPole-v1", 2048),
    "PPO CartPole, 16384 environments": ("ppo", "gymnax:CartPole-v1", 16_384),
    "PQN MinAtar Breakout, 512 environments": ("pqn", "gymnax:Breakout-MinAtar", 512),
    "DQN CartPole, a replay of 10M": ("dqn", "gymnax:CartPole-v1", 8),
    "DQN MinAtar Breakout, a replay of 200k": ("dqn", "gymnax:Breakout-MinAtar", 8),
    "SAC Pendulum, a replay of 5M": ("sac", "gymnax:Pendulum-v1", 1),
}


def status(name: str) -> int:
    """Return a memory figure of this process from Linux, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def measured(work: str) -> dict[str, Any]:
    """Measure one row in this process."""
    import jax

    import jaxrl

    algo_name, env_name, num_envs = WORKS[work]
    capacity = {"dqn": 200_000 if "MinAtar" in env_name else 10_000_000, "sac": 5_000_000}
    settings = {"capacity": capacity[algo_name], "min_size": 64} if algo_name in capacity else {}
    env = jaxrl.make(env_name)
    algo = record.resolved(jaxrl.make_algorithm(algo_name, **settings), env, num_envs)
    program = jaxrl.Anakin(num_envs, devices=1).bind(algo, env)
    algo, env = program.layout.place(algo), program.layout.place(env)

    stats = program.compile_chunk(algo, env, program.template(algo, env, 0)).memory_analysis()
    parts = {name: getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
    predicted = parts["argument"] + parts["output"] + parts["temp"] - parts["alias"]

    def train(iterations):
        state = program.start(algo, env, 0)
        return jax.block_until_ready(program.chunk(algo, env, state, iterations, iterations * algo.rollout_length))

    train(1)  # starting programs needs memory of its own
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    train(3)
    grown = status("VmHWM") - before
    return {
        "work": work,
        "predicted (bytes)": predicted,
        "measured (bytes)": grown,
        "measured / predicted": grown / predicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), metavar="WORK", default=list(WORKS))
    arguments = parser.parse_args()
    rows = []
    for work in arguments.only:
        words = [sys.executable, __file__, "--one", work]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(record.table(rows[-1:]), flush=True)
    print(record.save("memory", rows))


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[2]))) if sys.argv[1:2] == ["--one"] else main()
