"""The evaluations of a run: waited for, or played in a thread of their own while the run goes on."""

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
    """Plays one evaluation at a time, and knows what all of the run have found.

    Args:
      play: one evaluation.
      found: is told the step and the outcome of each, in the order in which they were begun.
      in_thread: play in a thread; then `begin` returns at once, and `found` is called by `collect`.
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
        """Takes the scores from the metrics of the run so far."""
        self.scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}

    def begin(
        self, step: int, algo: Algorithm, actor: ActorState, learning: Sequence[jax.Device], *, log: bool = True
    ) -> None:
        """Plays with the actor, or begins to.

        Args:
          step: what it goes by.
          algo, actor: where they are learned; in a thread they play on another device of this process, if it has one.
          learning: the devices that learn.
          log: report the outcome to `found`, unless the run has a score at this step already.

        Raises:
          RuntimeError: the one before it was not collected.
          Exception: what it raised, if it was waited for.
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
        except BaseException as error:  # whoever collects it raises it
            self._error = error

    def _end(self, outcome):
        self.latest = outcome
        if self._log and self._step not in self.scores:
            self.scores[self._step] = outcome.return_mean
            self._found(self._step, outcome)

    def look(self) -> None:
        """Raises what the evaluation under way has raised; does not wait."""
        if self._error is not None:
            self.collect()

    def collect(self) -> None:
        """Waits for the evaluation that was begun, if there is one.

        Raises:
          Exception: what it raised.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._outcome is not None  # it returned
        self._end(self._outcome)

    def score_at(self, step: int) -> float | None:
        """The mean return of the evaluation that counts at `step`, now or when the run first came there.

        It is that of `step` itself, or the one before where they are played in a thread: so a run that was killed
        and goes on ends where the unbroken one does.
        """
        counts = [at for at in self.scores if (at < step if self.in_thread else at == step)]
        return self.scores[max(counts)] if counts else None

    def close(self) -> None:
        """Waits a few seconds for what nobody will collect; a thread that hangs is left behind."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(GOODBYE)
