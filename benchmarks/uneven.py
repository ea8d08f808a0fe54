"""What acting for the environments that are ready brings, where their steps are uneven: `ready` and `batching`.

    python benchmarks/uneven.py [--only ready|batching] [--repeats 5]

`ready`, of `Sebulba(ready=...)`, the environments of a group that are ready first:

PPO (rollouts of 32, default networks) in 16 environments of one actor thread whose steps take time and no processor:
by chance, exponentially distributed around 2 ms, for every step anew; 2 ms, but 6 ms in one environment of the 16,
always; or 2 ms for all. Then random actions in EnvPool's Pong-v5, 64 environments of one actor thread. Rows a second
all in step, in two groups, and of `ready` half the group and a quarter; compiled and warm, in turn in one run.

`batching`, of `Sebulba(batching=...)`, dynamic batching across actor threads: the same PPO in 16 environments whose
steps take 10 ms, exponentially distributed or all alike, with a batch a group (one group, four threads with a group of
four, a thread for each environment) and with dynamic batching (a thread for each; four threads).
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import time

import jax
import numpy as np

import jaxrl
from jaxrl.core import spaces
from jaxrl.core.types import Episode, TimeStep

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record
from host import random_actor

MEAN = 0.002  # seconds of a step
SECONDS = {
    "by chance": lambda rng, env_ids, mean: rng.exponential(mean, env_ids.size),
    "one slow": lambda rng, env_ids, mean: np.where(env_ids == 0, 3 * mean, mean),
    "even": lambda rng, env_ids, mean: np.full(env_ids.size, mean),
}
LONGER = 0.01  # seconds of a step, for dynamic batching
DYNAMIC = jaxrl.DynamicBatching(smallest=4, patience=0.003)
GROUP, ROLLOUT = 16, 32
PONG = {"env": "Pong-v5", "num_envs": 64, "rollout": 16}


@dataclasses.dataclass(frozen=True, eq=False)
class Uneven:
    """Environments in which nothing happens, and that takes its time."""

    kind: str
    mean: float = MEAN

    @property
    def name(self):
        return f"uneven, {self.kind}"

    @property
    def observation_space(self):
        return spaces.Box(-1.0, 1.0, (4,))

    @property
    def action_space(self):
        return spaces.Discrete(2)

    def build(self, num_envs, seed, first_env=0):
        return self.build_async(num_envs, num_envs, seed, first_env)

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        seconds = functools.partial(SECONDS[self.kind], mean=self.mean)
        return UnevenEnvironment(seconds, num_envs, batch_size, np.random.SeedSequence(seed, spawn_key=(first_env,)))


class UnevenEnvironment:
    """Asynchronous; when each is ready is drawn as it is sent an action."""

    def __init__(self, seconds, num_envs, batch_size, seed):
        self.num_envs, self.batch_size, self._seconds = num_envs, batch_size, seconds
        self._rng, self._due = np.random.default_rng(seed), np.full(num_envs, np.inf)
        self._begun, self._steps = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.int32)

    def async_reset(self):
        self._due[:] = time.perf_counter()

    def send(self, actions, env_ids):
        self._due[env_ids] = time.perf_counter() + self._seconds(self._rng, env_ids)

    def recv(self):
        env_ids = np.argsort(self._due)[: self.batch_size].astype(np.int32)
        time.sleep(max(0.0, self._due[env_ids[-1]] - time.perf_counter()))
        self._due[env_ids] = np.inf
        return env_ids, self._moment(env_ids)

    def reset(self):
        self.async_reset()
        return self.recv()[1]

    def step(self, actions):
        self.send(actions, np.arange(self.num_envs))
        return self._moment(np.sort(self.recv()[0]))

    def close(self):
        pass

    def _moment(self, env_ids):
        first = ~self._begun[env_ids]
        self._begun[env_ids] = True
        self._steps[env_ids] += ~first
        zero, never = np.zeros(env_ids.size, np.float32), np.zeros(env_ids.size, np.bool_)
        observation = np.zeros((env_ids.size, 4), np.float32)
        return TimeStep(observation, zero, never, never, first, episode=Episode(zero, self._steps[env_ids]))


def seconds_of(task, iterations, mean=MEAN, **settings):
    """What so many iterations take, compiled and warm; nothing else runs meanwhile."""
    if task == "Pong-v5":
        env, algo = jaxrl.make("envpool:" + PONG["env"]), random_actor()(rollout_length=PONG["rollout"])
        topology = jaxrl.Sebulba(num_envs=PONG["num_envs"], **settings)
    else:
        env, algo = Uneven(task, mean), jaxrl.PPO(rollout_length=ROLLOUT)
        topology = jaxrl.Sebulba(num_envs=GROUP, **settings)
    algo = record.resolved(algo, env, topology.num_envs)
    program = topology.bind(algo, env)
    try:
        state = program.start(algo, env, 0)
        state, _ = jax.block_until_ready(program.chunk(algo, env, state, 3, 10**9))
        start = time.perf_counter()
        jax.block_until_ready(program.chunk(algo, env, state, iterations, 10**9))
        return time.perf_counter() - start
    finally:
        program.close()


def measured(task, iterations, repeats):
    """Rows a second of each setting, in turn."""
    group, rollout = (PONG["num_envs"], PONG["rollout"]) if task == "Pong-v5" else (GROUP, ROLLOUT)
    choices = {
        "in step": {},
        "groups=2": {"groups": 2},
        "ready=half": {"ready": group // 2},
        "ready=quarter": {"ready": group // 4},
    }
    asks = {name: (lambda chosen=chosen: seconds_of(task, iterations, **chosen)) for name, chosen in choices.items()}
    seconds = record.alternate(asks, repeats)
    rows = iterations * group * rollout
    row = {"steps": task, "environments": group} | {f"{name} (rows/s)": rows / s for name, s in seconds.items()}
    return row | {"half / in step": seconds["in step"] / seconds["ready=half"]}


def batched(task, iterations, repeats):
    """Rows a second with a batch a group and with dynamic batching, in turn."""
    quarter = GROUP // 4
    choices = {
        "1 thread": {},
        f"{quarter} threads": {"actors": quarter},
        f"{GROUP} threads": {"actors": GROUP},
        f"dynamic, {quarter} threads": {"actors": quarter, "batching": DYNAMIC},
        f"dynamic, {GROUP} threads": {"actors": GROUP, "batching": DYNAMIC},
    }
    free = {"mean": LONGER, "lockstep": False}  # as dynamic batching is
    asks = {name: functools.partial(seconds_of, task, iterations, **free, **chosen) for name, chosen in choices.items()}
    seconds = record.alternate(asks, repeats)
    rows, dynamic = iterations * GROUP * ROLLOUT, f"dynamic, {GROUP} threads"
    row = {"steps": task, "environments": GROUP} | {f"{name} (rows/s)": rows / s for name, s in seconds.items()}
    row |= {f"dynamic / {name}": s / seconds[dynamic] for name, s in seconds.items() if "dynamic" not in name}
    same = seconds[f"{quarter} threads"] / seconds[f"dynamic, {quarter} threads"]
    return row | {f"dynamic, {quarter} threads / {quarter} threads": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", choices=["ready", "batching"], default=None)
    arguments = parser.parse_args()
    parts = {
        "ready": (measured, (*SECONDS, "Pong-v5"), "uneven", {"mean_seconds": MEAN, "pong": PONG}),
        "batching": (
            batched,
            ("by chance", "even"),
            "dynamic-batching",
            {"mean_seconds": LONGER, "batching": dataclasses.asdict(DYNAMIC)},
        ),
    }
    for part, (measure, tasks, name, settings) in parts.items():
        if arguments.only not in (None, part):
            continue
        rows = []
        for task in tasks:
            rows.append(measure(task, arguments.iterations, arguments.repeats))
            print(record.table(rows[-1:]), flush=True)
        settings |= {"rollout": ROLLOUT, "iterations": arguments.iterations}
        print(record.save(name, rows, repeats=arguments.repeats, settings=settings, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
