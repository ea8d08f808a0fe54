"""What acting for the environments that are ready first brings, `Sebulba(ready=...)`, where their steps are uneven.

    python benchmarks/uneven.py [--repeats 5]

PPO (rollouts of 32, default networks) in 16 environments of one actor thread whose steps take time and no processor:
by chance, exponentially distributed around 2 ms, for every step anew; 2 ms, but 6 ms in one environment of the 16,
always; or 2 ms for all. Then random actions in EnvPool's Pong-v5, 64 environments of one actor thread. Rows a second
all in step, in two groups, and of `ready` half the group and a quarter; compiled and warm, in turn in one run.
"""

import argparse
import dataclasses
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
    "by chance": lambda rng, env_ids: rng.exponential(MEAN, env_ids.size),
    "one slow": lambda rng, env_ids: np.where(env_ids == 0, 3 * MEAN, MEAN),
    "even": lambda rng, env_ids: np.full(env_ids.size, MEAN),
}
GROUP, ROLLOUT = 16, 32
PONG = {"env": "Pong-v5", "num_envs": 64, "rollout": 16}


@dataclasses.dataclass(frozen=True, eq=False)
class Uneven:
    """Environments in which nothing happens, and that takes its time."""

    kind: str

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
        return UnevenEnvironment(SECONDS[self.kind], num_envs, num_envs, seed)

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        return UnevenEnvironment(SECONDS[self.kind], num_envs, batch_size, seed)


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


def seconds_of(task, iterations, **settings):
    """What so many iterations take, compiled and warm; nothing else runs meanwhile."""
    if task == "Pong-v5":
        env, algo = jaxrl.make("envpool:" + PONG["env"]), random_actor()(rollout_length=PONG["rollout"])
        topology = jaxrl.Sebulba(num_envs=PONG["num_envs"], **settings)
    else:
        env, algo = Uneven(task), jaxrl.PPO(rollout_length=ROLLOUT)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=12)
    arguments = parser.parse_args()
    rows = []
    for task in (*SECONDS, "Pong-v5"):
        rows.append(measured(task, arguments.iterations, arguments.repeats))
        print(record.table(rows[-1:]), flush=True)
    settings = {"mean_seconds": MEAN, "rollout": ROLLOUT, "pong": PONG}
    print(record.save("uneven", rows, repeats=arguments.repeats, settings=settings, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
