"""Benchmarks on one GPU or the chips of a TPU host; also runs on a CPU, at a small size. Works offline.

    python benchmarks/accelerator.py [--only PART ...] [--small] [--seconds 470] [--compile-first N]
        [--rejax PATH] [--purejaxrl PATH] [--output FILE]

Each part can be run separately, takes at most `--seconds`, and updates its section of one record,
benchmarks/results/accelerator-<device>.json:

    throughput  environment steps per second of PPO (CartPole, MinAtar Breakout, brax ant), DQN and SAC, with up to
                65,536 environments; of sweeps of up to 256 runs; and of the environments without training
    replay      add 64, sample 256 and update 256 of a million transitions, compared with flashbax
    host        EnvPool on the host's cores: random actions, PPO, R2D2, IMPALA
    learning    runs with default settings that must reach a score, with their time
    equality    the same run twice, in one and in several processes, with and without XLA's deterministic operations
    determinism the same run in two processes, and killed and resumed, with and without --deterministic; its cost
    precision   matrix products in float32, TF32 and bfloat16: speed, and the difference after one iteration
    memory      peak memory of a program, predicted and as reported by the device
    peers       comparison with rejax and purejaxrl, alternating in one run

`--compile-first N` first compiles throughput and precision in N parallel processes, which fill JAX's compilation
cache. On a machine with idle cores, this takes a third of the time.

Speeds are medians after compilation and warm-up, measured to `block_until_ready`. Measurements that the device, the
installation or the time limit does not allow are recorded as rows with the reason. On a CPU, and with `--small`, all
sizes are tiny, the results do not indicate speed, and they are written to .cache/ instead.

rejax needs gymnax 0.0.9, but jaxrl needs 1.0.1: `--rejax` is a folder with both rejax and gymnax 0.0.9 (`pip install
--target`), which comes first on the path of a separate process, or the Python of an environment that has them.
`--purejaxrl` is a checkout of github.com/luchris429/purejaxrl, which runs in the same process.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

PARTS = ("throughput", "replay", "host", "learning", "equality", "determinism", "precision", "memory", "peers")
_FRESH = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # every process compiles and autotunes separately
_DETERMINISTIC = _FRESH | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the device, with processes that the measuring one starts
# The processes of a part, by name, with their environment variables; as many at small sizes.
PROCESSES: dict[str, dict[str, dict[str, str]]] = {
    "equality": {
        "as it is": _FRESH,
        "as it is, again": _FRESH,
        "deterministic": _DETERMINISTIC,
        "deterministic, again": _DETERMINISTIC,
        "on the CPU": _FRESH | {"JAX_PLATFORMS": "cpu"},
    },
    "determinism": {
        process: _FRESH | _SHARED
        for deterministic in ("as it is", "--deterministic")
        for process in (deterministic, f"{deterministic}, again")
    },
    # A process reports its peak memory since it started.
    "memory": {name: {} for name in ("PPO CartPole", "PPO MinAtar", "DQN MinAtar", "sweep of PPO CartPole")},
    "peers": {"in turn": _SHARED},
}
_IN_SMALL = {"equality": 2, "determinism": 4, "memory": 1}
_COMPILED_FIRST = ("throughput", "precision")


# Names the variable that tells a process which part of the tasks it compiles: "2/8" is every eighth from the third on.
_SHARE = "JAXRL_BENCHMARK_SHARE"


class Part:
    """One part while it runs; rows are saved as they arrive.

    Args:
      name: name of the part.
      asked: parsed command line.
    """

    def __init__(self, name: str, asked: argparse.Namespace):
        self.name, self._asked = name, asked
        self._machine: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._began = time.monotonic()

    @property
    def small(self) -> bool:
        return bool(self._machine.get("small", self._asked.small))

    def run(self) -> None:
        """Run all processes of the part, one after another."""
        processes = PROCESSES.get(self.name, {"": {}})
        with tempfile.TemporaryDirectory() as folder:
            if self.name in _COMPILED_FIRST and self._asked.compile_first > 1:
                self._compile(self._asked.compile_first, folder)
            for number, (process, environment) in enumerate(processes.items()):
                if self.small and number >= _IN_SMALL.get(self.name, 1):
                    self._add({"process": process, "left out": "not measured at small sizes"})
                else:
                    self._process(process, environment, folder)

    def _compile(self, count, folder):
        """Fill the compilation cache in `count` parallel processes; failures recur in the timed run."""
        children = [self._start("", _SHARED | {_SHARE: f"{i}/{count}"}, folder, self._left) for i in range(count)]
        timer = threading.Timer(self._left / 2, lambda: [_kill(child) for child in children])
        timer.start()
        try:
            for child in children:
                child.communicate()
        except BaseException:
            for child in children:
                _kill(child)
            raise
        finally:
            timer.cancel()
        print(f"{self.name}: compiled after {time.monotonic() - self._began:.0f} s", flush=True)

    @property
    def _left(self):
        """Return the seconds left for the part."""
        return self._began + self._asked.seconds - time.monotonic()

    def _start(self, process, environment, folder, left):
        here = pathlib.Path(__file__).parent
        command = [sys.executable, str(here / "_accelerator.py"), self.name, process, folder, str(left)]
        command += [self._asked.rejax or "", self._asked.purejaxrl or "", "small" if self._asked.small else ""]
        path = os.pathsep.join([str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(record.ROOT / ".cache" / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=cache | os.environ | {"PYTHONPATH": path} | environment,
            start_new_session=True,
        )

    def _process(self, process, environment, folder):
        left = self._left
        label = {"process": process} if process else {}
        if left <= 0:
            self._add(label | {"left out": self._over})
            return
        child = self._start(process, environment, folder, left)
        over = threading.Event()

        def stop():
            over.set()
            _kill(child)

        timer = threading.Timer(left, stop)
        timer.start()
        waiting: list[dict[str, Any]] | None = None
        try:
            for kind, message in _messages(child):
                if kind == "machine":
                    self._machine = message | {"command": record.command()}
                elif kind == "tasks":
                    waiting = message
                elif waiting:
                    self._add(label | waiting.pop(0) | message)
            child.wait()
        except BaseException:
            _kill(child)
            raise
        finally:
            timer.cancel()
        why = self._over if over.is_set() else f"the process ended with {child.returncode}"
        for about in waiting if waiting is not None else [{}]:
            self._add(label | about | {"left out": why})

    @property
    def _over(self):
        return f"the part's {self._asked.seconds:g} seconds were over"

    def _add(self, row):
        self._rows.append(row)
        print(f"{self.name}: " + ", ".join(f"{key}: {_text(value)}" for key, value in row.items()), flush=True)
        seconds = round(time.monotonic() - self._began, 1)
        part = {"machine": self._machine, "seconds": seconds, "small": self.small, "rows": self._rows}
        record.save_part(self.path, self.name, part)

    @property
    def path(self) -> pathlib.Path:
        """The path of the record."""
        if self._asked.output:
            return self._asked.output
        devices = self._machine.get("devices") or ["unknown device"]
        kind = re.sub(r"[^a-z0-9]+", "-", devices[0].lower()).strip("-")
        if self.small:
            return record.ROOT / ".cache" / f"accelerator-{kind}-small.json"
        return record.HERE / "results" / f"accelerator-{kind}.json"


def _kill(child):
    """Kill a process and its children, such as those of other libraries."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _messages(child) -> Iterator[tuple[str, Any]]:
    for line in child.stdout:
        if line.startswith("@"):
            yield tuple(json.loads(line[1:]))
        else:
            print(line, end="", file=sys.stderr)


def _text(value):
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--small", action="store_true", help="use tiny sizes; always on for CPUs")
    parser.add_argument("--seconds", type=float, default=470.0, help="time limit of each part, in seconds")
    parser.add_argument("--compile-first", type=int, default=1, metavar="N", help="parallel compilation processes")
    parser.add_argument("--rejax", help="package folder or Python interpreter with rejax and gymnax 0.0.9")
    parser.add_argument("--purejaxrl", help="checkout of purejaxrl")
    parser.add_argument("--output", type=pathlib.Path)
    asked = parser.parse_args()
    for name in asked.only:
        part = Part(name, asked)
        part.run()
        print(part.path, flush=True)


if __name__ == "__main__":
    main()
