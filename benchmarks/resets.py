"""What an auto-reset costs: none, exact (`AutoReset`) and pooled (`PooledReset`), environments alone, random actions.

    python benchmarks/resets.py [--env brax:hopper --backend spring] [--num-envs 64 2048] [--steps 256]

Prints steps a second (median of 7 alternations) and writes benchmarks/results/resets.json, with the machine, versions
and command.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import jax

import jaxrl
from jaxrl import envs

RESULTS = pathlib.Path(__file__).parent / "results" / "resets.json"
DEFAULT = [
    ("gymnax:CartPole-v1", {}),
    ("gymnax:SpaceInvaders-MinAtar", {}),
    ("brax:inverted_pendulum", {"backend": "spring"}),
    ("brax:hopper", {"backend": "spring"}),
]


def compiled(env, num_envs: int, steps: int):
    """A function that plays `steps` steps of `num_envs` environments on and returns how many seconds it took."""

    @jax.jit
    def rollout(state, key):
        def one(state, key):
            key_action, key_step = jax.random.split(key)
            action = jax.vmap(env.action_space.sample)(jax.random.split(key_action, num_envs))
            state, time_step = jax.vmap(env.step)(state, action, jax.random.split(key_step, num_envs))
            return state, time_step.reward.mean()

        return jax.lax.scan(one, state, jax.random.split(key, steps))

    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))
    keys = iter(jax.random.split(jax.random.key(1), 1000))

    def play() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(rollout(state, next(keys)))
        return time.perf_counter() - start

    play()
    return play


def machine() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        "commit": commit,
        "jaxrl": jaxrl.__version__,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "gymnax", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "devices": [device.device_kind for device in jax.devices()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", help="one environment instead of all")
    parser.add_argument("--backend", help="of a brax environment")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    chosen = DEFAULT
    if arguments.env:
        chosen = [(arguments.env, {"backend": arguments.backend} if arguments.backend else {})]
    rows = []
    print(f"{'environment':38} {'envs':>6} {'none':>12} {'exact':>12} {'pooled':>12}  pooled/exact")
    for name, parameters in chosen:
        for num_envs in arguments.num_envs:
            row = {"env": name, **parameters, "num_envs": num_envs, "steps": arguments.steps}
            plays = {
                str(auto_reset).lower(): compiled(
                    envs.make(name, auto_reset=auto_reset, **parameters), num_envs, arguments.steps
                )
                for auto_reset in (None, "exact", "pooled")
            }
            # In alternation, so that what else the machine does meets all three.
            rounds = [{k: play() for k, play in plays.items()} for _ in range(arguments.repeats)]
            for k in plays:
                row[k] = num_envs * arguments.steps / statistics.median(seconds[k] for seconds in rounds)
            row["gain"] = row["pooled"] / row["exact"]
            rows.append(row)
            label = f"{name} {parameters.get('backend', '')}"
            speeds = " ".join(f"{row[k]:12,.0f}" for k in ("none", "exact", "pooled"))
            print(f"{label:38} {num_envs:6} {speeds}  {row['gain']:.2f}", flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
