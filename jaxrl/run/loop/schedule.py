"""Schedule of a run: the iterations after which the run evaluates, saves, logs and calls callbacks."""

import dataclasses

from jaxrl.parallel.program import Program
from jaxrl.run.loop.metric_rows import row_period
from jaxrl.run.policies.evaluation import MAX_STEPS
from jaxrl.run.settings import RunSettings


@dataclasses.dataclass(frozen=True)
class LoopLimits:
    """Limits of chunks and evaluations, which do not affect the compiled programs.

    Attributes:
      iterations: iterations per chunk; None: as many as take about a second.
      evaluation_steps: step limit of an evaluation's episodes.
    """

    iterations: int | None = None
    evaluation_steps: int = MAX_STEPS


NO_LIMITS = LoopLimits()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The periods of evaluations, checkpoints, metrics and callbacks in a run, in iterations.

    Attributes:
      rows: environment steps per iteration, over all environments.
      iterations: iterations of the run.
      evaluate_each, save_each: periods of evaluations and of checkpoints.
      log_each: period of rows of metrics; None: after every chunk.
      callback_each, video_each: periods of additional calls of the callbacks, and of videos; None: never.
    """

    rows: int
    iterations: int
    evaluate_each: int
    save_each: int
    log_each: int | None
    callback_each: int | None
    video_each: int | None

    @classmethod
    def of(cls, settings: RunSettings, program: Program, has_callbacks: bool) -> "Schedule":
        """Return the schedule for resolved settings, with all periods rounded to whole iterations of the program."""
        rows, total_steps = program.steps_per_iteration(settings.algo), settings.total_steps
        iterations = -(-total_steps // rows)

        def period(steps, default):
            steps = default if steps is None else steps
            return steps if steps is None else max(1, round(steps / rows)) if steps else iterations

        evaluate_each = period(settings.evaluate_every, total_steps // 10)
        return cls(
            rows,
            iterations,
            evaluate_each,
            save_each=period(settings.checkpoint_every, total_steps // 10),
            log_each=row_period(iterations, evaluate_each, period(settings.log_every, None)),
            callback_each=period(settings.callback_every, None) if has_callbacks else None,
            video_each=period(settings.video_every, None),
        )

    @property
    def total_steps(self) -> int:
        return self.iterations * self.rows

    def is_last(self, done: int) -> bool:
        """Return whether the run ends after `done` iterations."""
        return done >= self.iterations

    def evaluates(self, done: int) -> bool:
        """Return whether an evaluation is due after `done` iterations."""
        return self.is_last(done) or done % self.evaluate_each == 0

    def calls_back(self, done: int) -> bool:
        """Return whether an additional call of the callbacks is due after `done` iterations."""
        return self.callback_each is not None and done % self.callback_each == 0

    def films(self, done: int) -> bool:
        return self.video_each is not None and (self.is_last(done) or done % self.video_each == 0)

    def logs(self, done: int) -> bool:
        return self.log_each is None or done % self.log_each == 0

    def next_border(self, done: int) -> int:
        """Return the next number of iterations at which an evaluation, checkpoint, callback or video is due."""
        each_of = (self.evaluate_each, self.save_each, self.callback_each, self.video_each)
        following = [(done // each + 1) * each for each in each_of if each is not None]
        return min([*following, self.iterations])
