"""The place of a process among those of its run, if `jaxrl.launch` started it, and what it hears from who did.

This is read before JAX is imported.
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

VARIABLE = "JAXRL_LAUNCHED"  # of the environment, in which a process that was started finds its place


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among those of its run.

    Attributes:
      coordinator, num_processes, process_id: as `distributed.initialize` takes them; evaluators are not counted, and
        come after the processes that are.
      evaluators: how many the run has.
      start: random text that all processes of this start have in common.
    """

    coordinator: str
    num_processes: int
    process_id: int
    evaluators: int = 0
    start: str = ""

    @property
    def role(self) -> Literal["learner", "evaluator"]:
        return "learner" if self.process_id < self.num_processes else "evaluator"


_own: list[Place] = []  # once it was read
_learners_ended: list[float] = []  # when this process heard of it


def own_place() -> Place | None:
    """The place of this process among those that `run_processes` started; None if it did not start this one."""
    if not _own and (text := os.environ.pop(VARIABLE, None)) is not None:  # none of the processes that this one starts
        place = json.loads(text)
        pipe = place.pop("pipe")
        threading.Thread(target=_hear_parent, args=(pipe,), name="launched", daemon=True).start()
        _own.append(Place(**place))
        interrupts.unblock()
    return _own[0] if _own else None


def is_evaluator() -> bool:
    """Whether this process was started to evaluate what others train."""
    place = own_place()
    return place is not None and place.role == "evaluator"


def evaluator_problems(run_dir: Any) -> list[str]:
    """Why the evaluator that this run was started with, if it was, could not follow it; one line each.

    Args:
      run_dir: of the training.
    """
    place = own_place()
    if place is None or not place.evaluators or run_dir is not None:
        return []
    return ["no run_dir: the evaluator that this run was launched with plays the checkpoints there; pass run_dir="]


def check_no_evaluator(what: str) -> None:
    """Refuses, in all processes, what an evaluator could not follow, and would do once more.

    Args:
      what: is refused.

    Raises:
      ConfigError: this program was launched with an evaluator.
    """
    place = own_place()
    if place is not None and place.evaluators:
        raise ConfigError(f"{what} has nothing that an evaluator could follow; launch this program without evaluators")


def have_learners_ended(seconds: float = 0.0) -> bool:
    """Whether this is an evaluator whose learners have all ended, and well, so many seconds ago or more."""
    return bool(_learners_ended) and time.monotonic() - _learners_ended[0] >= seconds


def _hear_parent(pipe):
    """Hears that the learners have ended, and asks this process to end when the one that started it has.

    The first is what comes through the pipe; at the second the kernel closes it.
    """
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            _learners_ended.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
