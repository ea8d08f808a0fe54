"""The evaluations of a run: waited for, or run in a separate thread while training continues."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl.core import resources
from jaxrl.core.types import ActorState, Algorithm
from jaxrl.envs.host.watchdog import GOODBYE
from jaxrl.run.evaluation import Evaluation

SCORE = "evaluation/return_mean"


class Evaluator:
    """A runner of one evaluation at a time, which keeps the scores of all evaluations of the run.

    Args:
      play: run one evaluation.
      found: called with the step and the outcome of each, in the order in which they were begun.
      in_thread: run in a thread; then `begin` returns at once, and `found` is called by `collect`.
    """

    def __init__(
        self,
        play: Callable[[Algorithm, ActorState], Evaluation],
        found: Callable[[int, Evaluation], None],
        *,
        in_thread: bool = False,
    ):
        self.in_thread = in_thread
        self.latest: Evaluation | None = None
        self.scores: dict[int, float] = {}  # the mean return by step, NaN where no episode ended
        self._play, self._found = play, found
        self._thread: threading.Thread | None = None
        self._step, self._log = 0, True
        self._outcome: Evaluation | None = None
        self._error: BaseException | None = None

    def remember(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the scores from the metrics of the run so far."""
        self.scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}

    def begin(
        self, step: int, algo: Algorithm, actor: ActorState, learning: Sequence[jax.Device], *, log: bool = True
    ) -> None:
        """Run an evaluation with the actor, or start it in a thread.

        Args:
          step: the step that identifies it.
          algo, actor: on the learner's devices; a thread uses another device of this process, if it has one.
          learning: the learner devices.
          log: report the outcome to `found`, unless the run has a score at this step already.

        Raises:
          RuntimeError: the previous evaluation was not collected.
          Exception: the error of the evaluation, if it was waited for.
        """
        if self._thread is not None:
            raise RuntimeError(f"the evaluation of step {self._step} was not collected; call collect() first")
        self._step, self._log = step, log
        if not self.in_thread:
            self._end(self._play(algo, actor))
            return
        spare = [device for device in jax.local_devices() if device not in learning]
        if spare:
            algo, actor = jax.device_put((algo, actor), spare[-1])
        self._outcome = self._error = None
        work = functools.partial(self._run, algo, actor)
        self._thread = threading.Thread(target=work, name="evaluator", daemon=True)
        with resources.on("evaluator"):
            self._thread.start()

    def _run(self, algo, actor):
        try:
            self._outcome = self._play(algo, actor)
        except BaseException as error:  # raised by `collect`
            self._error = error

    def _end(self, outcome):
        self.latest = outcome
        if self._log and self._step not in self.scores:
            self.scores[self._step] = outcome.return_mean
            self._found(self._step, outcome)

    def look(self) -> None:
        """Raise the error of the evaluation in progress, if it failed; do not wait."""
        if self._error is not None:
            self.collect()

    def collect(self) -> None:
        """Wait for the evaluation that was begun, if there is one.

        Raises:
          Exception: the error of the evaluation.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._outcome is not None  # the thread has returned
        self._end(self._outcome)

    def score_at(self, step: int) -> float | None:
        """Return the mean return of the evaluation that counts at `step`, or None.

        It is the evaluation of `step` itself or, if evaluations run in a thread, the one before: a run that was killed
        and resumed then ends where an uninterrupted one does.
        """
        counts = [at for at in self.scores if (at < step if self.in_thread else at == step)]
        return self.scores[max(counts)] if counts else None

    def close(self) -> None:
        """Wait a few seconds for an evaluation that will not be collected; abandon a thread that hangs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(GOODBYE)
