"""Start-up time of whole processes, from the command to the prompt.

    python benchmarks/startup.py [--only words runs parts] [--repeats 5] [--runs 3] [--tasks ppo sac dqn] [--no-peer]

words: imports, help and errors in names, alternating with reference processes.
runs:  `jaxrl train` with a run directory, ten evaluations and the plot, first with an empty compilation cache and then
       with a filled one, alternating with the whole process of rejax with the same settings and evaluations.
parts: one cold and one warm run of `jaxrl train ppo`, split into imports, tracing, compilation, training and the rest.

rejax 0.1.3 runs in a separate environment (gymnax 0.0.9); it does not write files or plot. Settings of JAX's
compilation cache are removed, so that jaxrl's defaults apply; each cold run has an empty home directory for its cache.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record
from throughput import PEER

HERE = pathlib.Path(__file__)
JAXRL = [sys.executable, "-m", "jaxrl"]

# By name: the arguments of `jaxrl train`, and rejax's algorithm with the same settings.
TASKS = {
    "ppo": (
        "ppo --env gymnax:CartPole-v1 --total-steps 500000 --num-envs 4 --rollout-length 128 --epochs 4 "
        "--minibatches 4 --learning-rate 2.5e-4 --network.torso mlp:64,64:activation=tanh",
        "PPO",
        {
            "env": "CartPole-v1",
            "total_timesteps": 500_000,
            "num_envs": 4,
            "num_steps": 128,
            "num_epochs": 4,
            "num_minibatches": 4,
            "learning_rate": 2.5e-4,
            "max_grad_norm": 0.5,
            "agent_kwargs": {"hidden_layer_sizes": (64, 64), "activation": "tanh"},
        },
    ),
    "sac": (
        "sac --env gymnax:Pendulum-v1 --total-steps 20000 --num-envs 8 --replay-ratio 0.125 --batch-size 256 "
        "--capacity 100000 --min-size 1000 --learning-rate 3e-4 --policy.widths 64,64 --critic.widths 64,64",
        "SAC",
        {
            "env": "Pendulum-v1",
            "total_timesteps": 20_000,
            "num_envs": 8,
            "batch_size": 256,
            "buffer_size": 100_000,
            "fill_buffer": 1_000,
            "learning_rate": 3e-4,
            "gamma": 0.99,
            "polyak": 0.995,
        },
    ),
    "dqn": (
        "dqn --env gymnax:CartPole-v1 --total-steps 100000 --num-envs 8 --rollout-length 1 --replay-ratio 0.125 "
        "--batch-size 128 --capacity 50000 --min-size 1000 --learning-rate 2.5e-4 --n-step 1 "
        "--network.torso mlp:64,64:activation=relu",
        "DQN",
        {
            "env": "CartPole-v1",
            "total_timesteps": 100_000,
            "num_envs": 8,
            "batch_size": 128,
            "buffer_size": 50_000,
            "fill_buffer": 1_000,
            "learning_rate": 2.5e-4,
            "gamma": 0.99,
            "target_update_freq": 800,  # environment steps, which are 100 updates
            "polyak": 0.0,
            "exploration_fraction": 0.5,
            "agent_kwargs": {"activation": "relu"},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("words", "runs", "parts"), default=["words", "runs", "parts"])
    parser.add_argument("--repeats", type=int, default=5, help="repeats of imports and words")
    parser.add_argument("--runs", type=int, default=3, help="number of training runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    found = {}
    if "words" in arguments.only:
        found["words"] = words(arguments.repeats)
    if "runs" in arguments.only:
        peer = None if arguments.no_peer else record.peer_python("rejax", PEER)
        found["runs"] = [trained(task, arguments.runs, peer) for task in arguments.tasks]
    if "parts" in arguments.only:
        found["parts"] = parts()
    rows = found.pop("words", [])
    print(record.save("startup", rows, load=os.getloadavg(), **found))


# --- whole processes ---------------------------------------------------------------------------------------------


def timed(command: list[str], environment: dict[str, str] | None = None, code: int = 0) -> float:
    """Return the seconds of a whole process, which must exit with `code`."""
    begun = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=record.ROOT, check=False)
    seconds = time.perf_counter() - begun
    if ran.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")
    return seconds


def words(repeats: int) -> list[dict]:
    """Measure imports, help and errors, compared with `import jax` and `import numpy`."""
    run = ["--env", "gymnax:CartPole-v1", "--total-steps", "1000"]
    commands = {
        "import numpy": ([sys.executable, "-c", "import numpy"], 0, None),
        "import jax": ([sys.executable, "-c", "import jax"], 0, None),
        "import jaxrl": ([sys.executable, "-c", "import jaxrl"], 0, "import jax"),
        "import jax, jaxrl": ([sys.executable, "-c", "import jax, jaxrl"], 0, "import jax"),
        "jaxrl --help": ([*JAXRL, "--help"], 0, "import numpy"),
        "jaxrl train ppo --help": ([*JAXRL, "train", "ppo", "--help"], 0, "import numpy"),
        "jaxrl algos": ([*JAXRL, "algos"], 0, "import numpy"),
        "jaxrl envs": ([*JAXRL, "envs"], 0, "import numpy"),
        "a mistyped algorithm": ([*JAXRL, "train", "pppo", *run], 2, "import numpy"),
        "a mistyped flag": ([*JAXRL, "train", "ppo", *run, "--learnig-rate", "1"], 2, "import numpy"),
        "a mistyped environment": (
            [*JAXRL, "train", "ppo", "--env", "gymnax:CartPool-v1", "--total-steps", "1000"],
            2,
            "import numpy",
        ),
        "an environment without its suite": (
            [*JAXRL, "train", "ppo", "--env", "CartPole-v1", "--total-steps", "1000"],
            2,
            "import numpy",
        ),
    }
    asks = {
        name: lambda command=command, code=code: timed(command, code=code)
        for name, (command, code, _) in commands.items()
    }
    seconds = record.alternate(asks, repeats)
    rows = []
    for name, (_, _, against) in commands.items():
        ratio = None if against is None else seconds[name] / seconds[against]
        rows.append({"what": name, "seconds": seconds[name], "against": against, "ratio": ratio})
    print(record.table(rows), flush=True)
    return rows


def trained(task: str, repeats: int, peer: pathlib.Path | None) -> dict:
    """Measure whole training processes, alternating: cold, warm, and rejax."""
    seconds: dict[str, list[float]] = {"jaxrl, cold": [], "jaxrl, warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("cold", "warm"):
                command = [*JAXRL, "train", *TASKS[task][0].split(), "--run-dir", f"{folder}/{name}"]
                seconds[f"jaxrl, {name}"].append(timed(command, caches_in(folder)))
        if peer is not None:
            with tempfile.TemporaryDirectory() as folder:
                alone = caches_in(folder)
                for name in ("PYTHONPATH", "PYTHONHOME"):  # a peer must not see our packages
                    alone.pop(name, None)
                seconds.setdefault("rejax", []).append(timed([str(peer), str(HERE), "--rejax", task], alone))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row: dict = {"task": task, **{f"{name} (s)": value for name, value in medians.items()}}
    if peer is not None:
        row["cold / rejax"] = medians["jaxrl, cold"] / medians["rejax"]
        row["warm / rejax"] = medians["jaxrl, warm"] / medians["rejax"]
    print(record.table([row]), flush=True)
    return row


def caches_in(folder: str) -> dict[str, str]:
    """Return environment variables for a process with all caches in `folder`."""
    caches = ("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAXRL_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(caches)}
    return kept | {"XDG_CACHE_HOME": f"{folder}/cache"}


def rejax_run(task: str) -> None:
    """Runs in the peer's environment: ten evaluations, of 128 episodes each, as jaxrl's."""
    import jax
    import rejax

    _, name, settings = TASKS[task]
    every = settings["total_timesteps"] // 10
    algo = getattr(rejax, name).create(eval_freq=every, skip_initial_evaluation=True, **settings)
    _, evaluation = jax.block_until_ready(jax.jit(algo.train)(jax.random.PRNGKey(0)))
    print(jax.tree.map(lambda x: x.mean(axis=-1), evaluation))


# --- the parts of one process ------------------------------------------------------------------------------------


class Clock:
    """Seconds of the main thread by part; nested parts are excluded from the enclosing part."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._thread = threading.get_ident()
        self._ended: list[tuple[float, float]] = []  # intervals that are within no other so far

    def ended(self, part: str, seconds: float) -> None:
        """Record that a part took these seconds, up to now."""
        if threading.get_ident() != self._thread:
            return
        end = time.perf_counter()
        begun, within = end - seconds, 0.0
        while self._ended and self._ended[-1][0] >= begun:
            earlier = self._ended.pop()
            within += earlier[1] - earlier[0]
        self._ended.append((begun, end))
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, seconds - within)
        self.calls[part] = self.calls.get(part, 0) + 1

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.ended(part, time.perf_counter() - begun)

    def watch(self, owner: object, name: str, part: str) -> None:
        """Record every call of a function."""
        function = getattr(owner, name)

        def watched(*arguments, **named):
            with self.during(part):
                return function(*arguments, **named)

        setattr(owner, name, watched)


