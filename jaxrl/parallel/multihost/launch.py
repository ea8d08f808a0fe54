"""How a run is started: as this process, as several of this machine or of a Ray cluster, or as one of a cluster's.

Several processes are the same program, started once for each, which finds its place among them where it calls `launch`.
The process that starts them trains nothing and does not import JAX: it says which cores and GPUs each has, passes
signals on, and watches them to their end.
"""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.core import interrupts
from jaxrl.core.errors import ConfigError, JaxrlError, unknown
from jaxrl.parallel.multihost import local
from jaxrl.parallel.multihost.local import Started
from jaxrl.parallel.multihost.place import own_place
from jaxrl.parallel.multihost.ways import Cluster, Here, Launch, Processes, RayProcesses, Several

_LOOK = 0.05  # seconds between two looks at the processes
_GRACE_PERIOD = 10.0  # seconds that the others have to end by themselves, once one has failed
_LEAST = {"count": 1, "restarts": 0, "cpus": 1, "gpus": 0, "evaluators": 0}
_MOST_EVALUATORS = 1
_DIGITS = 9  # of a number of processes or restarts, at most
_LINES = 20  # of what a process said that are shown where it failed
_END_CODES = tuple(128 + number for number in interrupts.ENDING)
_BAD_INPUT = 2  # the exit code of a command line whose settings do not fit


_KINDS: dict[str, type[Launch]] = {"here": Here, "cluster": Cluster, "processes": Processes, "ray": RayProcesses}
_USAGE = "here, cluster, processes:COUNT or ray:COUNT, such as processes:4:restarts=3:evaluators=1 or ray:4:gpus=1"


def launch(how: Launch | str = "here") -> int:
    """Starts a run as `how` says; before anything else asks JAX for its devices.

    With `Processes` and `RayProcesses` this program is started again, once for each process, and this call does not
    return: it ends the program with their exit code. In each of them, and in all other cases, it returns.

    With `evaluators=1` one process more is started, which does not train. Its first `jaxrl.train` follows the run in
    `run_dir` instead, which all calls must then have. It evaluates every checkpoint that is kept there, as that call
    says (`evaluation_episodes`, `eval_env`, `explore_in_evaluation`), with other episodes than the run's own
    evaluations, and writes `evaluations.jsonl`. Once the run has ended and its last checkpoint is evaluated, it ends
    its process with exit code 0: what the program does after that call, this process does not.

    Args:
      how: "here", this process alone; "cluster", one of several processes that were detected; "processes:4", or
        `jaxrl.Processes(4)`: as many processes of this machine; "ray:4:gpus=1", or `jaxrl.RayProcesses(4, gpus=1)`: of
        a Ray cluster.

    Returns:
      How many processes train.

    Raises:
      ConfigError: there is no such way, this machine has less than it asks for, or it cannot be done from here.
    """
    how = parse(how) if isinstance(how, str) else how
    if not isinstance(how, Launch):
        raise ConfigError(f"launch({how!r:.80}): must be {_USAGE}")
    place = own_place()
    if place is None and isinstance(how, Here):
        return 1
    if place is None and isinstance(how, Several):
        typed = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        if typed or sys.argv[:1] in ([], [""], ["-"]):  # the last is a program that Python read from its input
            raise ConfigError(
                "launch starts this program once for each process, and cannot start an interactive session or what "
                "Python reads from its input: put it into a file, and run that"
            )
        raise SystemExit(run_processes([sys.executable, *sys.orig_argv[1:]], how))
    from jaxrl.parallel.multihost import distributed

    return distributed.initialize() if place is None else distributed.join(place)


