"""Atari with `Sebulba`: training steps per second of R2D2, IMPALA and PPO, with the replay ratio.

    python benchmarks/atari.py [--only r2d2 impala ppo] [--num-envs 192] [--actors 4] [--groups 1] [--iterations 20]

A step is one transition of an environment, 4 frames of the game. R2D2 is the preset `r2d2` (a 512-wide LSTM on the
convolutions of Mnih et al., 2015; 64 sequences of 40 + 81 rows per update) with a replay buffer of `--capacity` rows
that is filled first; its replay ratio is given as in rlpyt (rows of a batch, including burn-in, over rows collected)
and as in R2D2 (without burn-in). IMPALA is `impala-paper-shallow`, PPO has the same convolutions. Chunks of
`--iterations` are timed after compilation and warm-up; the result is the median of `--repeats`.

rlpyt's figure for R2D1 is 16,000 steps/s on 24 cores and 3 GPUs, at a replay ratio of 1 (arXiv:1909.01500).
"""

import argparse
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PEER_STEPS = 16_000  # a second, rlpyt's R2D1


def algorithms(capacity: int) -> dict[str, Any]:
    """Return the algorithms by name."""
    import jaxrl
    from jaxrl.networks import ActorCritic, NatureCNN
    from jaxrl.run.presets import PRESETS

    return {
        "r2d2": PRESETS["r2d2"].algorithm.replace(capacity=capacity, min_size=min(capacity // 2, 100_000)),
        "impala": PRESETS["impala-paper-shallow"].algorithm,
        "ppo": jaxrl.PPO(rollout_length=128, minibatches=4, network=ActorCritic(NatureCNN(), shared=True)),
    }


def measured(name: str, algo: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the result."""
    import jax

    import jaxrl

    env = jaxrl.make(f"envpool:{arguments.game}")
    topology = jaxrl.Sebulba(
        num_envs=arguments.num_envs, actors=arguments.actors, groups=arguments.groups, queue=arguments.queue
    )
    algo = record.resolved(algo, env, arguments.num_envs)
    program = topology.bind(algo, env)
    rows = program.steps_per_iteration(algo)
    warm = 2 + (-(-algo.min_size // rows) if name == "r2d2" else 0)
    try:
        state = program.start(algo, env, 0)
        state, report = jax.block_until_ready(program.chunk(algo, env, state, warm, 10**9))
        seconds, reports = [], []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            state, report = jax.block_until_ready(program.chunk(algo, env, state, arguments.iterations, 10**9))
            seconds.append(time.perf_counter() - start)
            reports.append(jax.device_get(report).metrics())
    finally:
        program.close()
    per_second = arguments.iterations * rows / statistics.median(seconds)
    row = {"algorithm": name, "num_envs": arguments.num_envs, "actors": arguments.actors, "steps/s": per_second}
    last = reports[-1]
    row |= {key: float(last[f"actors/{key}"]) for key in ("policy_lag", "inference_batch")}
    blocked = float(last["actors/learner_blocked_seconds"]) / float(last["actors/seconds"])
    row["share of time that the learner waits"] = blocked
    if name == "r2d2":
        row["updates/s"] = per_second * algo.replay_ratio
        row["replay ratio (rlpyt's count)"] = (
            algo.replay_ratio * algo.batch_size * (algo.memory.burn_in + algo.memory.length - 1)
        )
        row["replay ratio (R2D2's count)"] = algo.replay_ratio * algo.batch_size * (algo.memory.length - 1)
        row["of rlpyt's 16,000 steps/s"] = per_second / PEER_STEPS
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["r2d2", "impala", "ppo"], default=["r2d2", "impala", "ppo"])
    parser.add_argument("--game", default="Pong-v5")
    parser.add_argument("--num-envs", type=int, default=192)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--queue", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=200_000, help="rows in R2D2's replay buffer, 7 kB each")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for name, algo in algorithms(arguments.capacity).items():
        if name in arguments.only:
            rows.append(measured(name, algo, arguments))
            print(record.table([rows[-1]]), flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key != "only"}
    print(record.save("atari", rows, settings=settings))


if __name__ == "__main__":
    main()
