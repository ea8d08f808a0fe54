"""Launching of a run in this process, in several processes on this machine or a Ray cluster, or in a compute cluster.

Several processes run the same program, which is started once per process. Each process reads its place in the run when
it calls `launch`. The process that starts the others does not train and does not import JAX: it assigns cores and GPUs,
passes signals on, and watches the processes until they end.
"""

import contextlib
import dataclasses
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxrl.core import interrupts
from jaxrl.core.errors import ConfigError, JaxrlError, unknown
from jaxrl.core.limits import count_problems
from jaxrl.parallel.multihost import local
from jaxrl.parallel.multihost.local import Started
from jaxrl.parallel.multihost.place import Cluster, Here, Launch, Processes, RayProcesses, Several, own_place

_LOOK = 0.05  # seconds between two polls of the processes
_GRACE_PERIOD = 10.0  # seconds for the others to end by themselves after one has failed
_LEAST = {"count": 1, "restarts": 0, "cpus": 1, "gpus": 0, "evaluators": 0}

_LINES = 20  # maximum number of lines to show of a failed process's output
_END_CODES = tuple(128 + number for number in interrupts.ENDING)
_BAD_INPUT = 2  # the exit code of a command line with invalid settings


_KINDS: dict[str, type[Launch]] = {"here": Here, "cluster": Cluster, "processes": Processes, "ray": RayProcesses}
_USAGE = "here, cluster, processes:COUNT or ray:COUNT, such as processes:4:restarts=3:evaluators=1 or ray:4:gpus=1"


def launch(how: Launch | str = "here") -> int:
    """Start a run as `how` describes; call this before JAX creates its devices.

    `Processes` and `RayProcesses` start this program again, once per process. In this process, the call does not
    return: this process waits for them and exits with their exit code. The call returns in the started processes, and
    in this process for other values of `how`.

    `evaluators=1` starts one more process, which does not train. In that process, the first call of `jaxrl.train`
    follows the training in `run_dir`, which must be set in the calls of all processes. It evaluates every checkpoint
    that is kept in that directory, with the call's settings (`evaluation_episodes`, `eval_env`,
    `explore_in_evaluation`) but in other episodes than the run's evaluations, and writes `evaluations.jsonl`. When
    the run has ended and its last checkpoint was evaluated, the process exits with code 0, so code after that call does
    not run in it.

    Args:
      how: "here": only this process; "cluster": one of several processes of a detected cluster; "processes:4" or
        `jaxrl.Processes(4)`: processes of this machine; "ray:4:gpus=1" or `jaxrl.RayProcesses(4, gpus=1)`: processes
        of a Ray cluster.

    Returns:
      The number of processes that train.

    Raises:
      ConfigError: `how` is unknown, needs more than this machine has, or is not possible in this program.
    """
    how = parse(how) if isinstance(how, str) else how
    if not isinstance(how, Launch):
        raise ConfigError(f"launch({how!r:.80}) is not supported; use {_USAGE}")
    place = own_place()
    if place is None and isinstance(how, Here):
        return 1
    if place is None and isinstance(how, Several):
        typed = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        if typed or sys.argv[:1] in ([], [""], ["-"]):  # "-": Python reads the program from standard input
            raise ConfigError(
                "launch starts this program once per process, which is not possible in an interactive session or for a "
                "program from standard input; run the program from a file"
            )
        raise SystemExit(run_processes([sys.executable, *sys.orig_argv[1:]], how))
    from jaxrl.parallel.multihost import distributed

    return distributed.initialize() if place is None else distributed.join(place)