def parse(text: str) -> Launch:
    """`here`, `cluster`, `processes:4`, `processes:4:restarts=3:evaluators=1` or `ray:4:restarts=3:cpus=8:gpus=1`.

    Raises:
      ConfigError: it is none of these.
    """
    kind, *words = text.split(":")
    if kind not in _KINDS:
        raise unknown("way to launch", kind, _KINDS, f"write {_USAGE}")
    fields = [field.name for field in dataclasses.fields(_KINDS[kind])]
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = (fields[position] if position < len(fields) else ""), word
        if name not in fields or name in values:
            raise ConfigError(f"{text!r} has too many settings, or one that there is not: {word!r}; write {_USAGE}")
        if not value.isascii() or not value.removeprefix("-").isdigit() or len(value) > _DIGITS:
            raise ConfigError(f"{text!r:.80}: {name}={value!r:.40} must be a whole number; write {_USAGE}")
        values[name] = int(value)
    return _KINDS[kind](**values)


def problems(how: Launch) -> list[str]:
    """What is wrong with the numbers of `how`, or more than this machine has; one line each."""
    if not isinstance(how, Several):
        return []
    found, kind = [], next(kind for kind, known in _KINDS.items() if isinstance(how, known))
    for field in dataclasses.fields(how):
        value, least = getattr(how, field.name), _LEAST[field.name]
        if type(value) is not int:
            found.append(f"{kind}: {field.name}={value!r:.80} must be a whole number")
        elif value < least:
            found.append(f"{kind}: {field.name}={value} must be at least {least}")
    if found:
        return found
    if how.evaluators > _MOST_EVALUATORS:
        found.append(
            f"{kind}: evaluators={how.evaluators} must be at most {_MOST_EVALUATORS}, since more would play the same; "
            "in another environment plays jaxrl eval RUN --follow --env NAME --out FILE"
        )
    if isinstance(how, RayProcesses):
        if importlib.util.find_spec("ray") is None:
            found.append("ray: Ray is not installed; pip install 'jaxrl[ray]'")
        # An evaluator was started with that variable.
        if own_place() is None and how.gpus and os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
            found.append(f"ray: gpus={how.gpus} would be idle with JAX_PLATFORMS=cpu; unset that, or leave gpus out")
        return found
    gpus = local.gpus_here() if own_place() is None else []  # a process that was started has its share of them alone
    if gpus and len(gpus) % how.count:
        found.append(
            f"processes: count={how.count} does not divide the {len(gpus)} GPUs of this machine "
            f"({','.join(gpus)}); use another number, fewer GPUs (CUDA_VISIBLE_DEVICES), or JAX_PLATFORMS=cpu"
        )
    return found


# --- the process that starts and watches -------------------------------------------------------------------------


