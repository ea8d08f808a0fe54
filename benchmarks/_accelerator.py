"""Measurements of benchmarks/accelerator.py, which runs this file in a separate process for each part."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

Row = dict[str, Any]


class LeftOutError(Exception):
    """A measurement that is not possible here, with the reason."""


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """The request for a part.

    Attributes:
      process: name of the process within the part.
      folder: folder shared by the part's processes.
      until: end of the part's time, by `time.monotonic`.
      rejax, purejaxrl: paths, or "".
      small: whether to use tiny sizes.
      only_compile: only compile each task, without timing.
    """

    process: str
    folder: pathlib.Path
    until: float
    rejax: str
    purejaxrl: str
    small: bool
    only_compile: bool = False

    @property
    def repeats(self) -> int:
        return 1 if self.only_compile else 2 if self.small else 5

    @property
    def slice(self) -> float:
        """Duration of one timing in seconds."""
        return 0.0 if self.only_compile else 0.05 if self.small else 1.0


@dataclasses.dataclass(frozen=True)
class Task:
    """One row: its description, and the function that measures the rest."""

    about: Row
    measure: Callable[[], Row]


def clocked(run: Callable[[int], Any], count: int) -> float:
    """Return the seconds of `run(count)`, which blocks until it is done."""
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


def rate(asked: TrainRequest, run: Callable[[int], Any], steps: int, warm: int = 1) -> Row:
    """Return the speed of `run(iterations)` with `steps` steps per iteration, after `warm` iterations."""
    run(warm)
    count = 1
    for _ in range(2):  # the first call tells roughly how many fill a slice
        count = max(1, round(asked.slice / (clocked(run, count) / count)))
    seconds = [clocked(run, count) / count for _ in range(asked.repeats)]
    middle = statistics.median(seconds)
    return {
        "steps/s": steps / middle,
        "ms an iteration": 1e3 * middle,
        "slowest / fastest": max(seconds) / min(seconds),
    }


class Training:
    """A compiled run that advances by a number of iterations; uses all devices by default."""

    def __init__(self, algo: Any, env: str, num_envs: int, devices: int | None = None, **parameters: Any):
        import jax

        import jaxrl

        env = jaxrl.make(env, **parameters)
        self.algo = record.resolved(algo, env, num_envs)
        self.program = jaxrl.Anakin(num_envs, devices=devices).bind(self.algo, env)
        self.steps = self.program.steps_per_iteration(self.algo)
        self.algo, self.env = self.program.layout.place(self.algo), self.program.layout.place(env)
        self.state = jax.block_until_ready(self.program.start(self.algo, self.env, 0))

    def __call__(self, iterations: int) -> None:
        import jax

        done = self.program.chunk(self.algo, self.env, self.state, iterations, 10**6)
        self.state, self.report = jax.block_until_ready(done)

    @property
    def warm(self) -> int:
        """Iterations after which every iteration learns."""
        return 1 + -(-getattr(self.algo, "min_size", 0) // self.steps)

    def learned(self) -> Any:
        """Return all numbers of the learner as one host array."""
        import jax

        return flat(jax.device_get(self.state.learner))


def flat(tree: Any) -> Any:
    import jax
    import numpy as np

    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.ravel() for x in leaves if np.issubdtype(x.dtype, np.floating)])


def compared(found: Any, other: Any) -> Row:
    """Return the differences between two host arrays."""
    import numpy as np

    equal = bool(np.array_equal(found, other, equal_nan=True))
    return {"bit for bit": equal, "largest difference": float(np.max(np.abs(found - other), initial=0.0))}


# --- throughput ----------------------------------------------------------------------------------------------------

MINATAR = "gymnax:Breakout-MinAtar"
CARTPOLE = "gymnax:CartPole-v1"


def preset(name: str) -> Any:
    from jaxrl.run.presets import PRESETS

    return PRESETS[name].algorithm


def throughput(asked: TrainRequest) -> list[Task]:
    import jaxrl

    def speed(algo, env, num_envs, **parameters):
        def measure():
            run = Training(algo(), env, num_envs, **parameters)
            return rate(asked, run, run.steps, run.warm)

        return measure

    def alone(env, num_envs, **parameters):
        def measure():
            from _play import of_jaxrl, plays

            made = jaxrl.make(env, **parameters)
            play = plays(of_jaxrl(made), made.action_space, num_envs, 64)
            return {"steps/s": 64 * num_envs / statistics.median(play() for _ in range(asked.repeats))}

        return measure

    def together(seeds):
        return lambda: rate(asked, Sweep(CARTPOLE, 64, seeds), 128 * 64 * seeds)

    ant = {"backend": "spring"}
    minatar, brax = functools.partial(preset, "purejaxrl-minatar"), functools.partial(preset, "purejaxrl-brax")
    sizes = (4,) if asked.small else (64, 2048, 16_384, 65_536)
    tasks = [Task({"work": "PPO CartPole", "num_envs": n}, speed(jaxrl.PPO, CARTPOLE, n)) for n in sizes]
    tasks += [Task({"work": "CartPole alone", "num_envs": sizes[-1]}, alone(CARTPOLE, sizes[-1]))]
    seeds = (2,) if asked.small else (1, 8, 64, 256)
    tasks += [Task({"work": "sweep of PPO CartPole", "num_envs": 64, "seeds": n}, together(n)) for n in seeds]
    sizes = (16,) if asked.small else (64, 1024, 8192)
    tasks += [Task({"work": "PPO MinAtar Breakout", "num_envs": n}, speed(minatar, MINATAR, n)) for n in sizes]
    tasks += [Task({"work": "MinAtar Breakout alone", "num_envs": sizes[-1]}, alone(MINATAR, sizes[-1]))]
    if asked.small:
        return [*tasks, Task({"work": "PPO brax ant; DQN; SAC"}, not_in_small)]
    tasks += [Task({"work": "PPO brax ant", "num_envs": n}, speed(brax, "brax:ant", n, **ant)) for n in (2048, 8192)]
    tasks += [Task({"work": "brax ant alone", "num_envs": 8192}, alone("brax:ant", 8192, **ant))]
    tasks += [Task({"work": "DQN CartPole", "num_envs": n}, speed(jaxrl.DQN, CARTPOLE, n)) for n in (1, 64)]
    tasks += [Task({"work": "SAC Pendulum", "num_envs": n}, speed(jaxrl.SAC, "gymnax:Pendulum-v1", n)) for n in (1, 64)]
    return [*tasks, Task({"work": "PPO MinAtar Breakout", "num_envs": 65_536}, speed(minatar, MINATAR, 65_536))]


def not_in_small() -> Row:
    raise LeftOutError("not measured at small sizes")


class Sweep:
    """PPO runs with different seeds, distributed as in `jaxrl.sweep`."""

    def __init__(self, env: str, num_envs: int, seeds: int):
        import jax

        import jaxrl
        from jaxrl.core import keys
        from jaxrl.sweeps.vectorized import VectorizedRuns

        self.env = jaxrl.make(env)
        algo = record.resolved(jaxrl.PPO(), self.env, num_envs)
        program = jaxrl.Anakin(num_envs, devices=1).bind(algo, self.env)
        mapping = "in_turn" if jax.default_backend() == "cpu" else "vmap"
        self.runs = VectorizedRuns(program, min(jax.local_device_count(), seeds), mapping, seeds)
        self.algos = self.runs.stack([algo] * seeds)
        roots = self.runs.stack([keys.root_key(seed) for seed in range(seeds)])
        self.states = self.runs.start(self.algos, self.env, roots)

    def __call__(self, iterations: int) -> None:
        import jax

        done = self.runs.chunk(self.algos, self.env, self.states, iterations, 10**6)
        self.states, _ = jax.block_until_ready(done)


# --- replay --------------------------------------------------------------------------------------------------------


def replay(asked: TrainRequest) -> list[Task]:
    import jax
    import replay as benchmark

    sizes = (10_000 if asked.small else 1_000_000, 64, 256)
    cases: dict[str, Callable[[], Any]] = {
        "ours, uniform": lambda: benchmark.ours(*sizes, False, 1),
        "ours, prioritized": lambda: benchmark.ours(*sizes, True, 1),
        "ours, prioritized, 8 shards": lambda: benchmark.ours(*sizes, True, 8),
        "flashbax, uniform": lambda: benchmark.flashbax(*sizes, False),
        "flashbax, prioritized": lambda: benchmark.flashbax(*sizes, True),
        "flashbax, prioritized, priorities depend on weights": lambda: benchmark.flashbax(*sizes, True, ordered=True),
    }

    def measured(make):
        state, loop = make()
        memory = loop.lower(state, jax.random.key(0), 1).compile().memory_analysis()
        held, key = [state], jax.random.key(0)
        size = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))

        def run(count):
            held[0] = jax.block_until_ready(loop(held[0], key, count))[0]

        run(-(-sizes[0] // sizes[1]))  # full
        found = rate(asked, run, sizes[1])
        row = {"us an iteration": 1e3 * found["ms an iteration"], "slowest / fastest": found["slowest / fastest"]}
        return row | {"bytes of the replay": size} | temporary(memory)

    if asked.small:
        cases = {name: make for name, make in cases.items() if name in ("ours, prioritized", "flashbax, uniform")}
    about = {"capacity": sizes[0], "add": sizes[1], "sample": sizes[2]}
    return [Task({"work": name} | about, functools.partial(measured, make)) for name, make in cases.items()]


def temporary(memory: Any) -> Row:
    """Return a program's memory except its arguments; a large value indicates a copy of the replay buffer."""
    return {} if memory is None else {"temporary bytes": memory.temp_size_in_bytes}