def parse(text: str) -> Launch:
    """Parse a way to launch, such as `here`, `cluster`, `processes:4:restarts=3` or `ray:4:restarts=3:cpus=8:gpus=1`.

    Raises:
      ConfigError: the text is invalid.
    """
    kind, *words = text.split(":")
    if kind not in _KINDS:
        raise unknown("way to launch", kind, _KINDS, f"write {_USAGE}")
    fields = [field.name for field in dataclasses.fields(_KINDS[kind])]
    values: dict[str, int] = {}
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = (fields[position] if position < len(fields) else ""), word
        if name not in fields or name in values:
            raise ConfigError(f"{text!r} has too many settings, or an unknown one: {word!r}; write {_USAGE}")
        if not re.fullmatch(r"-?[0-9]{1,9}", value):
            raise ConfigError(f"{text!r:.80}: {name}={value!r:.40} must be a whole number; write {_USAGE}")
        values[name] = int(value)
    return _KINDS[kind](**values)


def problems(how: Launch) -> list[str]:
    """Return an error line for each number in `how` that is invalid or too large for this machine."""
    if not isinstance(how, Several):
        return []
    kind = next(kind for kind, known in _KINDS.items() if isinstance(how, known))
    counts = {field.name: (getattr(how, field.name), _LEAST[field.name]) for field in dataclasses.fields(how)}
    unset = [f"{name}=None must be a whole number" for name, (value, _) in counts.items() if value is None]
    if found := [f"{kind}: {line}" for line in unset + count_problems(**counts)]:
        return found
    if how.evaluators > 1:
        found.append(
            f"{kind}: evaluators={how.evaluators} must be 0 or 1, since more would play the same episodes; to evaluate "
            "in another environment, use jaxrl eval RUN --follow --env NAME --out FILE"
        )
    if isinstance(how, RayProcesses):
        # Started evaluators have JAX_PLATFORMS=cpu, so this is only checked in the process that starts them.
        if own_place() is None and how.gpus and os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
            found.append(f"ray: gpus={how.gpus} would be idle with JAX_PLATFORMS=cpu; unset it, or use gpus=0")
        return found
    gpus = local.gpus_here() if own_place() is None else []  # a started process only sees its own GPUs
    if gpus and len(gpus) % how.count:
        found.append(
            f"processes: the {len(gpus)} GPUs of this machine ({','.join(gpus)}) are not divisible by count="
            f"{how.count}; use another count, fewer GPUs (CUDA_VISIBLE_DEVICES), or JAX_PLATFORMS=cpu"
        )
    return found


# --- the process that starts and watches -------------------------------------------------------------------------