def run_processes(command: Sequence[str], how: Several, again: Sequence[str] = ()) -> int:
    """Runs a command as the processes of one run, and waits for all to end.

    The output of process 0 is shown as it comes; of the others, the end of what they said where they failed.

    Args:
      command: the program and its arguments, the same for each.
      how: how many, where, and how often they are started again.
      again: further arguments where they are.

    Returns:
      0, or the exit code of the process that failed first; 128 + n if signal n ended it.

    Raises:
      ConfigError: there is less than `how` asks for.
    """
    if found := problems(how):
        raise ConfigError(found)
    if isinstance(how, RayProcesses):
        from jaxrl.parallel.ray.remote import connect

        connect()  # before the signals are ours: it takes SIGTERM for itself
    with _Signals() as signals:
        code = 0
        for attempt in range(how.restarts + 1):
            last = attempt == how.restarts
            try:
                with _started([*command, *again] if attempt else command, how, signals) as processes:
                    watched = _ProcessGroup(processes, how, signals)
                    code = watched.wait()
                    last = last or code in (0, _BAD_INPUT)
                    if code:
                        watched.tell()
            except JaxrlError as error:  # of a cluster that has lost machines, say
                if not attempt:
                    raise
                print(f"error: {error}", file=sys.stderr)
            if last or signals.passed:
                return code
            print(
                f"{_all(how)} started again (restart {attempt + 1} of {how.restarts})",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError("a loop that ends by returning")


def _all(how):
    if how.count == 1:
        return "the process and the evaluator are" if how.evaluators else "the process is"
    return f"the {how.count} processes{' and the evaluator' * how.evaluators} are"


@contextlib.contextmanager
def _started(command, how, signals):
    """The processes of one attempt, or as many as there were when a signal came; none is left after it."""
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
    """Passes signals on to the processes that run, while entered; those that were passed on."""

    def __init__(self):
        self.passed: list[int] = []
        self.processes: tuple[Started, ...] = ()
        self._receiving = interrupts.receiving(self._pass_on)

    def __enter__(self):
        self._receiving.__enter__()
        return self

    def _pass_on(self, number):
        self.passed.append(number)
        for process in self.processes:
            process.send_signal(number)  # nothing where it has ended

    def __exit__(self, *raised):
        return self._receiving.__exit__(*raised)


class _ProcessGroup:
    """The processes of one attempt."""

    def __init__(self, processes: Sequence[Started], how: Several, signals: _Signals):
        self._ended: list[tuple[int, int]] = []  # index and exit code, in the order of their ends
        self._killed: set[int] = set()
        self._processes, self._signals = processes, signals
        self._learners, self._count = how.count, how.count + how.evaluators
        self._evaluators_ending = False  # to end, because a learner failed
        self._cut_short = 0  # the exit code of an evaluator that was asked to end

    def wait(self) -> int:
        """Waits for all to end; the exit code of the run."""
        until, notified = None, False
        if self._signals.passed:  # while they were started
            for process in self._processes:
                process.send_signal(self._signals.passed[-1])
        while len(self._ended) < len(self._processes):
            self._look()
            if until is None and any(code for _, code in self._ended):
                until = time.monotonic() + _GRACE_PERIOD
                self._ask_others()
            if until is not None and time.monotonic() > until:
                self._kill()
            if not notified and sum(index < self._learners for index, _ in self._ended) == self._learners:
                notified = True
                for process in self._processes[self._learners :]:
                    process.notify_training_finished()
            time.sleep(_LOOK)
        if self._signals.passed and len(self._processes) < self._count:
            return 128 + self._signals.passed[0]
        return next((code for _, code in self._ended if code), self._cut_short)

    def tell(self) -> None:
        """Prints what the processes but the first said before they failed, and by which signals they were ended."""
        codes = dict(self._ended)
        for index, code in self._ended:
            if not code or index in self._killed or code in _END_CODES:
                continue
            if code > 128:
                name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
                print(f"error: {self._name(index)} was ended by {name}", file=sys.stderr)
            if index and not code == codes.get(0) == _BAD_INPUT:  # else the first has told the same
                for line in self._processes[index].stderr_tail().splitlines()[-_LINES:]:
                    print(f"{self._name(index)}: {line}", file=sys.stderr)
        if self._killed:
            which = ", ".join(map(self._name, sorted(self._killed)))
            print(f"{which}: ended, {_GRACE_PERIOD:g} s after the other had failed", file=sys.stderr)
        sys.stderr.flush()

    def _name(self, index):
        return f"process {index}" if index < self._learners else "the evaluator"

    def _look(self):
        known = {index for index, _ in self._ended}
        for index, process in enumerate(self._processes):
            if index not in known and (code := process.poll()) is not None:
                if index >= self._learners and (self._signals.passed or self._evaluators_ending):
                    # It has nothing to save, and ends at once; that is no failure, after which learners have no time.
                    self._cut_short, code = code, 0
                self._ended.append((index, code))

    def _ask_others(self):
        """Asks those to end that would not notice that one has failed: evaluators, and learners if it was one."""
        known = dict(self._ended)
        if any(code for index, code in known.items() if index < self._learners):
            self._evaluators_ending = True
            others = range(self._learners, len(self._processes))
        else:
            others = range(min(self._learners, len(self._processes)))
        for index in others:
            if index not in known:
                self._processes[index].send_signal(signal.SIGTERM)

    def _kill(self):
        known = {index for index, _ in self._ended}
        for index, process in enumerate(self._processes):
            if index not in known and process.poll() is None:
                self._killed.add(index)
                process.kill()