# --- environments on the host --------------------------------------------------------------------------------------


def host(asked: TrainRequest) -> list[Task]:
    import atari
    import host as benchmark

    runs: list[Any] = []

    def ours():
        if not runs:
            runs.append(benchmark.Jaxrl())
        return runs[0]

    def pong(name):
        rows = (1 if asked.small else 200) * benchmark.PONG[name]["num_envs"] * benchmark.PONG[name]["rollout"]
        asks = {
            "jaxrl (steps/s)": lambda: ours()(name=name, rows=rows),
            "EnvPool alone (steps/s)": lambda: ours()(name=name, rows=rows, part="environments"),
        }
        seconds = record.alternate(asks, asked.repeats)
        row = {name: rows / took for name, took in seconds.items()}
        return row | {"jaxrl / EnvPool alone": row["jaxrl (steps/s)"] / row["EnvPool alone (steps/s)"]}

    def ppo(name):
        rows = 60 * benchmark.PPO[name]["batch"]
        seconds = record.alternate({name: lambda: ours()(name=name, rows=rows)}, asked.repeats)
        return {"steps/s": rows / seconds[name]}

    def learned(name, num_envs, actors):
        settings = argparse.Namespace(game="Pong-v5", num_envs=num_envs, actors=actors, groups=1, queue=1)
        settings.iterations, settings.repeats = 5, 3
        algo = atari.algorithms(200_000)[name]
        row = atari.measured(name, algo, settings)
        return {key: value for key, value in row.items() if key not in ("algorithm", "num_envs", "actors")}

    cores = {"cores": len(os.sched_getaffinity(0))}
    tasks = []
    for name, settings in benchmark.PONG.items():
        about = {"work": "random actions in Pong", "num_envs": settings["num_envs"]}
        tasks.append(Task(about | cores, functools.partial(pong, name)))
    if asked.small:
        return [*tasks, Task({"work": "PPO in CartPole and HalfCheetah; IMPALA, R2D2 and PPO in Pong"}, not_in_small)]
    for name, settings in benchmark.PPO.items():
        about = {"work": f"PPO in {settings['env']}", "num_envs": settings["num_envs"]}
        tasks.append(Task(about, functools.partial(ppo, name)))
    for name in ("impala", "r2d2", "ppo"):
        about = {"work": f"{name} in Pong", "num_envs": 192, "actors": 4}
        tasks.append(Task(about | cores, functools.partial(learned, name, 192, 4)))
    return tasks