def run_processes(command: Sequence[str], how: Several, again: Sequence[str] = ()) -> int:
    """Run a command in each process of one run, and wait for all processes to end.

    The output of process 0 is shown immediately. If another process fails, the end of its output is shown.

    Args:
      command: the program and its arguments, the same for all processes.
      how: the number of processes, their machines, and the number of restarts.
      again: additional arguments after a restart.

    Returns:
      0, or the exit code of the process that failed first; 128 + n if signal n ended it.

    Raises:
      ConfigError: `how` is invalid, or needs more than is available.
      MissingExtraError: Ray is needed and not installed.
    """
    if found := problems(how):
        raise ConfigError(found)
    if isinstance(how, RayProcesses):
        from jaxrl.parallel.ray.cluster import connect

        connect()  # before our signal handlers, as Ray installs its own for SIGTERM
    signals = _Signals()
    with interrupts.receiving(signals.pass_on):
        code = attempt = 0
        while True:
            last = attempt == how.restarts
            try:
                with _started([*command, *again] if attempt else command, how, signals) as processes:
                    watched = _ProcessGroup(processes, how, signals)
                    code = watched.wait()
                    last = last or code in (0, _BAD_INPUT)
                    if code:
                        watched.tell()
            except JaxrlError as error:  # for example, the cluster has lost machines
                if not attempt:
                    raise
                print(f"error: {error}", file=sys.stderr)
            if last or signals.passed:
                return code
            attempt += 1
            print(f"starting all processes again (restart {attempt} of {how.restarts})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _started(command, how, signals):
    """Start the processes of one attempt, or fewer if a signal arrives; at the end, kill all that are still running."""
    with contextlib.ExitStack() as stack:
        if isinstance(how, Processes):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl-launch-")))
            coming = local.start(command, how, folder, stack)
        else:
            from jaxrl.parallel.ray import processes

            coming = processes.start(command, how, stack, lambda: bool(signals.passed))
        try:
            for process in coming:
                signals.processes = (*signals.processes, process)
                if signals.passed:
                    break
            yield signals.processes
        finally:
            for process in signals.processes:
                process.kill()
            signals.processes = ()


class _Signals:
    """The running processes, and the signals that were passed on to them."""

    def __init__(self):
        self.passed: list[int] = []
        self.processes: tuple[Started, ...] = ()

    def pass_on(self, number: int) -> None:
        self.passed.append(number)
        for process in self.processes:
            process.send_signal(number)


class _ProcessGroup:
    """The processes of one attempt."""

    def __init__(self, processes: Sequence[Started], how: Several, signals: _Signals):
        self._ended: dict[int, int] = {}  # exit codes by process index, in the order in which the processes ended
        self._killed: set[int] = set()
        self._processes, self._signals = processes, signals
        self._learners, self._count = how.count, how.count + how.evaluators
        self._evaluators_ending = False  # True after a learner failed
        self._cut_short = 0  # exit code of an evaluator that was asked to end

    def wait(self) -> int:
        """Wait until all processes have ended, and return the exit code of the run."""
        until, notified = None, False
        if self._signals.passed:  # a signal arrived while the processes were being started
            for process in self._processes:
                process.send_signal(self._signals.passed[-1])
        while len(self._ended) < len(self._processes):
            self._look()
            if until is None and any(self._ended.values()):
                until = time.monotonic() + _GRACE_PERIOD
                self._ask_others()
            if until is not None and time.monotonic() > until:
                self._kill()
            if not notified and sum(index < self._learners for index in self._ended) == self._learners:
                notified = True
                for process in self._processes[self._learners :]:
                    process.notify_training_finished()
            time.sleep(_LOOK)
        if self._signals.passed and len(self._processes) < self._count:
            return 128 + self._signals.passed[0]
        return next((code for code in self._ended.values() if code), self._cut_short)

    def tell(self) -> None:
        """Print the signals that ended processes, and the last output of failed processes other than process 0."""
        for index, code in self._ended.items():
            if not code or index in self._killed or code in _END_CODES:
                continue
            if code > 128:
                name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
                print(f"error: {self._name(index)} was ended by {name}", file=sys.stderr)
            if index and not code == self._ended.get(0) == _BAD_INPUT:  # otherwise process 0 has printed the same error
                for line in self._processes[index].stderr_tail().splitlines()[-_LINES:]:
                    print(f"{self._name(index)}: {line}", file=sys.stderr)
        if self._killed:
            which = ", ".join(map(self._name, sorted(self._killed)))
            print(f"{which}: killed {_GRACE_PERIOD:g} s after another process had failed", file=sys.stderr)
        sys.stderr.flush()

    def _name(self, index):
        return f"process {index}" if index < self._learners else "the evaluator"

    def _look(self):
        for index, process in enumerate(self._processes):
            if index not in self._ended and (code := process.poll()) is not None:
                if index >= self._learners and (self._signals.passed or self._evaluators_ending):
                    # An evaluator has nothing to save and ends at once. If that counted as a failure, the learners
                    # would have less time to end.
                    self._cut_short, code = code, 0
                self._ended[index] = code

    def _ask_others(self):
        """End the processes that do not notice the failure: evaluators, or the learners if an evaluator failed."""
        if any(code for index, code in self._ended.items() if index < self._learners):
            self._evaluators_ending = True
            others = range(self._learners, len(self._processes))
        else:
            others = range(min(self._learners, len(self._processes)))
        for index in others:
            if index not in self._ended:
                self._processes[index].send_signal(signal.SIGTERM)

    def _kill(self):
        for index, process in enumerate(self._processes):
            if index not in self._ended and process.poll() is None:
                self._killed.add(index)
                process.kill()
