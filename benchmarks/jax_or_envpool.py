"""Speed of JAX compared with EnvPool, for environments that exist in both, with random actions.

    python benchmarks/jax_or_envpool.py [--only SUITE:NAME ...] [--num-envs 64 1024] [--repeats 5]

Both sides are wrapped as for training, with episode statistics and automatic resets (pooled if resets are expensive,
docs/environments.md). The JAX side is one compiled program that also samples the actions. The EnvPool side has
precomputed actions and one thread per core; its observations stay in host memory. Everything is compiled and warm
before timing. Results are medians over alternating pairs, in steps per second.

Without --only, writes benchmarks/results/jax-or-envpool.json, and docs/envpool.md shows it
(`scripts/update_results.py`).
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _play
import _record
import jax

import jaxrl

_POOLED = {"auto_reset": "pooled"}
SECONDS = 0.2  # that one side plays at least, before it is the other's turn


class Pair(NamedTuple):
    """An environment that exists in both.

    Attributes:
      jax, envpool: names of the environments, the second without its suite.
      steps: steps per call of a program.
      parameters: parameters of the JAX environment.
      most: maximum number of environments, limited by memory and compile time.
    """

    jax: str
    envpool: str
    steps: int = 64
    parameters: dict[str, Any] = {}
    most: int = 1024


PAIRS = [
    Pair("gymnax:CartPole-v1", "CartPole-v1"),
    Pair("gymnax:Acrobot-v1", "Acrobot-v1"),
    Pair("gymnax:MountainCar-v0", "MountainCar-v0"),
    Pair("gymnax:Pendulum-v1", "Pendulum-v1"),
    Pair("jumanji:Game2048-v1", "Game2048-v1"),
    Pair("jumanji:Snake-v1", "Snake-v1"),
    Pair("jumanji:Maze-v0", "Maze-v0"),
    Pair("xminigrid:MiniGrid-DoorKey-5x5", "MiniGrid-DoorKey-5x5-v0"),
    Pair("navix:Navix-DoorKey-5x5-v0", "MiniGrid-DoorKey-5x5-v0", 16, _POOLED),
    Pair("craftax:Craftax-Classic-Symbolic-v1", "Craftax-Classic-Symbolic-v1", 16, _POOLED),
    # EnvPool's environments of MuJoCo have memory of their own, which is why there are 256 at most.
    Pair("playground:CartpoleBalance", "CartpoleBalance-v1", 16, _POOLED, most=256),
    Pair("playground:CheetahRun", "CheetahRun-v1", 4, _POOLED, most=64),
]


def host_plays(name: str, num_envs: int, steps: int) -> Callable[[], float]:
    """Return a function that plays `steps` more steps in EnvPool and returns the seconds; warm."""
    recipe = jaxrl.make(f"envpool:{name}", num_threads=len(os.sched_getaffinity(0)))
    keys = jax.random.split(jax.random.key(0), (16, num_envs))
    drawn = jax.device_get(jax.vmap(jax.vmap(recipe.action_space.sample))(keys))
    actions = [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(16)]
    host = recipe.build(num_envs, 0)
    host.reset()

    def play() -> float:
        start = time.perf_counter()
        for i in range(steps):
            host.step(actions[i % 16])
        return time.perf_counter() - start

    play()
    return play


def prepared(pair: Pair, num_envs: int) -> dict[str, Callable[[], float]]:
    """Return both sides, compiled and warm."""
    _play.progress(f"compiling {pair.jax}, {num_envs} environments")
    env = jaxrl.make(pair.jax, **pair.parameters)
    program = _play.plays(_play.of_jaxrl(env), env.action_space, num_envs, pair.steps)
    sides = {"JAX": program, "EnvPool": host_plays(pair.envpool, num_envs, pair.steps)}
    return {name: _play.at_least(SECONDS, play) for name, play in sides.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="JAX environments to run instead of all")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    chosen = [pair for pair in PAIRS if pair.jax in (arguments.only or [pair.jax])]
    work = [(pair, n) for pair in chosen for n in sorted({min(n, pair.most) for n in arguments.num_envs})]
    sides, rows = [prepared(*one) for one in work], []
    for (pair, num_envs), plays in zip(work, sides, strict=True):
        seconds = _record.alternate(plays, arguments.repeats)
        speeds = {f"{name} (steps/s)": num_envs * pair.steps / taken for name, taken in seconds.items()}
        row = {"jax": pair.jax, **pair.parameters, "envpool": pair.envpool, "num_envs": num_envs, **speeds}
        rows.append(row | {"JAX / EnvPool": seconds["EnvPool"] / seconds["JAX"]})
        print(_record.table(rows[-1:]), flush=True)
    if not arguments.only:
        print(_record.save("jax-or-envpool", rows, repeats=arguments.repeats))


if __name__ == "__main__":
    main()
