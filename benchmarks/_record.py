"""Utilities shared by benchmarks: the machine, results as JSON, and other libraries in separate environments."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "brax", "numpy")


# Of a worker's environment: as `jaxrl.parallel.threads` starts JAX where products are small.
ONE_THREAD = {"PJRT_NPROC": "1"}


def machine() -> dict[str, Any]:
    """Return processor, devices, versions, commit and command."""
    import jax

    # A copy of the tree, which may be inside a repository at another commit, receives its own commit.
    if not (commit := os.environ.get("JAXRL_COMMIT")):
        changed = _git("status", "--porcelain", "jaxrl", "benchmarks", ":!benchmarks/results")  # records do not count
        commit = _git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    return {
        "command": command(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [device.device_kind for device in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES if _installed(name)},
    }


def _git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def command() -> str:
    """Return the command line, relative to the root of the project."""
    return " ".join(["python", *_script(), *sys.argv[1:]])


def _script():
    """Return the script or module that Python runs, relative to the root of the project."""
    script = pathlib.Path(sys.argv[0]).resolve()
    return ["-m", "pytest"] if "pytest" in script.parts or script.name == "pytest" else [os.path.relpath(script, ROOT)]


def _installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kept_path(name: str) -> pathlib.Path:
    """Return the path for resumable runs, separate for each commit, since records name their commit."""
    return ROOT / ".cache" / "learning" / _git("rev-parse", "--short", "HEAD") / name


def kept_folder(name: str) -> pathlib.Path:
    """Return the folder `kept_path(name)`, created if missing and cleared if there are uncommitted changes."""
    folder = kept_path(name)
    if _git("status", "--porcelain", "jaxrl"):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(name: str, rows: list[dict[str, Any]], folder: pathlib.Path | None = None, **extra: Any) -> pathlib.Path:
    """Write `<name>.json` to `benchmarks/results` or another folder; on an accelerator, the name includes it."""
    import jax

    suffix = "" if jax.default_backend() == "cpu" else f"-{jax.default_backend()}"
    path = (folder or HERE / "results") / f"{name}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **extra, "rows": rows}, indent=2) + "\n")
    return path


def save_part(path: pathlib.Path, name: str, part: Mapping[str, Any]) -> None:
    """Update one part of a record atomically; the other parts stay unchanged."""
    held = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    held["parts"][name] = part
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(held, indent=2) + "\n")
    beside.replace(path)


def resolved(algo: Any, env: Any, num_envs: int) -> Any:
    """Return `algo` with unset fields resolved for the environment, as in `jaxrl.train`."""
    from jaxrl.core.types import env_spec

    return algo.resolve(env_spec(env), num_envs)


def one_thread_suffices(algo: Any, env: Any, num_envs: int) -> bool:
    """Return whether `jaxrl train` would use only one thread of a multi-core CPU."""
    import jaxrl
    from jaxrl.parallel.threads import one_is_faster

    return one_is_faster(algo, env, jaxrl.Anakin(num_envs, devices=1))


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--distributed` and its related flags, as in `jaxrl train`."""
    from jaxrl.cli import multihost, table

    for flag in table.command_flags("train"):
        if flag.name not in multihost.FLAGS:
            continue
        name = "--" + flag.name.replace("_", "-")
        if flag.value is False:
            parser.add_argument(name, action="store_true", help=flag.help)
        else:
            kind = int if flag.kind.name == "int" else str
            parser.add_argument(name, type=kind, default=flag.value, help=flag.help)


def join_processes(arguments: argparse.Namespace) -> bool:
    """Join the other processes if `--distributed` is set; return whether it is. Exit if joining fails."""
    from jaxrl.cli import multihost
    from jaxrl.core.errors import JaxrlError

    asked = vars(arguments)
    try:
        if problems := multihost.problems(asked):
            raise SystemExit("\n".join(f"error: {problem}" for problem in problems))
        multihost.join(asked)
    except JaxrlError as error:
        raise SystemExit(f"error: {error}") from error
    return arguments.distributed


def in_processes(
    name: str, tasks: Iterable[tuple[dict[str, Any], str, int, Callable[[], float]]], repeats: int
) -> None:
    """Measure runs over the devices of all processes; the first one writes `<name>-<N>-processes.json`.

    Args:
      name: name of the benchmark.
      tasks: for each, its row so far, the unit ("steps"), the number of units per run, and the run, which returns its
        seconds. All processes must have the same tasks.
      repeats: repeats of every run.
    """
    import jax

    processes, leader, rows = jax.process_count(), jax.process_index() == 0, []
    for row, unit, count, run in tasks:
        rate = {f"jaxrl ({unit}/s)": count / alternate({"jaxrl": run}, repeats)["jaxrl"]}
        rows.append(row | {"processes": processes, "devices": jax.device_count()} | rate)
        if leader:
            print(table(rows[-1:]), flush=True)
    if leader:
        print(save(f"{name}-{processes}-processes", rows, repeats=repeats))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows with the same keys as a text table."""
    names = list(rows[0])
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _text(value):
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def peer_python(name: str, requirements: Sequence[str]) -> pathlib.Path:
    """Return the Python of an environment for another library, created on first use under `.cache/peers`."""
    folder = ROOT / ".cache" / "peers" / name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {', '.join(requirements)} into {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
    stamp.write_text(wanted)
    return python


class Worker:
    """A process that holds compiled programs and runs them on request: one line of JSON in, one out.

    Args:
      python: interpreter of the process.
      script: script to run; it reads requests with `serve`.
      more: additional environment variables.
    """

    def __init__(self, python: pathlib.Path | str, script: pathlib.Path, more: Mapping[str, str] | None = None):
        # The two environments must not share packages.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment |= more or {}
        self._process = subprocess.Popen(
            [str(python), str(script), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> Any:
        """Send one request and return the answer.

        Raises:
          RuntimeError: the process ended.
        """
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"the worker ended with {self._process.wait()} at {request}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def kill(self) -> None:
        """Kill the process, even while it answers or is stopped."""
        self._process.kill()
        self._process.wait()


def serve(answer: Any) -> None:
    """Answer each request from standard input with `answer(**request)`, until it is closed."""
    for line in sys.stdin:
        print("@" + json.dumps(answer(**json.loads(line))), flush=True)


def alternate(asks: dict[str, Any], repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of each callable, alternating `repeats` times after one warm-up each."""
    for ask in asks.values():
        ask()
    seconds: dict[str, list[float]] = {name: [] for name in asks}
    for _ in range(repeats):
        for name, ask in asks.items():
            seconds[name].append(ask())
    return {name: statistics.median(values) for name, values in seconds.items()}
