"""Estimated scaling of PPO to many GPUs, from measurements on one GPU and a cost model of gradient exchange.

    python benchmarks/scaling.py

An iteration on N GPUs takes the time on one GPU with the same environments per GPU (`accelerator-nvidia-h200.json`)
plus the time of the all-reduces (`targets.json`, counted in the program compiled for eight). The time of an all-reduce
follows NCCL's model of its tree algorithm with the protocol for small messages (NVIDIA/nccl@01afd20,
`src/graph/tuning.cc`): a launch, the steps within a machine of eight GPUs, and the steps between machines, logarithmic
in their number, up and down the tree. Overlap with computation is not considered.
"""

import json
import math
import pathlib
from typing import Any

RECORDS = pathlib.Path(__file__).parent / "results"
WORK = "PPO CartPole"
ROLLOUT = 128  # time steps of an iteration
MACHINE = 8  # GPUs
START, WITHIN, BETWEEN = 4.4e-6, 0.52e-6, 5.0e-6  # seconds
SLOWER = 1.8  # steps within machines where there are several
BANDWIDTH = 80e9 / 3.8 / 2  # bytes a second of that protocol, of 80 GB/s of a tree between machines
V5E_FLOPS, V5E_LINKS = 197e12, 200e9  # of a chip a second: bfloat16; bytes one way (Google's page of the TPU v5e)
WEAK = (1, 16, 256, 4096)  # GPUs, each with the same environments
TOTAL = 65_536  # environments of all GPUs together


def measured() -> dict[int, float]:
    """Return the seconds of an iteration on one GPU by its environments."""
    parts = json.loads((RECORDS / "accelerator-nvidia-h200.json").read_text())["parts"]
    rows = parts["throughput"]["rows"]
    return {row["num_envs"]: row["ms an iteration"] / 1e3 for row in rows if row["work"] == WORK}


def program(target: str, num_envs: int) -> dict[str, Any]:
    """Return the record of the compiled program."""
    parts = json.loads((RECORDS / "targets.json").read_text())["parts"]
    return parts[f"{target}, ppo gymnax:CartPole-v1, {num_envs} environments"]


def exchange(gpus: int) -> float:
    """Return the seconds of an iteration's all-reduces over a number of GPUs."""
    if gpus == 1:
        return 0.0
    machines = math.ceil(gpus / MACHINE)
    within = (min(gpus, MACHINE) - 1) * WITHIN * (SLOWER if machines > 1 else 1)
    steps = 2 * (within + math.log2(machines) * BETWEEN)
    number = program("h100:8", 16_384)["collectives"]["all-reduce"]
    return number * (START + steps) + program("v5e:4x4", 2048)["bytes exchanged"] / BANDWIDTH


def work() -> str:
    """Return a table of the work of one iteration on one chip, and its time at peak rate."""
    lines = []
    for target, num_envs in (("v5e:4x4", 2048), ("v5e:16x16", 65_536)):
        row = program(target, num_envs)
        floats, links = row["FLOPs"] / V5E_FLOPS, row["bytes exchanged"] / V5E_LINKS
        cells = [f"`{target}`", f"{num_envs:,}", f"{row['FLOPs']:.3g} ({floats * 1e6:.1f} µs)"]
        cells += [f"{row['bytes exchanged']:,} ({links * 1e6:.1f} µs)"]
        lines.append(f"| {' | '.join(cells)} | {row['collectives']['all-reduce']} | {row['kernels']:,} |")
    head = "| slice | environments in total | FLOPs per chip | bytes exchanged | all-reduces | kernels |"
    return "\n".join([head, "|" + "---|" * 6, *lines])


def weak() -> str:
    """Return the table of weak scaling: each GPU has the environments of the single-GPU run."""
    lines = []
    for num_envs, seconds in measured().items():
        cells = []
        for gpus in WEAK:
            both = seconds + exchange(gpus)
            cells.append(f"{_short(gpus * num_envs * ROLLOUT / both)} ({seconds / both:.0%})")
        lines.append(f"| {num_envs:,} | {' | '.join(cells)} | {_short(WEAK[-1] * num_envs * ROLLOUT)} |")
    header = " | ".join(f"{gpus:,} GPU{'s' if gpus > 1 else ''}" for gpus in WEAK)
    head = f"| environments per GPU | {header} | steps of an iteration of {WEAK[-1]:,} |"
    return "\n".join([head, "|" + "---|" * (len(WEAK) + 2), *lines])


def strong() -> str:
    """Return the table of strong scaling: the total number of environments is fixed."""
    alone = measured()[TOTAL]
    lines = []
    for num_envs, seconds in sorted(measured().items(), reverse=True):
        gpus = TOTAL // num_envs
        both = seconds + exchange(gpus)
        cells = [f"{gpus:,}", f"{num_envs:,}", f"{seconds * 1e3:.1f}", f"{exchange(gpus) * 1e3:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {_short(TOTAL * ROLLOUT / both)} | {alone / both:.1f} |")
    head = "| GPUs | environments per GPU | ms of work | ms of exchange | steps/s | times one GPU |"
    return "\n".join([head, "|" + "---|" * 6, *lines])


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


if __name__ == "__main__":
    print(work(), weak(), strong(), sep="\n\n")
