"""The loop of a run, one for every algorithm in every topology.

It runs compiled chunks of about a second. Between chunks live the progress display, logging, evaluation,
checkpoints, signals, and the stop at NaN; a chunk is dispatched before the report of the one before it is read.

With several processes each runs this loop, and whatever it depends on is agreed on
(`jaxrl.parallel.multihost.distributed`). The first one alone writes files and shows progress.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxrl.buffers.fixed import Rings
from jaxrl.core import interrupts
from jaxrl.core.errors import CheckpointError, RunStoppedWarning
from jaxrl.core.recorded import Fetch
from jaxrl.core.report import Report, lasting
from jaxrl.core.run_state import RunState
from jaxrl.core.sources import Episodes, Rollouts
from jaxrl.core.spaces import Box, leaves
from jaxrl.core.types import Environment
from jaxrl.parallel.mesh import local
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Program
from jaxrl.run import advice, compile_cache
from jaxrl.run.async_evaluation import Evaluator
from jaxrl.run.background import BackgroundTask, import_later_modules
from jaxrl.run.callbacks import TARGET_RETURN, Callbacks, Decision, Moment, StopAtReturn, as_callbacks
from jaxrl.run.checkpoint import Checkpointer, read_manifest
from jaxrl.run.directory import RunDirectory
from jaxrl.run.evaluation import MAX_STEPS, compile_evaluation, evaluate
from jaxrl.run.init_from import Initial
from jaxrl.run.loggers import Logger, Loggers, read_metrics
from jaxrl.run.policy import Policy
from jaxrl.run.progress import ProgressBar
from jaxrl.run.recorder import Recorder
from jaxrl.run.result import Result, metrics_files, policy_at, write_result
from jaxrl.run.rows import TrainingRows, row_period
from jaxrl.run.settings import RunSettings
from jaxrl.run.signals import Signals
from jaxrl.run.timing import Completions, Laps
from jaxrl.run.videos import Videos

_CHUNK_SECONDS = 1.0
_LEAVES_NAMED, _NAMED_IN_SHORT = 8, 1  # of those that are not finite, in the result and in the warning


class _Stop(Exception):
    """Ends the loop; `reason` is the result's `stopped`, `summary` the problem in a few words."""

    def __init__(self, reason: str, problem: str | None = None, summary: str | None = None):
        super().__init__(reason)
        self.reason, self.problem, self.summary = reason, problem, summary


@dataclasses.dataclass(frozen=True)
class LoopLimits:
    """Limits on how far a run goes at once; nothing that is compiled depends on it.

    Attributes:
      iterations: of a chunk; None: as many as take about a second.
      evaluation_steps: of an episode of an evaluation, at most.
    """

    iterations: int | None = None
    evaluation_steps: int = MAX_STEPS


NO_LIMITS = LoopLimits()


@dataclasses.dataclass
class _Chunk:
    """A chunk that was dispatched and whose report was not read yet."""

    before: RunState  # without buffers, which are donated
    after: RunState  # likewise
    report: Report
    first: int
    length: int
    ended: Future[float]  # when its report is there, by the clock of the laps
    fetch: Fetch | None  # of its rows, if they are recorded