# --- learning ------------------------------------------------------------------------------------------------------


def learning(asked: TrainRequest) -> list[Task]:
    import jaxrl
    from jaxrl.run.callbacks import Decision, FunctionCallback

    def trained(algo, env, total_steps, target, most, **settings):
        until = min(asked.until, time.monotonic() + most) - 10.0

        def late(moment):
            return Decision(stop="time") if time.monotonic() > until else None

        result = jaxrl.train(
            algo(),
            env,
            total_steps=total_steps,
            target_return=target,
            callbacks=[FunctionCallback(late, "time")],
            evaluate_every=total_steps // 20,
            progress=False,
            **settings,
        )
        score = float(result.evaluation.return_mean) if result.evaluation else None
        row = {"score": score, "ended": result.stopped, "steps": result.total_steps}
        return row | {"seconds": result.wall_seconds, "steps/s": result.steps_per_second}

    small = asked.small
    runs = [
        ("PPO", jaxrl.PPO, CARTPOLE, 10_000 if small else 500_000, 475.0, 100, {}),
        ("SAC", jaxrl.SAC, "gymnax:Pendulum-v1", 20_000, -200.0, 120, {}),
        ("PPO", jaxrl.PPO, MINATAR, 10_000_000, 28.0, 220, {"num_envs": 64, "explore_in_evaluation": True}),
    ]
    tasks = []
    for name, algo, env, steps, target, most, settings in runs:
        about = {"work": f"{name} on {env}, defaults", "of steps": steps, "target": target} | settings
        measure = functools.partial(trained, algo, env, steps, target, most, **settings)
        tasks.append(Task(about, not_in_small if small and env != CARTPOLE else measure))
    return tasks


