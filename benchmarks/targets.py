"""Runs compiled for detached accelerators: seconds, memory per chip, and collectives and kernels per iteration.

    python benchmarks/targets.py [--only TARGET ...] [--work "ppo brax:ant" ...]

Targets whose compiler is not installed are skipped: TPUs need the extra `tpu-target`, NVIDIA GPUs the extra `cuda13`.
Each program is an entry of benchmarks/results/targets.json, with the machine and commit that compiled it. It is written
as soon as it is available; other entries stay unchanged.
"""

import argparse
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX looks for the devices whose compilers are installed
CARTPOLE, PENDULUM, BREAKOUT = "gymnax:CartPole-v1", "gymnax:Pendulum-v1", "gymnax:Breakout-MinAtar"
ANT = "brax:ant"
# By target: the algorithm and environment, the number of environments, and the number of runs of a sweep.
WORKS: dict[str, list[tuple[str, str, int, int | None]]] = {
    "v5e:4x4": [
        ("ppo", CARTPOLE, 2048, None),
        ("dqn", CARTPOLE, 64, None),
        ("r2d2", CARTPOLE, 64, None),
        ("sac", PENDULUM, 64, None),
        ("mpo", PENDULUM, 64, None),
        ("impala", CARTPOLE, 2048, None),
        ("pqn", BREAKOUT, 128, None),
        ("ppo", CARTPOLE, 64, 256),
    ],
    "v5e:16x16": [("ppo", CARTPOLE, 65_536, None)],
    "h100": [
        ("ppo", CARTPOLE, 2048, None),
        ("ppo", BREAKOUT, 1024, None),
        ("ppo", ANT, 2048, None),
        ("dqn", CARTPOLE, 64, None),
        ("sac", PENDULUM, 64, None),
        ("pqn", BREAKOUT, 128, None),
    ],
    "h100:8": [("ppo", CARTPOLE, 16_384, None)],
}


def row(target: str, algorithm: str, env: str, num_envs: int, runs: int | None) -> dict[str, Any]:
    """Return the row of one run on one target."""
    import jaxrl
    from jaxrl.algos import fields

    algo = jaxrl.make_algorithm(algorithm)
    algo = algo.replace(prioritized=fields.PrioritizedReplay()) if algorithm == "dqn" else algo
    since = time.monotonic()
    report = jaxrl.compile_for(target, algo, env, num_envs=num_envs, runs=runs)
    chunk = report["chunk"]
    outside, *loops = (loop for loop, _ in chunk.iteration.walk())
    return {
        "target": target,
        "work": f"{algorithm} {env}, {num_envs} environments" + (f", {runs} runs" if runs else ""),
        "seconds": round(time.monotonic() - since),
        "MB a device": round(chunk.peak_bytes / 1e6, 1),
        "collectives": dict(chunk.iteration.all_collectives()),
        "bytes exchanged": chunk.iteration.all_exchanged(),
        "FLOPs": chunk.flops,
        "kernels": chunk.iteration.all_kernels(),
        "outside of loops": sum(outside.kernels.values()),
        "loops": [f"{loop.trips or '?'} x {sum(loop.kernels.values())}" for loop in loops],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--work", nargs="+", help="run only these pairs of algorithm and environment")
    arguments = parser.parse_args()
    from jaxrl.core.errors import ConfigError

    for target in arguments.only:
        for work in WORKS[target]:
            if arguments.work is not None and " ".join(work[:2]) not in arguments.work:
                continue
            try:
                new = row(target, *work)
            except ConfigError as error:
                print(error)
                continue
            print(new, flush=True)
            name = f"{new['target']}, {new['work']}"
            record.save_part(record.HERE / "results" / "targets.json", name, {"machine": record.machine(), **new})


if __name__ == "__main__":
    main()
