"""Evaluations of a run: compilation in the background, logging, and scores of checkpoints."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import numpy as np

from jaxrl.core import resources
from jaxrl.core.errors import JaxrlError
from jaxrl.core.run_state import RunState
from jaxrl.core.types import ActorState, Algorithm, Environment
from jaxrl.envs.host.watchdog import GOODBYE
from jaxrl.parallel.mesh import local
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Program
from jaxrl.run.loop.background import BackgroundTask
from jaxrl.run.loop.journal import Journal
from jaxrl.run.loop.saving import Saver
from jaxrl.run.loop.schedule import Schedule
from jaxrl.run.loop.signals import Signals
from jaxrl.run.policies.evaluation import MAX_STEPS, Evaluation, compile_evaluation, evaluate
from jaxrl.run.policies.policy import Policy
from jaxrl.run.result import policy_at
from jaxrl.run.settings import RunSettings


@dataclasses.dataclass(eq=False, repr=False)
class Evaluations:
    """The evaluations of a run, at most one of which runs at a time, and its videos.

    With `async_evaluation`, an evaluation runs in a thread while training continues, and its result is collected when
    the next one is due.

    Args:
      settings: resolved settings of the run.
      program: the training program.
      algo, env: the algorithm and the evaluation environment, on the program's devices.
      schedule, saver, journal, signals: the objects of the run with these names.
      background: running tasks by name; "evaluation" compiles the first evaluation.
      max_steps: step limit of an episode.

    Attributes:
      in_thread: whether evaluations run in a thread.
      latest: the newest evaluation of this session, or None.
      scores: the mean return of the evaluations of all sessions, by step; NaN if no episode ended.
    """

    settings: RunSettings
    program: Program
    algo: Algorithm
    env: Any
    schedule: Schedule
    saver: Saver
    journal: Journal
    signals: Signals
    background: dict[str, BackgroundTask]
    max_steps: int = MAX_STEPS

    def __post_init__(self):
        self.in_thread = self.settings.async_evaluation
        self.latest: Evaluation | None = None
        self.scores: dict[int, float] = {}
        self._step, self._log = 0, True
        self._task: BackgroundTask | None = None
        self._laps = self.journal.laps

    def compile(self, learner: Any) -> None:
        """Compile the first evaluation from the shapes of a learner state; may be called in another thread."""
        progress, sharding = self.program.layout.place(np.float32(0.0)), jax.tree.leaves(learner)[0].sharding
        policy_at.lower(self.algo, learner, progress).compile()
        algo, actor = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            policy_at.eval_shape(self.algo, learner, progress),
        )
        settings = self.settings
        seed, episodes, explore = settings.seed, settings.evaluation_episodes, settings.explore_in_evaluation
        compile_evaluation(
            algo, actor, self.env, self.program.layout.spec, seed=seed, episodes=episodes, explore=explore
        )

    @property
    def are_compiled_before(self) -> bool:
        """True if the first evaluation can be compiled in advance with `compile`."""
        return isinstance(self.env, Environment) and not self.in_thread

    def begin(self, state: RunState, done: int, *, log: bool = True) -> None:
        """Evaluate the policy after `done` iterations, or start its evaluation if evaluations run in a thread.

        The thread uses a device of this process that is not used for learning, if there is one.

        Args:
          state: state of the run after these iterations.
          done: number of iterations.
          log: whether to log the result; a result for the same step is logged only once.

        Raises:
          Exception: any error that the evaluation raised, unless it runs in a thread.
        """
        self._laps.lap("other")
        self._step, self._log, save = done * self.schedule.rows, log, None
        if not (self.in_thread or distributed.is_several()):
            save = functools.partial(self.saver.save_at_rest, self._step, state)
        with self.signals.at_rest(save):
            if (compiling := self.background.pop("evaluation", None)) is not None:
                compiling.wait()
            self._laps.lap("compile")
            acting = self._acting(state, done)
            outcome = None if self.in_thread else self._play(*acting)
        if outcome is not None:
            self._end(outcome)
        else:
            if self.saver.checkpointer is not None:
                self.saver.checkpointer.awaiting = self._step
            learning = list(self.program.layout.mesh.devices.flat)
            if spare := [device for device in jax.local_devices() if device not in learning]:
                acting = jax.device_put(acting, spare[-1])
            with resources.on("evaluator"):
                self._task = BackgroundTask(functools.partial(self._play, *acting), "evaluator")
        self._laps.lap("evaluate")

    def look(self) -> None:
        """Raise the error of the evaluation in a thread if it has failed, without waiting for it."""
        if self._task is not None and self._task.error is not None:
            self.collect()

    def collect(self) -> None:
        """Wait for the evaluation in a thread, if there is one, and log its result.

        Raises:
          Exception: any error that the evaluation raised.
        """
        task, self._task = self._task, None
        if task is not None:
            self._end(task.result())
        self._laps.lap("evaluate")

    def close(self) -> None:
        """Wait a few seconds for a running evaluation, and ignore its result; leave its thread running if it hangs."""
        if self._task is not None:
            self._task.wait(GOODBYE)

    def score_at(self, step: int) -> float | None:
        """Return the mean return that callbacks receive at `step`, or None.

        The evaluation is that of `step` itself or, if evaluations run in a thread, the previous one, so that a run that
        was killed and resumed ends at the same step as an uninterrupted one.
        """
        counts = [at for at in self.scores if (at < step if self.in_thread else at == step)]
        return self.scores[max(counts)] if counts else None

    def is_lacking(self, done: int) -> bool:
        """Return whether an evaluation was due after `done` iterations but is not logged, in the first process."""
        schedule = self.schedule
        due = done <= schedule.iterations and schedule.evaluates(done)
        return distributed.from_leader("unevaluated", due and done * schedule.rows not in self.scores)

    def film(self, state: RunState, done: int) -> None:
        """Write a video of the first evaluation episode, in the first process; a failure causes a warning."""
        if self.saver.directory is None:
            return
        from jaxrl.run.recording import rendering  # imported late, because most runs have no videos

        step, settings = done * self.schedule.rows, self.settings
        path = self.saver.directory.path / "videos" / f"{step:012d}{rendering.suffix_of(settings.eval_env)}"
        algo, actor = self._acting(state, done)
        policy, how = Policy(algo, actor, self.program.layout.spec), settings.explore_in_evaluation
        try:
            rendering.render(policy, settings.eval_env, path, seed=settings.seed, explore=how)
        except (OSError, JaxrlError) as error:
            warnings.warn(f"no video at step {step}: {error}", RuntimeWarning, stacklevel=2)
            return
        if path.suffix == ".gif":  # loggers do not accept HTML pages
            self.journal.show_video(step, path)

    def _acting(self, state, done):
        """Return the algorithm and its actor state on one device of this process."""
        progress = self.program.layout.place(np.float32(min(done / self.schedule.iterations, 1.0)))
        return policy_at(*local((self.algo, state.learner, progress)))

    def _play(self, algo: Algorithm, actor: ActorState) -> Evaluation:
        return evaluate(
            algo,
            actor,
            self.env,
            self.program.layout.spec,
            seed=self.settings.seed,
            episodes=self.settings.evaluation_episodes,
            max_steps=self.max_steps,
            explore=self.settings.explore_in_evaluation,
            step_timeout=self.settings.topology.step_timeout,
        )

    def _end(self, outcome: Evaluation) -> None:
        """Log the result of an evaluation, and set the score of its checkpoint."""
        self.latest, step = outcome, self._step
        if not self._log or step in self.scores:
            return
        self.scores[step] = outcome.return_mean
        if self.saver.checkpointer is not None and self.in_thread:
            self.saver.checkpointer.score(step, outcome.return_mean)
        metrics = {f"evaluation/{name}": value for name, value in outcome.metrics().items()}
        self.journal.write(step, metrics)
        self.journal.advise(step, metrics)
