"""The place of a process in a run started by `jaxrl.launch`, and notifications from its parent process.

The place is read before JAX is imported.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from typing import Any, Literal

from jaxrl.core import interrupts
from jaxrl.core.errors import ConfigError

VARIABLE = "JAXRL_LAUNCHED"  # the environment variable with the place of a started process


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in its run.

    Attributes:
      coordinator, num_processes, process_id: the arguments of `distributed.initialize`; evaluators are not counted, and
        their indices follow those of the learners.
      evaluators: number of evaluators of the run.
      start: random text that all processes of one start share.
    """

    coordinator: str
    num_processes: int
    process_id: int
    evaluators: int = 0
    start: str = ""

    @property
    def role(self) -> Literal["learner", "evaluator"]:
        return "learner" if self.process_id < self.num_processes else "evaluator"


_own: list[Place] = []  # empty before it was read
_learners_ended: list[float] = []  # times of notifications


def own_place() -> Place | None:
    """Return the place of this process, or None if `run_processes` did not start it."""
    if not _own and (text := os.environ.pop(VARIABLE, None)) is not None:  # removed, so that children do not inherit it
        place = json.loads(text)
        pipe = place.pop("pipe")
        threading.Thread(target=_hear_parent, args=(pipe,), name="launched", daemon=True).start()
        _own.append(Place(**place))
        interrupts.unblock()
    return _own[0] if _own else None


def is_evaluator() -> bool:
    """Return whether this process was started to evaluate the checkpoints of the learners."""
    place = own_place()
    return place is not None and place.role == "evaluator"


def evaluator_problems(run_dir: Any) -> list[str]:
    """Return the reasons why an evaluator launched with this run could not follow it, one line each.

    Args:
      run_dir: the run directory of the training.
    """
    place = own_place()
    if place is None or not place.evaluators or run_dir is not None:
        return []
    return ["run_dir=None: the evaluator launched with this run needs the checkpoints; pass run_dir="]


def check_no_evaluator(what: str) -> None:
    """Raise, in all processes, if there is an evaluator, which could not follow `what` and would repeat it.

    Args:
      what: the name of the operation.

    Raises:
      ConfigError: this program was launched with an evaluator.
    """
    place = own_place()
    if place is not None and place.evaluators:
        raise ConfigError(f"{what} does not support evaluators; launch this program with evaluators=0")


def have_learners_ended(seconds: float = 0.0) -> bool:
    """Return whether this is an evaluator, and all learners ended without error at least `seconds` ago."""
    return bool(_learners_ended) and time.monotonic() - _learners_ended[0] >= seconds


def _hear_parent(pipe):
    """Record the end of the learners, reported by a byte in the pipe, and exit by SIGTERM when the parent has ended.

    The kernel closes the pipe when the parent ends.
    """
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            _learners_ended.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
