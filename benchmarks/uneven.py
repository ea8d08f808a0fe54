"""Benefit of not waiting for slow environments if step times are uneven: `ready` and `learner_batch`.

    python benchmarks/uneven.py [--only ready|pool|replay|torchbeast] [--algo dqn sac r2d2] [--repeats 5]

`ready` measures `Sebulba(ready=...)`, which acts for the environments of a group that are ready first:

PPO (rollouts of 32, default networks) in 16 environments of one actor thread, whose steps take time but no CPU: sampled
for every step from an exponential distribution with mean 2 ms; 2 ms, but always 6 ms in one of the 16 environments; or
2 ms for all. Then random actions in EnvPool's Pong-v5, 64 environments of one actor thread. Rows per second with all
environments in step, in two groups, and with `ready` of half and a quarter of the group; compiled and warm, alternating
in one run.

`pool` measures `Sebulba(learner_batch=...)`, which learns from whichever rollouts are full: IMPALA (its defaults) in 8
environments, each with its own free-running actor thread: steps of 2 ms for all, or 20 ms in one of them. One rollout
of every environment, with one and with eight pending, compared with the first 8 full rollouts. Then PPO in 16
environments with random step times as above: a group for each of 4 and 16 threads, compared with `ready` and one
thread.

`replay` measures the same for algorithms with a replay (defaults, but a small minimum size and batches of R2D2): 8
environments with a thread each, steps of 10 ms for all, or 100 ms in one of them, and one rollout of every environment
compared with the first 8 full rollouts.

`torchbeast` uses the preset's network and settings in EnvPool's Pong-v5 (84x84x4): 48 environments in 12 threads with
batches of 8 and 32, as in its paper, compared with 8 environments in one batch.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
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

MEAN, SLOW = 0.002, 0.01  # seconds of a step
SECONDS = {
    "by chance": lambda rng, env_ids, mean: rng.exponential(mean, env_ids.size),
    "one slow": lambda rng, env_ids, mean: np.where(env_ids == 0, 3 * mean, mean),
    "one ten times as slow": lambda rng, env_ids, mean: np.where(env_ids == 0, 10 * mean, mean),
    "even": lambda rng, env_ids, mean: np.full(env_ids.size, mean),
}
POOLED = 8
GROUP, ROLLOUT = 16, 32
REPLAYED = {
    "dqn": jaxrl.DQN(min_size=100),
    "sac": jaxrl.SAC(min_size=100),
    "r2d2": jaxrl.R2D2(min_size=1000, batch_size=8),
}
PONG = {"env": "Pong-v5", "num_envs": 64, "rollout": 16}


@dataclasses.dataclass(frozen=True, eq=False)
class Uneven:
    """Environments without dynamics, whose steps take time."""

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
        rng = np.random.SeedSequence(seed, spawn_key=(first_env,))
        return UnevenEnvironment(seconds, num_envs, batch_size, rng, first_env)


class UnevenEnvironment:
    """Asynchronous environments; the step time is sampled when an action is sent."""

    def __init__(self, seconds, num_envs, batch_size, seed, first_env):
        self.num_envs, self.batch_size, self._seconds, self._first_env = num_envs, batch_size, seconds, first_env
        self._rng, self._due = np.random.default_rng(seed), np.full(num_envs, np.inf)
        self._begun, self._steps = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.int32)

    def async_reset(self):
        self._due[:] = time.perf_counter()

    def send(self, actions, env_ids):
        self._due[env_ids] = time.perf_counter() + self._seconds(self._rng, self._first_env + env_ids)

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


def rows_per_second(algo, env, iterations, **settings):
    """Return the rows per second used for learning, and the actors' metrics; compiled and warm."""
    topology = jaxrl.Sebulba(**settings).resolve(algo)
    algo = record.resolved(algo, env, topology.batch_envs)
    program = topology.bind(algo, env)
    try:
        state = program.start(algo, env, 0)
        state, _ = jax.block_until_ready(program.chunk(algo, env, state, 3, 10**9))
        start = time.perf_counter()
        _, report = jax.block_until_ready(program.chunk(algo, env, state, iterations, 10**9))
        return iterations * topology.steps_per_iteration(algo) / (time.perf_counter() - start), report.actors
    finally:
        program.close()


def in_turn(choices, repeats):
    """Return the median rows per second and the largest lags of each choice, measured alternately."""
    rates = {name: [] for name in choices}
    lags = {name: [] for name in choices}
    for repeat in range(repeats):
        for name, measure in list(choices.items())[:: 1 if repeat % 2 == 0 else -1]:
            rate, figures = measure()
            rates[name].append(rate)
            lags[name].append(float(figures["policy_lag_max"]))
    return {name: statistics.median(found) for name, found in rates.items()}, lags