# --- equality and determinism --------------------------------------------------------------------------------------

_AGAINST = {
    "as it is, again": "as it is",
    "deterministic": "as it is",
    "deterministic, again": "deterministic",
    "on the CPU": "deterministic",
}


def equality(asked: TrainRequest) -> list[Task]:
    import jax
    import numpy as np

    import jaxrl
    from jaxrl.algos import fields
    from jaxrl.networks import ActorCritic, MinAtarCNN

    def learned(algo, env, num_envs, iterations):
        run = Training(algo, env, num_envs, devices=1)
        run(iterations)
        return run.learned()

    def measured(name, *settings):
        found = learned(*settings)
        row = {"twice in one process": compared(found, learned(*settings))}
        np.save(asked.folder / f"{name}, {asked.process}.npy", found)
        other = _AGAINST.get(asked.process)
        if other is not None:
            path = asked.folder / f"{name}, {other}.npy"
            row[f"against {other!r}"] = compared(found, np.load(path)) if path.exists() else "which is not there"
        return row | {"numbers": found.size, "largest": float(np.max(np.abs(found)))}

    def swept():
        """Compare two seeds under `vmap`, each with its separate run."""
        steps = 5 * 64 * 128
        train = jax.jit(jaxrl.make_train(jaxrl.PPO(), CARTPOLE, total_steps=steps, num_envs=64))
        keys = jax.random.split(jax.random.key(0), 2)
        together = jax.device_get(jax.jit(jax.vmap(train))(keys)[0].learner)
        rows = []
        for number in range(2):
            alone = flat(jax.device_get(train(keys[number])[0].learner))
            rows.append(compared(flat(jax.tree.map(lambda x, number=number: x[number], together)), alone))
        return {f"seed {number}, five iterations": row for number, row in enumerate(rows)}

    def divided():
        devices = jax.local_device_count()
        if devices == 1:
            raise LeftOutError("only one device")
        found = []
        for count in (1, devices):
            run = Training(jaxrl.PPO(), CARTPOLE, 64 * devices, devices=count)
            run(5)
            found.append(run.learned())
        return compared(*found)

    dqn = jaxrl.DQN(prioritized=fields.PrioritizedReplay(), min_size=500, capacity=10_000)
    sac = jaxrl.SAC(min_size=100, capacity=10_000)
    runs: dict[str, tuple[Any, ...]] = {
        "PPO CartPole": (jaxrl.PPO(), CARTPOLE, 64, 20),
    }
    if not asked.small:
        runs["DQN CartPole, prioritized"] = (dqn, CARTPOLE, 8, 200)
        runs["PPO MinAtar, convolutions"] = (jaxrl.PPO(network=ActorCritic(MinAtarCNN(), shared=True)), MINATAR, 64, 5)
        runs["SAC Pendulum"] = (sac, "gymnax:Pendulum-v1", 1, 500)
    tasks = [Task({"work": name}, functools.partial(measured, name, *settings)) for name, settings in runs.items()]
    if asked.process == "as it is" and not asked.small:
        tasks += [Task({"work": "runs under vmap, against each alone"}, swept)]
        tasks += [Task({"work": "one run over all devices, against one"}, divided)]
    return tasks


# --- --deterministic -----------------------------------------------------------------------------------------------