class Loop:
    """One call of `train`: what is fixed, and the loop."""

    def __init__(
        self,
        settings: RunSettings,
        program: Program,
        *,
        config: Mapping[str, Any],
        limits: LoopLimits = NO_LIMITS,
        dataset: Rings | None = None,
        recorder: Recorder | None = None,
        initial: Initial | None = None,
        videos: Videos | None = None,
    ):
        self.settings, self.config, self.limits = settings, config, limits
        self.recorder, self.initial, self.videos, self.dataset = recorder, initial, videos, dataset
        self.algo, self.env, self.program, self.eval_env = settings.algo, settings.env, program, settings.eval_env
        self.evaluator = Evaluator(self._play, self._evaluated, in_thread=settings.async_evaluation)
        self.rows, total_steps = program.steps_per_iteration(self.algo), settings.total_steps
        self.iterations = -(-total_steps // self.rows)
        self.total_steps_per_env = self.iterations * self.rows // program.layout.num_envs
        a_tenth = total_steps // 10
        self.evaluate_each = self._iterations(a_tenth if settings.evaluate_every is None else settings.evaluate_every)
        self.save_each = self._iterations(a_tenth if settings.checkpoint_every is None else settings.checkpoint_every)
        log_each = None if settings.log_every is None else self._iterations(settings.log_every)
        self.log_each = row_period(self.iterations, self.evaluate_each, log_each)
        self.training_rows = TrainingRows(self.rows, program.layout.samples_per_update(self.algo))
        stops = [] if settings.target_return is None else [StopAtReturn(settings.target_return)]
        self.callbacks = Callbacks([*stops, *as_callbacks(settings.callbacks)])
        each = settings.callback_every if self.callbacks else None
        self.callback_each = None if each is None else self._iterations(each)
        self.video_each = None if videos is None else self._iterations(videos.every)
        self.newest: dict[str, float] = {}  # the last value of every metric
        self.history: list[dict[str, float]] = []
        self.advised: set[str] = set()
        self.seconds_per_iteration = 0.0
        self.timed_iterations, self.timed_seconds = 0, 0.0  # without compiling, evaluating and saving
        self.untimed_iterations = 0  # those of the first chunk
        self.laps, self.earlier_seconds, self.first_step = Laps(), 0.0, 0
        self.programs = compile_cache.programs()  # compiled and loaded before the run
        self.signals, self.save_at_rest = Signals(self._say_when_it_stops), None
        self.background: dict[str, BackgroundTask] = {}  # threads that make ready what comes later, by what it is

    def _iterations(self, steps):
        return self.iterations if steps == 0 else max(1, round(steps / self.rows))

    def train(
        self,
        loggers: Sequence[Logger],
        display: ProgressBar | None,
        directory: RunDirectory | None,
        checkpointer: Checkpointer | None,
    ) -> Result:
        """The loop, from the newest checkpoint if there is one."""
        if display is not None:
            display.start(self.iterations * self.rows, timed=True, phase="compiling")
        self.completions = Completions(self.laps.clock)
        try:
            return self._train(loggers, display, directory, checkpointer)
        except KeyboardInterrupt:
            self.background.clear()  # what compiles there is nobody's any more, and not waited for
            raise
        finally:
            self.completions.close()
            if self.signals.asked is not None and interrupts.owned():  # the process leaves them behind
                self.background.clear()
            for under_way in self.background.values():
                under_way.wait()

    def _say_when_it_stops(self):
        """At the first Ctrl-C."""
        kept = "" if self.directory is None else ", and is saved"
        self._note(f"the run stops when the chunk under way has ended{kept}; Ctrl-C again leaves at once")

    def _seconds(self):
        """Of the run so far, in all sessions."""
        return self.earlier_seconds + self.laps.wall

    def _train(self, loggers, display, directory, checkpointer):
        self.display, self.checkpointer, self.directory = display, checkpointer, directory
        self._place()
        if directory is not None:
            self.background["imports"] = BackgroundTask(import_later_modules)
        saved = checkpointer is not None and self.settings.save_replay
        beginning = self.algo_there, self.env_there, self.settings.seed
        if checkpointer is not None and distributed.from_leader("is there a run", not checkpointer.is_empty()):
            # Of a run that goes on only the shapes are made: its replays and those restored might not both fit.
            state, done, kept = self._resume(
                checkpointer, self.program.template(*beginning, saved=saved, dataset=self.dataset)
            )
        else:
            self._compile_in_background(beginning, saved)
            state, done = self.program.start(*beginning, saved=saved, dataset=self.dataset), 0
            if self.initial is not None:
                state = state.replace(learner=self.initial.into(state.learner, self.program.layout.place))
            kept = {}
        if self.recorder is not None:
            self.recorder.begin(done * self.rows)
        files = [] if directory is None else self._open_files(directory, done)
        self.files, self.loggers = files, Loggers([*files, *loggers])
        if display is not None and done:
            display.resume(done * self.rows)
        self.first_step = done * self.rows
        self.laps.lap("restore" if done else "compile")
        stop = _Stop("finished")
        self.state, self.done = state, done
        del state
        try:
            with self.signals as signals:
                try:
                    if done:
                        self._go_on(done, kept)
                    self._loop(signals)
                except _Stop as ended:
                    stop = ended
                result = self._finish(self.state, self.done, stop)
                if signals.exit_code is not None:
                    raise SystemExit(signals.exit_code)
                return result
        finally:
            self.evaluator.close()
            self.loggers.close()
            if display is not None:
                display.close()

    def _place(self):
        """Puts the numbers of algorithm and environment where the program runs, once, so that no chunk moves them."""
        self.algo_there, self.env_there = self.program.layout.place(self.algo), self.env
        if isinstance(self.env, Environment):
            self.env_there = self.program.layout.place(self.env)
        same = self.eval_env is self.env
        if not same and isinstance(self.eval_env, Environment):
            self.eval_env = self.program.layout.place(self.eval_env)
        elif same:
            self.eval_env = self.env_there
        self.eval_env = local(self.eval_env)

    def _compile_in_background(self, beginning, saved):
        """Begins to compile chunks and evaluations, from shapes alone, before the state is there."""
        program, env = self.program, self.eval_env
        if not program.is_compiled or distributed.is_several():
            return
        shapes = program.template(*beginning, saved=saved, dataset=self.dataset)
        if self.recorder is None:
            arguments = self.algo_there, self.env_there, shapes, self.dataset
            self.background["chunk"] = BackgroundTask(lambda: program.compile_chunk(*arguments))
        if isinstance(env, Environment) and not self.evaluator.in_thread:
            self.background["evaluation"] = BackgroundTask(lambda: self._compile_evaluation(shapes.learner, env))

    def _compile_evaluation(self, learner, env):
        progress, sharding = self.program.layout.place(np.float32(0.0)), jax.tree.leaves(learner)[0].sharding
        policy_at.lower(self.algo_there, learner, progress).compile()
        algo, actor = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            policy_at.eval_shape(self.algo_there, learner, progress),
        )
        settings = {"seed": self.settings.seed, "episodes": self.settings.evaluation_episodes}
        explore = self.settings.explore_in_evaluation
        compile_evaluation(algo, actor, env, self.program.layout.spec, **settings, explore=explore)

    def _wait_for(self, what):
        """Waits for a background task, if there is one."""
        if (under_way := self.background.pop(what, None)) is not None:
            under_way.wait()

    # --- the loop ----------------------------------------------------------------------------------------------

    def _loop(self, signals):
        """Runs to the end; `self.state` and `self.done` are where all that came before was last known finite.

        Raises:
          _Stop: the run ends before its time.
        """
        state, done, pending, length = self.state, self.done, None, 1
        while done < self.iterations:
            border = self._next_border(done)
            length = min(self._chunk_length(length), border - done)
            if self.log_each is not None:
                length = min(length, self.log_each - done % self.log_each)
            before = state.replace(buffers={})
            state, report, fetch = self._dispatch(state, length)
            if self.limits.iterations is None:  # else nothing of the run is for keeps
                signals.hold()  # compiled, and so much is learned
            ended = self.completions.of(functools.partial(jax.block_until_ready, report))
            chunk = _Chunk(before, state.replace(buffers={}), report, done, length, ended, fetch)
            done += length
            if pending is not None:
                self._read(pending, last=False)
            pending = chunk
            self.seconds_per_iteration = signals.agree(with_leader=self.seconds_per_iteration)
            if done == border or signals.agreed is not None:
                self._read(pending, last=True)
                pending = None
                self.state, self.done = state, done
                self._at_border(state, done)

    def _dispatch(self, state, length):
        """The state and the report of a chunk, and what fetches its rows if they are recorded."""
        arguments = self.algo_there, self.env_there, state, length, self.total_steps_per_env, self.dataset
        self._wait_for("chunk")  # the time until the first chunk was read is that of compiling
        if self.recorder is None:
            return *self.program.chunk(*arguments), None
        return self.program.recorded_chunk(*arguments, recorded=self.recorder.recorded)

    def _next_border(self, done):
        each_of = (self.evaluate_each, self.save_each, self.callback_each, self.video_each)
        following = [(done // each + 1) * each for each in each_of if each is not None]
        return min([*following, self.iterations])

    def _chunk_length(self, last):
        if self.limits.iterations is not None:
            most = self.limits.iterations
            return most if self.recorder is None else min(most, self.recorder.recorded.iterations)
        if not self.seconds_per_iteration:
            return 1
        wanted = int(_CHUNK_SECONDS / self.seconds_per_iteration)
        most = last * 8 if self.recorder is None else min(last * 8, self.recorder.recorded.iterations)
        return max(1, min(wanted, most))

    def _read(self, chunk, *, last):
        """Wait for a chunk, and write down what happened since the last row if one is due.

        Args:
          chunk: the oldest that was not read.
          last: none is under way after it, so that a row is due.

        Raises:
          _Stop: something was not finite; the state before the chunk is the last good one.
          Exception: what an evaluation in a thread raised.
        """
        self.evaluator.look()
        report = jax.device_get(chunk.report)
        compiled = self.untimed_iterations > 0
        ended = chunk.ended.result()
        seconds = self.laps.lap("train" if compiled else "compile", until=ended)
        if compiled:
            self.seconds_per_iteration = seconds / chunk.length
            self.timed_iterations += chunk.length
            self.timed_seconds += seconds
        else:
            self.untimed_iterations = chunk.length
        done = chunk.first + chunk.length
        step = done * self.rows
        if int(report.failed_at) >= 0:
            # Replays were donated and may hold what was not finite: the state before the chunk has new ones.
            self.state = self.program.reset_buffers(self.algo_there, self.env_there, chunk.before, self.dataset)
            self.done = chunk.first
            failed_step = (chunk.first + int(report.failed_at) + 1) * self.rows
            raise _Stop("non_finite", *_problem(report, chunk, step, failed_step))
        if chunk.fetch is not None and self.recorder is not None:
            self.recorder.add(chunk.fetch)
        self._check_directory(chunk)
        self.training_rows.add(report, chunk.length, seconds if compiled else None)
        if not (last or self.log_each is None or done % self.log_each == 0):
            if self.display is not None:
                self.display.update(step, self.training_rows.speed())
            return
        row = {"step": step, "seconds": self.earlier_seconds + ended - self.laps.began} | self.training_rows.row()
        self._write(row)
        if 2 * done >= self.iterations:  # before, metrics are of what has not learned yet
            self._advise(row)

    def _mean_seconds(self):
        """Of an iteration, without compiling, evaluating and saving."""
        return self.timed_seconds / max(self.timed_iterations, 1)

    def _speed(self):
        """Steps a second of the loop alone; of a run of one chunk, which compiled too, 0."""
        return self.timed_iterations * self.rows / max(self.timed_seconds, 1e-9)

    def _advise(self, row):
        """Warn, once in a run, of what metrics say is wrong with the settings."""
        for name, text in advice.of(row).items():
            if name not in self.advised and distributed.is_leader():
                warnings.warn(f"at step {row['step']}: {text}", RuntimeWarning, stacklevel=6)
            self.advised.add(name)

    def _advise_at_end(self):
        """Warn of a run that has not learned."""
        actions, sources = self.program.layout.spec.action_space, self.algo.experience.values()
        text = advice.at_end(
            self.history,
            on_policy=all(isinstance(source, Rollouts | Episodes) for source in sources),
            discrete=not any(isinstance(part, Box) for part in leaves(actions)),
            from_scratch="parent" not in self.config,
            same_env=self.callbacks.keep()["env"] is None,
        )
        if text is not None and distributed.is_leader():
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _write(self, row):
        self.history.append(row)
        metrics = {name: value for name, value in row.items() if name != "step"}
        self.newest |= metrics
        self.loggers.write(int(row["step"]), metrics)
        if self.display is not None:
            # Of an evaluation in a thread the step is an earlier one.
            self.display.update(max(int(row["step"]), self.display.step), metrics)

    def _check_directory(self, chunk=None):
        """Whether the run directory is still there.

        Args:
          chunk: what was read last; None: `self.state` is where the run stands.

        Raises:
          _Stop: it is not; the result is what was learned so far.
        """
        if self.directory is None:
            return
        try:
            self.directory.check()
        except CheckpointError as error:
            if chunk is not None:
                # The replays are in the hands of the next chunk.
                self.state = self.program.reset_buffers(self.algo_there, self.env_there, chunk.after, self.dataset)
                self.done = chunk.first + chunk.length
            self.directory = None
            self.loggers.drop(self.files)
            self._abort_without_saving(error)

    def _abort_without_saving(self, error):
        """Ends a run that can no longer be saved: alone, with its result; among several processes, with the error."""
        if distributed.is_several():
            raise error
        raise _Stop("unsaved", str(error)) from error

    def _at_border(self, state, done):
        """Nothing is under way here, and all that came before was finite: evaluate, save, stop."""
        last = done >= self.iterations
        due = last or done % self.evaluate_each == 0
        if due:
            self.laps.lap("other")
            self.evaluator.collect()  # the one before, if it was played in a thread
            self.laps.lap("evaluate")
            if not self.evaluator.in_thread:
                self._evaluate(state, done)
        decision = self._call_back(state, done, due)
        # Both once: what comes later is for the next border, which saves.
        # Each process timed the last chunk by its own clock; the first one's measure decides the next length.
        stop, self.seconds_per_iteration = self.signals.agree(with_leader=(decision.stop, self.seconds_per_iteration))
        asked = self.signals.agreed is not None
        ending = last or stop is not None or asked
        if due and self.evaluator.in_thread:
            self._evaluate(state, done)
        if self.video_each is not None and (last or done % self.video_each == 0):
            self._film(state, done)
        self.laps.lap("other")
        if ending:
            self.evaluator.collect()
            self.laps.lap("evaluate")
        if ending or (self.checkpointer is not None and done % self.save_each == 0):
            self._close_part(done, ending)
            if self.checkpointer is not None:
                self._check_directory()
                self._save(done, state, self.evaluator.scores.get(done * self.rows))
        self.laps.lap("save")
        if stop is not None and not last:
            raise _Stop(stop)
        if asked and not last:
            raise _Stop("interrupted")

    def _moment(self, state, done):
        step = done * self.rows
        return Moment(
            step=step,
            total_steps=self.iterations * self.rows,
            metrics=dict(self.newest),
            score=self.evaluator.score_at(step),
            state=state,
            env=local(self.env_there) if isinstance(self.env_there, Environment) else None,
        )

    def _call_back(self, state, done, due):
        """What the callbacks ask for here; their environment takes the place of the one before."""
        if not self.callbacks or not (due or self._calls_back(done)):
            return Decision()
        with distributed.collective_errors("callbacks"):
            decision = self.callbacks(self._moment(state, done))
        distributed.check_same({"callbacks": self.callbacks.keep()["env"]})
        if decision.env is not None:
            self.env_there = self.program.layout.place(decision.env)
        if decision.metrics:
            self._write({"step": done * self.rows, "seconds": self._seconds()} | dict(decision.metrics))
        return decision

    def _calls_back(self, done):
        """Whether `callback_every` calls the callbacks here."""
        return self.callback_each is not None and done % self.callback_each == 0

    def _already_done(self, state, done, kept):
        """Return why a run that is resumed here does not go on; None if it does."""
        due = done >= self.iterations or done % self.evaluate_each == 0 or self._calls_back(done)
        stop = self.callbacks.asked_to_stop(self._moment(state, done), kept, due)
        return distributed.from_leader("stopped before", stop)

    def _go_on(self, done, kept):
        """Do first what a run that is resumed here was due to do and was left in the middle of.

        Raises:
          _Stop: it was stopped here.
        """
        unevaluated = distributed.from_leader("unevaluated", self._unevaluated(done))
        if unevaluated and not self.evaluator.in_thread:
            self._at_border(self.state, done)
            return
        if (stop_again := self._already_done(self.state, done, kept)) is not None:
            raise _Stop(stop_again)
        if unevaluated and done < self.iterations:
            self._evaluate(self.state, done)

    def _save(self, done, state, score):
        assert self.checkpointer is not None  # else nothing is due
        kept = state if self.settings.save_replay else state.replace(buffers={})
        try:
            self.checkpointer.save(done * self.rows, kept, score=score, callbacks=self.callbacks.keep())
        except CheckpointError as error:  # of those before
            self._abort_without_saving(error)

    def _close_part(self, done, ending):
        """Before the checkpoint: a run that goes on from it has no second look at what led there."""
        if self.recorder is not None:
            with distributed.collective_errors("closing a part of the recording"):
                self.recorder.close_part(done * self.rows, ending=ending)

    def _unevaluated(self, done):
        """Whether an evaluation was due when so much was done, and it was not written down."""
        due = done == self.iterations or (done < self.iterations and done % self.evaluate_each == 0)
        return due and done * self.rows not in self.evaluator.scores

    def _evaluate(self, state, done, *, log=True):
        self.laps.lap("other")
        self.save_at_rest = None
        if not (self.evaluator.in_thread or distributed.is_several()):
            self.save_at_rest = functools.partial(self._save_at_rest, state, done)
        with self.signals.at_rest(self.save_at_rest):
            self._wait_for("evaluation")
        self.laps.lap("compile")
        algo, actor = self._acting(state, done)
        if self.checkpointer is not None and self.evaluator.in_thread:
            self.checkpointer.awaiting = done * self.rows
        self.evaluator.begin(done * self.rows, algo, actor, list(self.program.layout.mesh.devices.flat), log=log)
        self.laps.lap("evaluate")

    def _acting(self, state, done):
        """The algorithm and what acting needs; every process plays by itself, on one of its devices."""
        progress = self.program.layout.place(np.float32(min(done / self.iterations, 1.0)))
        return policy_at(*local((self.algo_there, state.learner, progress)))

    def _film(self, state, done):
        acting = self._acting(state, done)
        if self.videos is not None and self.directory is not None:  # of the first process
            policy = Policy(acting[0], acting[1], self.program.layout.spec)
            video = self.videos.write(self.directory.path, done * self.rows, policy)
            if video is not None and video.suffix == ".gif":  # pages are for browsers
                self.loggers.show(done * self.rows, video)

    def _save_at_rest(self, state, done):
        """Saves before the evaluation that is due, which the run begins with when it goes on."""
        if self.checkpointer is None:
            return
        try:
            self._close_part(done, True)
            self._save(done, state, None)
            self.checkpointer.wait(last=True)
        except Exception as error:  # nobody would hear of it in this thread, and the last checkpoint is there
            self._note(f"error: {error}")

    def _play(self, algo, actor):
        with self.signals.at_rest(self.save_at_rest):
            return evaluate(
                algo,
                actor,
                self.eval_env,
                self.program.layout.spec,
                seed=self.settings.seed,
                episodes=self.settings.evaluation_episodes,
                max_steps=self.limits.evaluation_steps,
                explore=self.settings.explore_in_evaluation,
                step_timeout=self.settings.topology.step_timeout,
            )

    def _evaluated(self, step, evaluation):
        if self.checkpointer is not None and self.evaluator.in_thread:
            self.checkpointer.score(step, evaluation.return_mean)
        row = {"step": step, "seconds": self._seconds()}
        row |= {f"evaluation/{name}": value for name, value in evaluation.metrics().items()}
        self._write(row)
        self._advise(row)

    # --- beginning and end -------------------------------------------------------------------------------------

    def _resume(self, checkpointer, template):
        # The setting may have changed since; a run whose algorithm has no replay has nothing to leave out.
        saved = any(leaf.name.startswith("buffers") for leaf in read_manifest(checkpointer.directory).leaves)
        replays_lost = bool(template.buffers) and not saved
        with distributed.collective_errors("restoring"):
            in_file = template if saved else template.replace(buffers={})
            state, step, record = checkpointer.restore(in_file)
        steps = distributed.exchange("restored", step)
        if len(set(steps)) > 1:
            raise CheckpointError(f"the processes found different checkpoints: {steps}; all must see the same files")
        anew, how = self.program.unsaved_state(self.algo_there), []
        state = state.replace(**anew)
        if anew:
            how.append(f"{self.program.layout.num_envs} host environments start new episodes")
        if replays_lost:
            state = self.program.reset_buffers(self.algo_there, self.env_there, state, self.dataset)
            how.append("the replay buffers are empty and refill before learning continues")
        if how and distributed.is_leader():
            text = f"resumed at step {step}; {'; '.join(how)}; everything else is restored"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        elif step < self.iterations * self.rows:
            self._note(f"resumed at step {step}")
        changed = self.callbacks.restore(
            record.callbacks, self.env_there if isinstance(self.env_there, Environment) else None
        )
        if changed is not None:
            self.env_there = self.program.layout.place(changed)
        return state, step // self.rows, record.callbacks

    def _note(self, text):
        if self.display is not None:
            self.display.note(text)

    def _open_files(self, directory, done):
        files = metrics_files(directory, done * self.rows)
        rows = read_metrics(directory.metrics_jsonl)  # with None for NaN, which a run that was not interrupted has
        self.history = [{name: np.nan if x is None else x for name, x in row.items()} for row in rows]
        self.evaluator.remember(self.history)
        self.earlier_seconds = max((row.get("seconds", 0.0) for row in self.history), default=0.0)
        for row in self.history:
            self.newest |= {name: value for name, value in row.items() if name != "step"}
        return files

    def _finish(self, state, done, stop):
        if stop.reason == "non_finite":
            message = f"{stop.summary}; the state at step {done * self.rows} is kept; {advice.NOT_FINITE}"
            warnings.warn(message, RunStoppedWarning, stacklevel=4)
        self._close_part(done, True)
        self.laps.lap("save")
        self.evaluator.collect()
        self.laps.lap("evaluate")
        if self.evaluator.latest is None and stop.reason not in ("interrupted", "non_finite", "unsaved"):
            # A run that had ended and was started again has written down what it found.
            self._evaluate(state, done, log=done * self.rows > self.first_step or not self.evaluator.scores)
            self.evaluator.collect()
        if self.checkpointer is not None and stop.reason == "non_finite" and done:
            if distributed.from_leader("not saved yet", done * self.rows not in self.checkpointer.steps()):
                self._save(done, state, None)
        if self.checkpointer is not None:
            stop = self._final_checkpoint(state, done, stop)
        if stop.reason == "unsaved":
            told = self.directory is not None and self.checkpointer is not None and self.checkpointer.told
            problem = "saving failed to the end" if told else stop.problem  # each failure is told once
            message = f"{problem}; what was learned until step {done * self.rows} is in the result, whose `save` "
            message += "writes it elsewhere"
            if self.directory is not None:
                message += ", and the same call goes on from the last checkpoint"
            warnings.warn(message, RunStoppedWarning, stacklevel=4)
        elif done * self.rows > self.first_step and stop.reason not in ("interrupted", "non_finite", TARGET_RETURN):
            self._advise_at_end()
        self.laps.lap("save")
        # The first chunk compiles and trains, by as much as those after it take.
        self.laps.move(self.untimed_iterations * self._mean_seconds(), "compile", "train")
        compiled, loaded = np.subtract(compile_cache.programs(), self.programs)
        if loaded and not compiled:
            self.laps.move(self.laps.seconds["compile"], "compile", "start")
        result = Result(
            algo=self.algo,
            env=self.env,
            state=state,
            metrics=self.history,
            evaluation=self.evaluator.latest,
            stopped=stop.reason,
            problem=stop.problem,
            total_steps=done * self.rows,
            steps_per_second=self._speed(),
            wall_seconds=self.laps.told,
            seconds=dict(self.laps.seconds),
            session_steps=done * self.rows - self.first_step,
            earlier_seconds=self.earlier_seconds,
            spec=self.program.layout.spec,
            progress=min(done / self.iterations, 1.0),
            run_dir=None if self.checkpointer is None else self.checkpointer.directory.parent,
            seed=self.settings.seed,
            config={**self.config, "total_steps": self.iterations * self.rows},
            callbacks=self.callbacks.keep(),
        )
        if self.directory is not None:
            self.loggers.close()
            write_result(result, self.directory)
        return result

    def _final_checkpoint(self, state, done, stop):
        """How the run ends: as it would, once its last state is saved, which is tried twice."""
        assert self.checkpointer is not None  # else nothing is saved
        try:
            self.checkpointer.wait(last=True)
        except CheckpointError as error:
            if distributed.is_several():
                raise
            if self.directory is None or stop.reason == "unsaved":
                return stop
            try:
                self._check_directory()
                self._save(done, state, self.evaluator.scores.get(done * self.rows))
                self.checkpointer.wait(last=True)
            except _Stop as ended:
                return ended
            except CheckpointError:
                return _Stop("unsaved", str(error))
        return stop


@jax.jit
def _all_finite(tree):
    """Leaf by leaf; a leaf of whole numbers is."""
    inexact = jax.numpy.inexact
    return jax.tree.map(lambda x: not jax.numpy.issubdtype(x.dtype, inexact) or jax.numpy.isfinite(x).all(), tree)


def _problem(report, chunk, step, failed_step):
    """What was not finite and where: the metrics of the first iteration, and the leaves that the chunk left so.

    Returns:
      All of it, and a summary that begins with what may be the cause.
    """
    named = jax.tree.leaves_with_path(jax.device_get(_all_finite(lasting(chunk.after))))
    unsound = [jax.tree_util.keystr(path, simple=True, separator=".") for path, fine in named if not fine]
    broken = [name for name, fine in sorted(report.finite.items()) if not fine]

    def text(broken, unsound, most_broken, most_unsound):
        told = f"not finite in the iteration that ended at step {failed_step}"
        told += f": {_first(broken, most_broken)}" if broken else ""
        return told + (f"; leaves at step {step}: {_first(unsound, most_unsound)}" if unsound else "")

    causes_first = (
        sorted(some, key=lambda name: not name.startswith(("reward", "timestep"))) for some in (broken, unsound)
    )
    return text(broken, unsound, len(broken), _LEAVES_NAMED), text(*causes_first, _NAMED_IN_SHORT, _NAMED_IN_SHORT)


def _first(names, number):
    """The first of many names."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" if len(names) > number else "")