def measured(task, iterations, repeats):
    """Measure `ready`."""
    pong = task == "Pong-v5"
    group = PONG["num_envs"] if pong else GROUP
    env = jaxrl.make("envpool:" + PONG["env"]) if pong else Uneven(task)
    algo = random_actor()(rollout_length=PONG["rollout"]) if pong else jaxrl.PPO(rollout_length=ROLLOUT)
    choices = {
        "in step": {},
        "groups=2": {"groups": 2},
        "ready=half": {"ready": group // 2},
        "ready=quarter": {"ready": group // 4},
    }
    asks = {
        name: functools.partial(rows_per_second, algo, env, iterations, num_envs=group, **chosen)
        for name, chosen in choices.items()
    }
    rates, _ = in_turn(asks, repeats)
    row = {"steps": task, "environments": group} | {f"{name} (rows/s)": rate for name, rate in rates.items()}
    return row | {"half / in step": rates["ready=half"] / rates["in step"]}


def pooled(task, iterations, repeats):
    """Measure `learner_batch` with one slow environment, and with random step times compared with `ready`."""
    if task == "by chance":
        algo, envs, free = jaxrl.PPO(rollout_length=ROLLOUT), GROUP, {"lockstep": False}
        choices = {
            "ready=quarter, 1 thread": (task, {"ready": GROUP // 4}),
            "round, 4 threads": (task, {"actors": 4} | free),
            "pool, 4 threads": (task, {"actors": 4, "learner_batch": GROUP}),
            f"round, {GROUP} threads": (task, {"actors": GROUP} | free),
            f"pool, {GROUP} threads": (task, {"actors": GROUP, "learner_batch": GROUP}),
        }
    else:
        algo, envs = jaxrl.IMPALA(), POOLED
        alone = {"actors": POOLED}
        choices = {
            "even, round": ("even", alone),
            "even, pool": ("even", alone | {"learner_batch": POOLED}),
            "one slow, round": (task, alone),
            "one slow, round, queue=8": (task, alone | {"queue": 8}),
            "one slow, pool": (task, alone | {"learner_batch": POOLED}),
        }
    asks = {
        name: functools.partial(rows_per_second, algo, Uneven(steps), iterations, num_envs=envs, **chosen)
        for name, (steps, chosen) in choices.items()
    }
    rates, lags = in_turn(asks, repeats)
    row = {"steps": task, "environments": envs} | {f"{name} (rows/s)": rate for name, rate in rates.items()}
    row |= {f"{name} (largest lag)": max(found) for name, found in lags.items()}
    if task != "by chance":
        row["one slow, pool / even, pool"] = rates["one slow, pool"] / rates["even, pool"]
        row["one slow, pool / one slow, round"] = rates["one slow, pool"] / rates["one slow, round"]
    return row


def replayed(task, iterations, repeats):
    """Measure `learner_batch` with a replay and one slow environment."""
    algo, slow = REPLAYED[task], "one ten times as slow"
    source = record.resolved(algo, Uneven("even"), POOLED).experience["replay"]
    iterations = iterations * ROLLOUT // source.rollout_length
    pool = {"learner_batch": POOLED}
    choices = {
        "even, round": ("even", {}),
        "even, pool": ("even", pool),
        "one slow, round": (slow, {}),
        "one slow, pool": (slow, pool),
    }
    asks = {
        name: functools.partial(
            rows_per_second, algo, Uneven(steps, SLOW), iterations, num_envs=POOLED, actors=POOLED, **chosen
        )
        for name, (steps, chosen) in choices.items()
    }
    rates, lags = in_turn(asks, repeats)
    row = {"algorithm": task, "environments": POOLED} | {f"{name} (rows/s)": rate for name, rate in rates.items()}
    row |= {f"{name} (largest lag)": max(found) for name, found in lags.items()}
    row["one slow, pool / even, pool"] = rates["one slow, pool"] / rates["even, pool"]
    row["one slow, round / even, round"] = rates["one slow, round"] / rates["even, round"]
    row["one slow, pool / even, round"] = rates["one slow, pool"] / rates["even, round"]
    return row


def torchbeast(task, iterations, repeats):
    """Measure the preset with its paper's environments and batches."""
    preset = jaxrl.preset("torchbeast")
    env = jaxrl.make(preset.env)
    choices = {
        "8 environments": {"num_envs": 8},
        "48 environments, batches of 8": {"num_envs": 48, "actors": 12, "learner_batch": 8},
        "48 environments, batches of 32": {"num_envs": 48, "actors": 12, "learner_batch": 32},
    }
    asks = {
        name: functools.partial(rows_per_second, preset.algorithm, env, iterations, **chosen)
        for name, chosen in choices.items()
    }
    rates, lags = in_turn(asks, repeats)
    row = {"steps": task} | {f"{name} (rows/s)": rate for name, rate in rates.items()}
    return row | {f"{name} (largest lag)": max(found) for name, found in lags.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", choices=["ready", "pool", "replay", "torchbeast"], default=None)
    parser.add_argument("--algo", nargs="+", choices=[*REPLAYED], default=[*REPLAYED], help="algorithms of replay")
    arguments = parser.parse_args()
    parts = {
        "ready": (measured, ("by chance", "one slow", "even", "Pong-v5"), "uneven"),
        "pool": (pooled, ("one ten times as slow", "by chance"), "pool"),
        "replay": (replayed, arguments.algo, "replay-pool"),
        "torchbeast": (torchbeast, ("Pong-v5",), "torchbeast"),
    }
    for part, (measure, tasks, name) in parts.items():
        if arguments.only not in (None, part):
            continue
        rows = []
        for task in tasks:
            rows.append(measure(task, arguments.iterations, arguments.repeats))
            print(record.table(rows[-1:]), flush=True)
        settings = {"mean_seconds": MEAN, "pong": PONG, "rollout": ROLLOUT, "iterations": arguments.iterations}
        print(record.save(name, rows, repeats=arguments.repeats, settings=settings, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
