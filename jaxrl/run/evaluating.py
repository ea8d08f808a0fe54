"""The evaluations of a run: compiled in the background, played, logged and saved with its checkpoints."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl.core.run_state import RunState
from jaxrl.core.types import ActorState, Algorithm, Environment
from jaxrl.parallel.mesh import local
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Program
from jaxrl.run.async_evaluation import Evaluator
from jaxrl.run.background import BackgroundTask
from jaxrl.run.evaluation import MAX_STEPS, Evaluation, compile_evaluation, evaluate
from jaxrl.run.journal import Journal
from jaxrl.run.policy import Policy
from jaxrl.run.result import policy_at
from jaxrl.run.saving import Saver
from jaxrl.run.schedule import Schedule
from jaxrl.run.settings import RunSettings
from jaxrl.run.signals import Signals
from jaxrl.run.videos import Videos


class Evaluations:
    """The evaluations of a run, and its videos.

    Args:
      settings: resolved settings of the run.
      program: the training program.
      algo, env: the algorithm and the evaluation environment, on the program's devices.
      schedule, saver, journal, signals: parts of the run.
      videos: the writer of videos, or None.
      max_steps: step limit of an episode.
    """

    def __init__(
        self,
        settings: RunSettings,
        program: Program,
        algo: Algorithm,
        env: Any,
        *,
        schedule: Schedule,
        saver: Saver,
        journal: Journal,
        signals: Signals,
        videos: Videos | None = None,
        max_steps: int = MAX_STEPS,
    ):
        self.evaluator = Evaluator(self._play, self._write, in_thread=settings.async_evaluation)
        self.save_at_rest: Callable[[], None] | None = None
        self._settings, self._layout, self._algo, self._env = settings, program.layout, algo, env
        self._schedule, self._saver, self._journal, self._laps = schedule, saver, journal, journal.laps
        self._signals, self._videos, self._max_steps = signals, videos, max_steps

    def compile(self, learner: Any) -> None:
        """Compile the first evaluation from the shapes of a learner state; may be called in another thread."""
        progress, sharding = self._layout.place(np.float32(0.0)), jax.tree.leaves(learner)[0].sharding
        policy_at.lower(self._algo, learner, progress).compile()
        algo, actor = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            policy_at.eval_shape(self._algo, learner, progress),
        )
        settings = self._settings
        seed, episodes, explore = settings.seed, settings.evaluation_episodes, settings.explore_in_evaluation
        compile_evaluation(algo, actor, self._env, self._layout.spec, seed=seed, episodes=episodes, explore=explore)

    @property
    def are_compiled_before(self) -> bool:
        """True if `compile` prepares the first evaluation."""
        return isinstance(self._env, Environment) and not self.evaluator.in_thread

    def begin(self, state: RunState, done: int, compiling: BackgroundTask | None = None, *, log: bool = True) -> None:
        """Evaluate the policy after `done` iterations, or begin to, if evaluations run in a thread.

        Args:
          state: state of the run after these iterations.
          done: number of iterations.
          compiling: a task to wait for first.
          log: log the outcome, unless the run has one at this step already.
        """
        self._laps.lap("other")
        step = done * self._schedule.rows
        self.save_at_rest = None
        if not (self.evaluator.in_thread or distributed.is_several()):
            self.save_at_rest = functools.partial(self._saver.save_at_rest, step, state)
        with self._signals.at_rest(self.save_at_rest):
            if compiling is not None:
                compiling.wait()
        self._laps.lap("compile")
        algo, actor = self._acting(state, done)
        if self._saver.checkpointer is not None and self.evaluator.in_thread:
            self._saver.checkpointer.awaiting = step
        self.evaluator.begin(step, algo, actor, list(self._layout.mesh.devices.flat), log=log)
        self._laps.lap("evaluate")

    def collect(self) -> None:
        """Wait for the evaluation that was begun in a thread, if there is one."""
        self.evaluator.collect()
        self._laps.lap("evaluate")

    def is_lacking(self, done: int) -> bool:
        """Return whether an evaluation was due after `done` iterations but was not logged; all processes agree."""
        schedule = self._schedule
        due = done <= schedule.iterations and schedule.evaluates(done)
        return distributed.from_leader("unevaluated", due and done * schedule.rows not in self.evaluator.scores)

    def film(self, state: RunState, done: int) -> None:
        """Write a video, in the first process."""
        algo, actor = self._acting(state, done)
        if self._videos is not None and self._saver.directory is not None:
            policy, step = Policy(algo, actor, self._layout.spec), done * self._schedule.rows
            video = self._videos.write(self._saver.directory.path, step, policy)
            if video is not None and video.suffix == ".gif":  # pages are for browsers
                self._journal.show_video(step, video)

    def _acting(self, state, done):
        """Return the algorithm and its actor state; every process plays by itself, on one of its devices."""
        progress = self._layout.place(np.float32(min(done / self._schedule.iterations, 1.0)))
        return policy_at(*local((self._algo, state.learner, progress)))

    def _play(self, algo: Algorithm, actor: ActorState) -> Evaluation:
        with self._signals.at_rest(self.save_at_rest):
            return evaluate(
                algo,
                actor,
                self._env,
                self._layout.spec,
                seed=self._settings.seed,
                episodes=self._settings.evaluation_episodes,
                max_steps=self._max_steps,
                explore=self._settings.explore_in_evaluation,
                step_timeout=self._settings.topology.step_timeout,
            )

    def _write(self, step: int, evaluation: Evaluation) -> None:
        if self._saver.checkpointer is not None and self.evaluator.in_thread:
            self._saver.checkpointer.score(step, evaluation.return_mean)
        metrics = {f"evaluation/{name}": value for name, value in evaluation.metrics().items()}
        self._journal.write(step, metrics)
        self._journal.advise(step, metrics)
