"""The training loop of a run, which is the same for all algorithms and topologies.

It runs compiled chunks of iterations, each of which takes about a second. Progress display, logging, evaluation,
checkpoints, signals and the check for NaN run between chunks. A chunk is dispatched before the report of the previous
chunk is read.

With several processes, each runs this loop, and they agree on every value that affects it
(`jaxrl.parallel.multihost.distributed`). Only the first process writes files and shows progress.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.buffers.fixed import Rings
from jaxrl.core import interrupts
from jaxrl.core.errors import RunStoppedWarning
from jaxrl.core.recorded import Fetch
from jaxrl.core.report import Report
from jaxrl.core.run_state import RunState
from jaxrl.core.sources import Episodes, Rollouts
from jaxrl.core.spaces import Box, leaves
from jaxrl.core.types import Environment
from jaxrl.parallel.mesh import local
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Program
from jaxrl.run import compile_cache
from jaxrl.run.callbacks import TARGET_RETURN, Decision, Moment, run_callbacks
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.directory.init_from import Initial
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.loop import advice
from jaxrl.run.loop.background import BackgroundTask, import_later_modules
from jaxrl.run.loop.evaluating import Evaluations
from jaxrl.run.loop.journal import Journal
from jaxrl.run.loop.metric_rows import TrainingRows
from jaxrl.run.loop.saving import Saver
from jaxrl.run.loop.schedule import LoopLimits, Schedule
from jaxrl.run.loop.signals import Signals
from jaxrl.run.loop.stopping import Stop, non_finite
from jaxrl.run.loop.timing import ChunkTimes
from jaxrl.run.policies.evaluation import Evaluation, scores_of
from jaxrl.run.recording.recorder import Recorder
from jaxrl.run.result import Result, write_result
from jaxrl.run.settings import RunSettings

_CHUNK_SECONDS = 1.0


@dataclasses.dataclass
class _Chunk:
    """A dispatched chunk whose report has not been read."""

    before: RunState  # without buffers, which are donated
    after: RunState  # without buffers
    report: Report
    first: int
    length: int
    ended: BackgroundTask  # runs `Loop._ended`
    fetch: Fetch | None  # fetches the chunk's rows, if they are recorded


def _placed(env, program):
    return program.layout.place(env) if isinstance(env, Environment) else env


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Loop:
    """The training loop of one call of `train`.

    Args:
      settings: resolved settings.
      program: program of the run.
      config: contents of `config.json`.
      limits: limits of chunks and evaluations.
      dataset: data to learn from, in addition to or instead of the environment.
      recorder: recorder of the training episodes.
      initial: initial arrays from another run.
      journal: journal of the run.
      directory: run directory; None if there is none, and in all processes except the first.
      checkpointer: writer of the checkpoints; None: nothing is saved.

    Attributes:
      state, done: the last state that is known to be finite, and its number of iterations.
    """

    settings: RunSettings
    program: Program
    config: Mapping[str, Any]
    limits: LoopLimits
    dataset: Rings | None
    recorder: Recorder | None
    initial: Initial | None
    journal: Journal
    directory: dataclasses.InitVar[RunDirectory | None]
    checkpointer: dataclasses.InitVar[Checkpointer | None]

    def __post_init__(self, directory, checkpointer):
        settings, program = self.settings, self.program
        # Placed on the program's devices once, so that they are not moved for every chunk.
        self.algo, self.env = program.layout.place(settings.algo), _placed(settings.acting_env, program)
        eval_env = self.env if settings.eval_env is settings.acting_env else _placed(settings.eval_env, program)
        self.callbacks = run_callbacks(settings.callbacks, settings.target_return)
        self.schedule = Schedule.of(settings, program, bool(self.callbacks))
        replays = program.layout.experience(settings.algo).online_sources
        transitions = {name: source.transitions for name, source in replays.items()}
        self.training_rows = TrainingRows(self.schedule.rows, transitions)
        self.total_steps_per_env = self.schedule.total_steps // program.layout.num_envs
        self.laps, self.first_step = self.journal.laps, 0
        self.times, self.seconds_per_iteration = ChunkTimes(self.laps), 0.0  # measured by the first process
        self.programs = compile_cache.programs()  # numbers of programs compiled and loaded before the run
        self.background: dict[str, BackgroundTask] = {}  # threads that prepare later steps, by name
        self.saver = Saver(directory, checkpointer, self.recorder, self.callbacks, self.journal, settings.save_replay)
        self.signals = Signals(self.saver.announce_stop)
        self.evaluations = Evaluations(
            settings,
            program,
            self.algo,
            local(eval_env),
            self.schedule,
            self.saver,
            self.journal,
            self.signals,
            self.background,
            self.limits.evaluation_steps,
        )

    def train(self) -> Result:
        """Train from the newest checkpoint, or from the beginning if there is none."""
        self.journal.start(self.schedule.total_steps)
        try:
            return self._train()
        except KeyboardInterrupt:
            self.background.clear()  # do not wait for programs that are no longer needed
            raise
        finally:
            if self.signals.received is not None and interrupts.owned():  # the process ends at once
                self.background.clear()
            for under_way in self.background.values():
                under_way.wait()

    def _train(self):
        if self.saver.directory is not None:
            self.background["imports"] = BackgroundTask(import_later_modules)
        if self.saver.has_run():
            self._resume()
        else:
            self._start()
        self.first_step = self.step
        if self.recorder is not None:
            self.recorder.begin(self.first_step)
        if self.saver.directory is not None:
            self.journal.open(self.saver.directory, self.first_step)
            self.evaluations.scores = scores_of(self.journal.history)
        self.laps.lap("restore" if self.done else "compile")
        stop = Stop("finished")
        try:
            with self.signals:
                try:
                    if self.done:
                        self._go_on()
                    self._loop()
                except Stop as ended:
                    stop = ended
                result = self._finish(stop)
                if self.signals.exit_code is not None:
                    raise SystemExit(self.signals.exit_code)
                return result
        finally:
            self.evaluations.close()
            self.journal.close()

    # --- beginning ---------------------------------------------------------------------------------------------

    def _start(self):
        """Begin a new run: create the initial state while compiling in the background."""
        self._compile_in_background()
        state = self._initial_state(self.program.start)
        if self.initial is not None:
            state = state.replace(learner=self.initial.into(state.learner, self.program.layout.place))
        self.state, self.done = state, 0

    def _initial_state(self, make):
        """Return the initial state of the run (`make=program.start`), or its shapes (`make=program.template`)."""
        saved = self.saver.saves_replay
        return make(self.algo, self.env, self.settings.seed, saved=saved, dataset=self.dataset)

    def _compile_in_background(self):
        """Start compiling chunks and evaluations from shapes, before the state is created."""
        if not (program := self.program).is_compiled or distributed.is_several():
            return
        shapes = self._initial_state(program.template)
        if self.recorder is None:
            of_chunk = self.algo, self.env, shapes, self.dataset
            self.background["chunk"] = BackgroundTask(lambda: program.compile_chunk(*of_chunk))
        if self.evaluations.are_compiled_before:
            self.background["evaluation"] = BackgroundTask(lambda: self.evaluations.compile(shapes.learner))

    def _resume(self):
        """Continue from the newest checkpoint."""
        # The template has only shapes, because new replay buffers might not fit in memory next to the restored ones.
        state, step, callback_states, replays_lost = self.saver.restore(self._initial_state(self.program.template))
        unsaved, how = self.program.unsaved_state(self.algo), []
        state = state.replace(**unsaved)
        if unsaved:
            how.append(f"{self.settings.topology.num_envs} host environments start new episodes")
        if replays_lost:
            state = self.program.reset_buffers(self.algo, self.env, state, self.dataset)
            how.append("the replay buffers are empty and refill before learning continues")
        if how and distributed.is_leader():
            text = f"resumed at step {step}; {'; '.join(how)}; everything else is restored"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        elif step < self.schedule.total_steps:
            self.journal.note(f"resumed at step {step}")
        changed = self.callbacks.restore(callback_states, self.env if isinstance(self.env, Environment) else None)
        if changed is not None:
            self.env = self.program.layout.place(changed)
        self.state, self.done = state, step // self.schedule.rows

    def _go_on(self):
        """Evaluate or stop if the resumed run had not yet done so at its checkpoint.

        Raises:
          Stop: the run was stopped at this checkpoint.
        """
        done = self.done
        unevaluated = self.evaluations.is_lacking(done)
        if unevaluated and not self.evaluations.in_thread:
            self._at_border()
            return
        due = self.schedule.evaluates(done) or self.schedule.calls_back(done)
        stop = self.callbacks.stop_reason(self._moment(), due)
        if (stop := distributed.from_leader("stopped before", stop)) is not None:
            raise Stop(stop)
        if unevaluated and not self.schedule.is_last(done):
            self.evaluations.begin(self.state, done)

    # --- the loop ----------------------------------------------------------------------------------------------

    def _loop(self):
        """Run chunks until the last iteration.

        Raises:
          Stop: the run ends early.
        """
        state, done, pending, most = self.state, self.done, None, 1
        while not self.schedule.is_last(done):
            border = self.schedule.next_border(done)
            most = self._chunk_length(most)
            length = min(most, border - done)  # a short chunk before a border does not limit the next chunk
            if (log_each := self.schedule.log_each) is not None:
                length = min(length, log_each - done % log_each)
            before = state.replace(buffers={})
            state, report, fetch = self._dispatch(state, length)
            if self.limits.iterations is None:  # otherwise, this run only compiles programs
                self.signals.hold()  # the chunk is compiled: from now on, there is something to save
            ended = self.background["report"] = BackgroundTask(functools.partial(self._ended, report), "report")
            chunk = _Chunk(before, state.replace(buffers={}), report, done, length, ended, fetch)
            done += length
            if pending is not None:
                self._read(pending, last=False)
            pending = chunk
            self.seconds_per_iteration = self.signals.agree(with_leader=self.seconds_per_iteration)
            if done == border or self.signals.agreed is not None:
                self._read(pending, last=True)
                pending = None
                self.state, self.done = state, done
                self._at_border()

    def _dispatch(self, state, length):
        """Dispatch a chunk; return the state after it, its report, and a `Fetch` of its rows if they are recorded."""
        arguments = self.algo, self.env, state, length, self.total_steps_per_env, self.dataset
        if (compiling := self.background.pop("chunk", None)) is not None:
            compiling.wait()  # the time until the first report counts as compiling
        if self.recorder is None:
            return *self.program.chunk(*arguments), None
        return self.program.recorded_chunk(*arguments, recorded=self.recorder.recorded)

    def _ended(self, report):
        """Wait for a chunk, and return the time at which it ended; called in a thread.

        The time at which the report is read may be too late: if dispatching the next chunk blocks or collects
        experience, this would count as time of the current chunk.
        """
        with contextlib.suppress(Exception):  # raised again when the report is read
            jax.block_until_ready(report)
        return self.laps.clock()

    def _chunk_length(self, last):
        most = last * 8 if self.limits.iterations is None else self.limits.iterations
        if self.recorder is not None:
            most = min(most, self.recorder.recorded.iterations)
        if self.limits.iterations is not None:
            return most
        if not self.seconds_per_iteration:
            return 1
        return max(1, min(int(_CHUNK_SECONDS / self.seconds_per_iteration), most))

    def _read(self, chunk, *, last):
        """Wait for a chunk, and write a row of metrics if one is due.

        Args:
          chunk: the oldest unread chunk.
          last: whether it is the last dispatched chunk, so that a row is due.

        Raises:
          Stop: a value was not finite; the state before the chunk is the last valid one.
          Exception: any error that an evaluation in a thread raised.
        """
        self.evaluations.look()
        report = jax.device_get(chunk.report)
        ended = chunk.ended.result()
        seconds = self.times.add(chunk.length, ended, report.actors)
        if seconds:  # 0 if the chunk ended before the host had time to look, which says nothing of its duration
            self.seconds_per_iteration = seconds / chunk.length
        rows, done = self.schedule.rows, chunk.first + chunk.length
        step = done * rows
        if int(report.failed_at) >= 0:
            self._end_at(chunk.before, chunk.first)
            failed_step = (chunk.first + int(report.failed_at) + 1) * rows
            raise non_finite(report, chunk.after, step, failed_step, self.settings, self.program.layout)
        if chunk.fetch is not None and self.recorder is not None:
            self.recorder.add(chunk.fetch)
        try:
            self.saver.check_directory()
        except Stop:
            self._end_at(chunk.after, done)
            raise
        self.training_rows.add(report, chunk.length, seconds)
        if not (last or self.schedule.logs(done)):
            self.journal.show(step, self.training_rows.speed())
            return
        row = self.training_rows.row()
        self.journal.write(step, row, self.journal.seconds(ended))
        if 2 * done >= self.schedule.iterations:  # earlier metrics are those of an untrained policy
            self.journal.advise(step, row)

    def _end_at(self, state, done):
        """Set `state` to the state before or after a chunk, with new replay buffers.

        The old buffers were donated to the next chunk, and may contain values that are not finite.
        """
        self.state, self.done = self.program.reset_buffers(self.algo, self.env, state, self.dataset), done

    @property
    def step(self) -> int:
        """The number of environment steps at `state`."""
        return self.done * self.schedule.rows

    def _at_border(self):
        """Evaluate, save and stop as scheduled. No chunk is running, and all values so far are finite."""
        state, done, schedule, evaluations = self.state, self.done, self.schedule, self.evaluations
        last, due, in_thread = schedule.is_last(done), schedule.evaluates(done), evaluations.in_thread
        if due:
            self.laps.lap("other")
            evaluations.collect()  # the previous evaluation, if it runs in a thread
            if not in_thread:
                evaluations.begin(state, done)
        decision = self._call_back(due)
        # The processes agree once per border; later signals are handled at the next border. The length of the next
        # chunk depends on the time that the first process measured for the last one.
        stop, self.seconds_per_iteration = self.signals.agree(with_leader=(decision.stop, self.seconds_per_iteration))
        interrupted = self.signals.agreed is not None
        ending = last or stop is not None or interrupted
        if due and in_thread:
            evaluations.begin(state, done)
        if schedule.films(done):
            evaluations.film(state, done)
        self.laps.lap("other")
        if ending:
            evaluations.collect()
        if ending or (self.saver.checkpointer is not None and done % schedule.save_each == 0):
            self.saver.close_part(self.step, ending=ending)
            if self.saver.checkpointer is not None:
                self.saver.check_directory()
                self.saver.save(self.step, state, evaluations.scores.get(self.step))
        self.laps.lap("save")
        if stop is not None and not last:
            raise Stop(stop)
        if interrupted and not last:
            raise Stop("interrupted")

    def _moment(self):
        metrics, score = dict(self.journal.newest), self.evaluations.score_at(self.step)
        env = local(self.env) if isinstance(self.env, Environment) else None
        return Moment(self.step, self.schedule.total_steps, metrics, score, self.state, env)

    def _call_back(self, due):
        """Call the callbacks if they are due, apply the changes that they return, and return their decision."""
        if not self.callbacks or not (due or self.schedule.calls_back(self.done)):
            return Decision()
        with distributed.collective_errors("callbacks"):
            decision = self.callbacks(self._moment())
        distributed.check_same({"callbacks": self.callbacks.keep()["env"]})
        if decision.env is not None:
            self.env = self.program.layout.place(decision.env)
        if decision.metrics:
            self.journal.write(self.step, decision.metrics)
        return decision

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self, stop):
        """Evaluate and save the run, and return its result."""
        state, done, saver, evaluations = self.state, self.done, self.saver, self.evaluations
        step = self.step
        if stop.reason == "non_finite":
            message = f"{stop.summary}; the result has the state at step {step}"
            warnings.warn(message, RunStoppedWarning, stacklevel=4)
        saver.close_part(step, ending=True)
        self.laps.lap("save")
        evaluations.collect()
        if evaluations.latest is None and stop.reason not in ("interrupted", "non_finite", "unsaved"):
            # If a finished run is started again, its evaluation is already logged.
            log = step > self.first_step or not evaluations.scores
            evaluations.begin(state, done, log=log)
            evaluations.collect()
        if saver.checkpointer is not None:
            if stop.reason == "non_finite" and done:
                if distributed.from_leader("not saved yet", step not in saver.checkpointer.steps()):
                    saver.save(step, state, None)
            stop = saver.save_last(step, state, evaluations.scores.get(step), stop)
        if stop.reason == "unsaved":
            warnings.warn(saver.describe_unsaved(stop.problem, step), RunStoppedWarning, stacklevel=4)
        elif step > self.first_step and stop.reason not in ("interrupted", "non_finite", TARGET_RETURN):
            self._advise()
        self.laps.lap("save")
        compiled, loaded = np.subtract(compile_cache.programs(), self.programs)
        self.times.settle(all_loaded=loaded > 0 and not compiled)
        result = Result(
            algo=self.settings.algo,
            env=self.settings.env,
            state=state,
            metrics=self.journal.history,
            evaluation=evaluations.latest or Evaluation(),
            stopped=stop.reason,
            problem=stop.problem,
            total_steps=step,
            steps_per_second=self.times.steps_per_second(self.schedule.rows),
            wall_seconds=self.laps.session_seconds,
            seconds=dict(self.laps.seconds),
            session_steps=step - self.first_step,
            earlier_seconds=self.journal.earlier_seconds,
            spec=self.program.layout.spec,
            progress=min(done / self.schedule.iterations, 1.0),
            run_dir=None if saver.checkpointer is None else saver.checkpointer.directory.parent,
            seed=self.settings.seed,
            config={**self.config, "total_steps": self.schedule.total_steps},
            callbacks=self.callbacks.keep(),
        )
        if saver.directory is not None:
            self.journal.close(f"{stop.reason} at step {step:,}")
            write_result(result, saver.directory)
        return result

    def _advise(self):
        """Warn if the run did not learn, or if evaluations are far below training returns or the best evaluation."""
        settings, spec, rows = self.settings, self.program.layout.spec, self.journal.history
        line = advice.at_end(
            rows,
            on_policy=all(isinstance(source, Rollouts | Episodes) for source in settings.algo.experience.values()),
            discrete=not any(isinstance(part, Box) for part in leaves(spec.action_space)),
            from_scratch="parent" not in self.config,
            same_env=self.callbacks.keep()["env"] is None and spec.num_agents == 1,  # other agents learn too
            greedy=not settings.explore_in_evaluation and settings.eval_env is settings.env,
        )
        checkpointer = self.saver.checkpointer
        best_step = None if checkpointer is None else checkpointer.best
        for text in (line, advice.below_best(rows, settings.run_dir, best_step)):
            if text is not None and distributed.is_leader():
                warnings.warn(text, RuntimeWarning, stacklevel=5)