# JAX's own events, and the part that they are of.
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace and lower",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "trace and lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read compiled programs",
}


def watched_run(argv: list[str]) -> None:
    """Run one command line in this process, and print its parts."""
    import builtins

    clock = Clock()
    original = builtins.__import__

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        begun = time.perf_counter()
        try:
            return original(name, globals, locals, fromlist, level)
        finally:
            if (seconds := time.perf_counter() - begun) > 1e-3:
                clock.ended("import", seconds)

    builtins.__import__ = importing
    with clock.during("train, and all the rest"):
        from jaxrl.cli.main import main as command_line
        from jaxrl.run.directory import checkpoint
        from jaxrl.run.loop import run_loop

        def heard(event, seconds, **_):
            if event in EVENTS:
                clock.ended(EVENTS[event], seconds)

        import jax

        jax.monitoring.register_event_duration_secs_listener(heard)
        clock.watch(run_loop, "evaluate", "evaluate")
        clock.watch(checkpoint.Checkpointer, "save", "save")
        clock.watch(checkpoint.Checkpointer, "wait", "save")
        clock.watch(run_loop, "write_result", "result and picture")
        code = command_line(argv)
    print("@" + json.dumps({"code": code, "seconds": clock.seconds, "calls": clock.calls}))


def parts() -> list[dict]:
    """Measure the parts of a cold and a warm `jaxrl train ppo`."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            command = [sys.executable, str(HERE), "--watched", "train", *TASKS["ppo"][0].split()]
            begun = time.perf_counter()
            ran = subprocess.run(
                [*command, "--run-dir", f"{folder}/{name}"],
                capture_output=True,
                text=True,
                env=caches_in(folder),
                check=False,
            )
            whole = time.perf_counter() - begun
            lines = [line[1:] for line in ran.stdout.splitlines() if line.startswith("@")]
            if ran.returncode or not lines:
                raise SystemExit(f"the watched run failed:\n{ran.stdout}\n{ran.stderr}")
            told = json.loads(lines[-1])
            seconds = told["seconds"]
            rest = {"Python itself": whole - sum(seconds.values()), "whole process": whole}
            calls = told["calls"]
            compiled = calls.get("compile", 0) - calls.get("read compiled programs", 0)
            rows.append({"start": name, **seconds, **rest, "programs compiled": compiled})
            print("\n".join(f"{part:>26}  {_shown(value)}" for part, value in rows[-1].items()), flush=True)
    return rows


def _shown(value):
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if "--rejax" in sys.argv:
        rejax_run(sys.argv[-1])
    elif "--watched" in sys.argv:
        watched_run(sys.argv[sys.argv.index("--watched") + 1 :])
    else:
        main()