_EARLIER = {"as it is, again": "as it is", "--deterministic": "as it is", "--deterministic, again": "--deterministic"}
# A run in a separate process, which is killed after a number of steps.
_KILLED = """if True:
    import os, signal, sys
    import jaxrl
    run_dir, deterministic, (num_envs, total_steps, last) = sys.argv[1], sys.argv[2] == "True", map(int, sys.argv[3:])
    def kill(moment):
        if moment.step >= last:
            os.kill(os.getpid(), signal.SIGKILL)
    quarter = total_steps // 4
    jaxrl.train("ppo", "gymnax:CartPole-v1", total_steps=total_steps, num_envs=num_envs, run_dir=run_dir,
                checkpoint_every=quarter, callback_every=quarter, callbacks=[kill], evaluate_every=0,
                evaluation_episodes=8, deterministic=deterministic, progress=False)
"""


def determinism(asked: TrainRequest) -> list[Task]:
    import numpy as np

    import jaxrl
    from jaxrl.algos import fields
    from jaxrl.networks import ActorCritic, MinAtarCNN
    from jaxrl.run.directory.checkpoint import complete_steps, read_manifest

    deterministic = asked.process.startswith("--deterministic")
    earlier = _EARLIER.get(asked.process)

    def measured(name, algo, env, num_envs, iterations):
        run = Training(algo, env, num_envs, devices=1)
        run(iterations)
        found, row = run.learned(), rate(asked, run, run.steps, run.warm)
        np.savez(asked.folder / f"{name}, {asked.process}.npz", found=found, speed=row["steps/s"])
        path = asked.folder / f"{name}, {earlier}.npz"
        if path.exists():
            before = np.load(path)
            row |= {f"against {earlier!r}": compared(found, before["found"])}
            row |= {f"speed / that of {earlier!r}": row["steps/s"] / float(before["speed"])}
        return row

    def lived(run_dir, environment, num_envs, total_steps, last):
        """Train in a separate process; return its exit code."""
        words = [str(run_dir), str(deterministic), *map(str, (num_envs, total_steps, last))]
        command = [sys.executable, "-c", _KILLED, *words]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode not in (0, -signal.SIGKILL):
            raise LeftOutError((ended.stderr.strip().splitlines() or ["?"])[-1])
        return ended.returncode

    def resumed(cached, num_envs, total_steps):
        """Kill a run at three quarters, resume it in another process, and compare it with an uninterrupted run."""
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # it sets its own
        if cached:
            for name in ("JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR"):
                environment.pop(name, None)
            environment["JAXRL_CACHE"] = str(asked.folder / "cache")
        folder = pathlib.Path(tempfile.mkdtemp(dir=asked.folder))
        whole, killed = folder / "whole", folder / "killed"
        of_run = environment, num_envs, total_steps
        if lived(killed, *of_run, 3 * total_steps // 4) == 0 or not (steps := complete_steps(killed / "checkpoints")):
            raise LeftOutError("the run ended before it was killed, or before it was saved")
        lived(killed, *of_run, 2 * total_steps)
        lived(whole, *of_run, 2 * total_steps)
        found, other = (read_manifest(path / "checkpoints") for path in (killed, whole))
        sums = [(leaf.name, leaf.crc32) for leaf in found.leaves]
        differing = set(sums) ^ {(leaf.name, leaf.crc32) for leaf in other.leaves}
        row = {"bit for bit": found.step == other.step and not differing, "arrays": len(sums)}
        return row | {"that differ": len({name for name, _ in differing}), "resumed at step": steps[-1]}

    num_envs = 4 if asked.small else 2048
    runs: dict[str, tuple[Any, ...]] = {"PPO CartPole": (jaxrl.PPO(), CARTPOLE, num_envs, 20)}
    if not asked.small:
        convolutions = jaxrl.PPO(network=ActorCritic(MinAtarCNN(), shared=True))
        runs["PPO MinAtar, convolutions"] = (convolutions, MINATAR, 1024, 5)
        dqn = jaxrl.DQN(prioritized=fields.PrioritizedReplay(), min_size=500, capacity=10_000)
        runs["DQN CartPole, prioritized"] = (dqn, CARTPOLE, 8, 200)
    tasks = [Task({"work": name}, functools.partial(measured, name, *settings)) for name, settings in runs.items()]
    if not asked.process.endswith("again"):
        total_steps = 16 * 128 * num_envs
        for cached in (False,) if deterministic else (False, True):
            about = {"work": "PPO CartPole, killed and resumed", "compiled programs": "kept" if cached else "not kept"}
            tasks.append(Task(about, functools.partial(resumed, cached, num_envs, total_steps)))
    return tasks


# --- precision -----------------------------------------------------------------------------------------------------


def precision(asked: TrainRequest) -> list[Task]:
    import jax

    import jaxrl
    from jaxrl.networks import MLP, ActorCritic, MinAtarCNN

    exact: dict[str, Any] = {}

    def measured(work, algo, env, num_envs, kind):
        with jax.default_matmul_precision(kind) if kind else contextlib.nullcontext():
            run = Training(algo, env, num_envs)
            run(1)
            found = run.learned()
            row = rate(asked, run, run.steps)
        exact.setdefault(work, found)  # the first is the most precise
        return row | {"one iteration against 'highest'": compared(found, exact[work])}

    if asked.small:
        torsos = {"PPO CartPole": (MLP(), False, CARTPOLE, 4)}
    else:
        torsos = {
            "PPO MinAtar, MLP of 1024 x 1024": (MLP((1024, 1024)), False, MINATAR, 4096),
            "PPO MinAtar, convolutions": (MinAtarCNN(64, width=512), True, MINATAR, 1024),
        }
    kinds = ("highest", None) if asked.small else ("highest", None, "tensorfloat32", "bfloat16")
    tasks = []
    for work, (torso, shared, env, num_envs) in torsos.items():
        for kind in (*kinds, "layers in bfloat16"):
            dtype, precision = ("bfloat16", None) if kind == "layers in bfloat16" else ("float32", kind)
            algo = jaxrl.PPO(network=ActorCritic(dataclasses.replace(torso, dtype=dtype), shared=shared))
            about = {"work": work, "num_envs": num_envs, "precision of products": kind or "the default"}
            tasks.append(Task(about, functools.partial(measured, work, algo, env, num_envs, precision)))
    return tasks


# --- memory --------------------------------------------------------------------------------------------------------


def memory(asked: TrainRequest) -> list[Task]:
    import jax

    import jaxrl

    def one(algo, env, num_envs):
        run = Training(algo, env, num_envs, devices=1)
        stats = run.program.compile_chunk(run.algo, run.env, run.state).memory_analysis()
        run(2)
        return stats

    def many(seeds, num_envs):
        from jaxrl.sweeps.vectorized import chunk_many

        run = Sweep(CARTPOLE, num_envs, seeds)
        stats = chunk_many.lower(run.runs, run.algos, run.env, run.states, jax.numpy.int32(1), jax.numpy.float32(1))
        stats = stats.compile().memory_analysis()
        run(2)
        return stats

    def measured(predict):
        stats = predict()
        if stats is None:
            raise LeftOutError("not reported by the compiler")
        parts = {name: getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
        predicted = parts["argument"] + parts["output"] + parts["temp"] - parts["alias"]
        row = {f"{name} bytes": size for name, size in parts.items()} | {"predicted bytes": predicted}
        counted = jax.local_devices()[0].memory_stats()
        if not counted or "peak_bytes_in_use" not in counted:
            return row | {"measured bytes": f"left out: {jax.devices()[0].device_kind} does not count"}
        peak = counted["peak_bytes_in_use"]
        return row | {"measured bytes": peak, "measured / predicted": peak / predicted}

    envs = 64 if asked.small else 16_384
    dqn = jaxrl.DQN(capacity=1_000_000, min_size=20_000)
    runs: dict[str, Callable[[], Any]] = {
        "PPO CartPole": lambda: one(jaxrl.PPO(), CARTPOLE, envs),
        "PPO MinAtar": lambda: one(preset("purejaxrl-minatar"), MINATAR, 8192),
        "DQN MinAtar": lambda: one(dqn, MINATAR, 64),
        "sweep of PPO CartPole": lambda: many(64, 64),
    }
    return [Task({"work": asked.process}, lambda: measured(runs[asked.process]))]


# --- peers ---------------------------------------------------------------------------------------------------------


def peers(asked: TrainRequest) -> list[Task]:
    here, folder = pathlib.Path(__file__), pathlib.Path(asked.rejax)
    python, path = sys.executable, asked.rejax
    made = record.ROOT / ".cache" / "peers" / "rejax" / "bin" / "python"  # created by throughput.py
    if asked.rejax and folder.is_file():
        python, path = asked.rejax, ""
    elif not asked.rejax and made.exists():
        python, path = str(made), ""
    workers: dict[str, record.Worker] = {}

    def worker(name):
        if name not in workers:
            if name == "jaxrl":
                more, script = {"PYTHONPATH": os.environ["PYTHONPATH"]}, here.parent / "throughput.py"
                workers[name] = record.Worker(sys.executable, script, more)
            else:
                found = os.pathsep.join(filter(None, [path, asked.purejaxrl and f"{asked.purejaxrl}/purejaxrl"]))
                needs = "rejax" if name == "rejax" else "throughput; throughput.purejaxrl_module('ppo')"
                there = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": found}
                check = [python, "-c", f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {needs}"]
                tried = subprocess.run(check, capture_output=True, text=True, env=there, check=False)
                if tried.returncode:
                    raise LeftOutError(tried.stderr.strip().splitlines()[-1])
                workers[name] = record.Worker(python, here.parent / "throughput.py", {"PYTHONPATH": found})
        return workers[name]

    def measured(name, num_envs, seeds):
        if name == "purejaxrl" and not asked.purejaxrl:
            raise LeftOutError("--purejaxrl was not given")
        iterations = 2 if asked.small else min(128, max(4, 500_000 // (128 * num_envs * seeds)))
        steps = 128 * num_envs * iterations
        request = {"work": "ppo", "num_envs": num_envs, "steps": steps, "seeds": seeds, "seed": 0}
        theirs, ours = worker(name), worker("jaxrl")
        asks = {
            "jaxrl (steps/s)": lambda: ours.ask(who="jaxrl", **request),
            f"{name} (steps/s)": lambda: theirs.ask(who=name, **request),
        }
        seconds = record.alternate(asks, asked.repeats)
        row = {what: steps * seeds / took for what, took in seconds.items()}
        return row | {f"jaxrl / {name}": row["jaxrl (steps/s)"] / row[f"{name} (steps/s)"]}

    tasks = []
    for num_envs, seeds in ((4, 1),) if asked.small else ((2048, 1), (64, 1), (16_384, 1), (64, 64), (64, 8), (4, 1)):
        for name in ("rejax", "purejaxrl"):
            about = {"work": f"PPO CartPole beside {name}", "num_envs": num_envs, "seeds": seeds}
            tasks.append(Task(about, functools.partial(measured, name, num_envs, seeds)))
    return tasks


# --- one process ---------------------------------------------------------------------------------------------------


def tell(kind: str, message: Any) -> None:
    print("@" + json.dumps([kind, message], default=float), flush=True)


def main(part: str, process: str, folder: str, left: str, rejax: str, purejaxrl: str, small: str) -> None:
    import jax

    if process.startswith("--deterministic"):
        from jaxrl.parallel.determinism import set_flags

        set_flags()
    until, device = time.monotonic() + float(left), jax.devices()[0]
    tiny = bool(small) or (device.platform == "cpu" and process != "on the CPU")
    share = os.environ.get("JAXRL_BENCHMARK_SHARE")
    asked = TrainRequest(process, pathlib.Path(folder), until, rejax, purejaxrl, tiny, only_compile=share is not None)
    about = {"platform": device.client.platform_version.strip().splitlines(), "load": os.getloadavg()[0]}
    about |= {"memory bytes": (device.memory_stats() or {}).get("bytes_limit"), "small": tiny}
    if process != "on the CPU":
        tell("machine", record.machine() | about)
    functions = (throughput, replay, host, learning, equality, determinism, precision, memory, peers)
    try:
        tasks = {function.__name__: function for function in functions}[part](asked)
    except ImportError as error:
        tasks = [Task({}, functools.partial(_raise, LeftOutError(str(error))))]
    if share is not None:
        first, count = map(int, share.split("/"))
        tasks = tasks[first::count]
    tell("tasks", [task.about for task in tasks])
    for task in tasks:
        began = time.monotonic()
        try:
            row = task.measure()
        except LeftOutError as reason:
            row = {"left out": str(reason)}
        except Exception as error:  # a failure on one device, such as out of memory, does not stop the other tasks
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            row = {"left out": f"{type(error).__name__}: {first[:300]}"}
        tell("row", row | {"took seconds": round(time.monotonic() - began, 1)})


def _raise(error):
    raise error


if __name__ == "__main__":
    main(*sys.argv[1:])
