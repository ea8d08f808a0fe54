"""The training loop, one for every algorithm in every topology.

It runs compiled chunks of about a second. Between chunks live the progress display, logging, evaluation,
checkpoints, signals, and the stop at NaN; a chunk is dispatched before the report of the one before it is read.

With several processes each runs this loop, and whatever it depends on is agreed on (`jaxrl.parallel.distributed`).
The first one alone writes files and shows progress.
"""

import contextlib
import dataclasses
import json
import signal
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import envs
from jaxrl.algos.base import make_algorithm
from jaxrl.checkpoint import Checkpointer, read_manifest
from jaxrl.config import encode
from jaxrl.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.evaluation import Evaluation, evaluate
from jaxrl.loggers import CSVLogger, JSONLLogger, Logger, Loggers, TensorBoardLogger, read_metrics
from jaxrl.parallel import distributed
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.learner import Report, lasting
from jaxrl.parallel.mesh import local
from jaxrl.parallel.rollout import RunState
from jaxrl.parallel.sebulba import Sebulba
from jaxrl.plotting import Chart, Run, plot_run
from jaxrl.policy import Policy
from jaxrl.progress import ProgressBar
from jaxrl.run_directory import MAY_CHANGE, RunDirectory, read_config, write_json
from jaxrl.schedules import at
from jaxrl.types import Algorithm, Environment, HostRecipe

Topology = Anakin | Sebulba
_CHUNK_SECONDS = 1.0
_LEAVES_NAMED = 8  # of those that are not finite
# With the same shards the same run, up to rounding, goes on on any number of devices.
_MAY_CHANGE = (*MAY_CHANGE, "topology.devices")


@dataclasses.dataclass
class Result:
    """What a training run leaves behind.

    Attributes:
      state: the whole state of the run after the last good chunk.
      metrics: one row a chunk: "step", "train/...", "update/...", and "evaluation/..." where there was one.
      evaluation: the last evaluation, or None if the run was stopped before any.
      stopped: "finished", "target_return", "interrupted", or "non_finite".
      problem: what was not finite and where, if that stopped the run.
      total_steps: rows done, over all environments.
    """

    algo: Algorithm
    env: Environment | HostRecipe
    state: RunState
    metrics: list[dict[str, float]]
    evaluation: Evaluation | None
    stopped: str
    problem: str | None
    total_steps: int
    steps_per_second: float
    wall_seconds: float
    spec: Any
    progress: float
    run_dir: Path | None = None

    @property
    def policy(self) -> Policy:
        """The policy as learnt, its statistics frozen."""
        final, actor = _frozen(self.algo, local(self.state.learner), np.float32(self.progress))
        return Policy(final, actor, self.spec)

    def evaluate(self, episodes: int = 128, *, seed: int = 0, explore: bool = False) -> Evaluation:
        """Plays complete episodes with the policy as learnt."""
        policy = self.policy
        return evaluate(policy.algo, policy.actor, self.env, self.spec, seed=seed, episodes=episodes, explore=explore)

    def plot(self, path: str | Path | None = None) -> Chart:
        """The learning curve, which notebooks show; also a picture at `path`, if given."""
        config = {"algorithm": {"type": type(self.algo).__name__}, "environment": {"name": self.env.name}}
        return plot_run(Run("run", config, self.metrics), path)

    def save(self, path: str | Path) -> Path:
        """Writes a run directory that `jaxrl.load` reads: configuration, metrics and the whole state.

        With several processes, all call it.
        """
        config = _config(self.algo, self.env, None, self.total_steps, None, {})
        with _opened(path, config) as (_, checkpointer):
            checkpointer.save(self.total_steps, self.state)
        return Path(path)


def train(
    algo: Algorithm | str,
    env: Environment | HostRecipe | str,
    *,
    total_steps: int,
    seed: int = 0,
    topology: Topology | None = None,
    num_envs: int | None = None,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    evaluate_every: int | None = None,
    evaluation_episodes: int = 128,
    eval_env: Environment | HostRecipe | None = None,
    explore_in_evaluation: bool = False,
    target_return: float | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    save_replay: bool = True,
    loggers: Sequence[Logger] = (),
    progress: bool = True,
) -> Result:
    """Trains an algorithm on an environment.

    The same call with the same `run_dir` goes on where the run stopped, bit for bit for JAX environments. With several
    processes (`jaxrl.parallel.distributed`) all make the same call, and `run_dir` is where all of them can read.

    Args:
      algo: the algorithm, or its name for the defaults.
      env: what `jaxrl.make` gives, or its name.
      total_steps: rows over all environments; the last iteration may go over it.
      seed: the same seed is the same run.
      topology: `Anakin` or `Sebulba`; None: by the kind of environment.
      num_envs: environments, if no topology is given.
      run_dir: where configuration, metrics, checkpoints and the result go; None: nowhere.
      overwrite: begin anew where `run_dir` holds another run.
      evaluate_every: rows between evaluations; None: a tenth of the run; 0: only at the end.
      evaluation_episodes: complete episodes an evaluation.
      eval_env: another environment to evaluate in.
      explore_in_evaluation: sample actions as in training instead of taking the best.
      target_return: stop when an evaluation reaches it.
      checkpoint_every: rows between checkpoints; None: a tenth of the run; 0: only at the end.
      keep: how many checkpoints stay, besides the best.
      save_replay: whether checkpoints hold the replays. Without, they are smaller by all of it, and a run that goes on
        from one is another run: it acts until `min_size` rows are there again before it learns on.
      loggers: further places for metrics; with several processes, those of the first.
      progress: show a progress bar.

    Returns:
      The result. Ctrl-C ends the run after the running chunk, saves and returns what there is; a second one leaves at
      once.

    Raises:
      ConfigError: settings that do not fit, all of them, before anything is compiled.
      RunDirectoryError: the directory is in use, or holds another configuration.
    """
    if isinstance(algo, str):
        algo = make_algorithm(algo)
    if isinstance(env, str):
        env = envs.make(env)
    problems = [
        f"{name}={value} must be at least {least}"
        for name, value, least in (
            ("total_steps", total_steps, 1),
            ("evaluation_episodes", evaluation_episodes, 1),
            ("evaluate_every", evaluate_every, 0),
            ("checkpoint_every", checkpoint_every, 0),
            ("keep", keep, 1),
        )
        if value is not None and value < least
    ]
    if topology is not None and num_envs is not None:
        problems.append(f"num_envs={num_envs} beside topology={topology}; set num_envs in the topology")
    if problems:
        raise ConfigError(problems)
    env = envs.prepared(env)
    topology = topology or default_topology(env, num_envs)
    settings = {"evaluate_every": evaluate_every, "evaluation_episodes": evaluation_episodes}
    if not save_replay:
        settings["save_replay"] = False
    others = {"checkpoint_every": checkpoint_every, "target_return": target_return, "run_dir": run_dir is not None}
    others |= {"explore_in_evaluation": explore_in_evaluation}
    distributed.check_same(_config(algo, env, topology, total_steps, seed, settings) | others)
    program = topology.bind(algo, env)
    run = _Run(
        algo=algo,
        env=env,
        program=program,
        total_steps=total_steps,
        eval_env=env if eval_env is None else envs.prepared(eval_env),
        evaluation_episodes=evaluation_episodes,
        explore=explore_in_evaluation,
        seed=seed,
        target_return=target_return,
        evaluate_every=total_steps // 10 if evaluate_every is None else evaluate_every,
        checkpoint_every=total_steps // 10 if checkpoint_every is None else checkpoint_every,
        save_replay=save_replay,
    )
    leader = distributed.is_leader()
    display = ProgressBar() if progress and leader else None
    loggers = loggers if leader else ()
    try:
        if run_dir is None:
            return run.train(loggers, display, None, None)
        resolved = dataclasses.replace(topology, shards=program.shards)
        config = _config(algo, env, resolved, total_steps, seed, settings)
        with _opened(run_dir, config, overwrite=overwrite, keep=keep) as (directory, checkpointer):
            return run.train(loggers, display, directory, checkpointer)
    finally:
        program.close()


@contextlib.contextmanager
def _opened(
    path: str | Path, config: Mapping[str, Any], *, overwrite: bool = False, keep: int = 3
) -> Generator[tuple[RunDirectory | None, Checkpointer]]:
    """A run's directory, which the first process alone holds, and its checkpoints."""
    with contextlib.ExitStack() as stack:
        directory = None
        with distributed.jointly("opening the run directory"):
            if distributed.is_leader():
                directory = RunDirectory(path, config, overwrite=overwrite, may_change=_MAY_CHANGE)
                stack.enter_context(directory)
        with distributed.jointly("reading the run directory"):
            if not distributed.is_leader() and read_config(path) != json.loads(json.dumps(config)):
                raise RunDirectoryError(f"{Path(path).absolute()} is not the same directory on every process")
            checkpointer = Checkpointer(Path(path) / "checkpoints", config=config, keep=keep)
            stack.enter_context(checkpointer)
        yield directory, checkpointer


def default_topology(env: Environment | HostRecipe, num_envs: int | None = None) -> Topology:
    """`Anakin` for JAX environments, `Sebulba` for those on the host."""
    topology = Anakin() if isinstance(env, Environment) else Sebulba()
    return topology if num_envs is None else dataclasses.replace(topology, num_envs=num_envs)


def _config(algo, env, topology, total_steps, seed, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "algorithm": encode(algo),
        "environment": {"name": env.name, "value": encode(env)},
        "topology": encode(topology),
        "total_steps": total_steps,
        "seed": seed,
        "logging": dict(settings),
    }


@jax.jit
def _frozen(algo, learner, progress):
    """The algorithm as it is at `progress`, and what acting with it needs."""
    algo = at(algo, progress)
    return algo, algo.actor(learner)


class _Stop(Exception):
    """Ends the loop; `reason` is the result's `stopped`."""

    def __init__(self, reason: str, problem: str | None = None):
        super().__init__(reason)
        self.reason, self.problem = reason, problem


class _Signals:
    """Ctrl-C and SIGTERM ask for an end after the running chunk; a second Ctrl-C ends at once.

    Attributes:
      asked: the signal that this process got.
      agreed: the one that some process got, as of the last moment at which they spoke of it.
    """

    def __init__(self):
        self.asked: int | None = None
        self.agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number, frame):
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def agree(self, *, with_leader: Any = None) -> Any:
        """Brings `agreed` up to date on all processes alike; gives what the first process has `with_leader`."""
        found = distributed.exchange("signals", [self.asked or 0, with_leader])
        self.agreed = max(asked for asked, _ in found) or None
        return found[0][1]

    def __exit__(self, *_):
        for number, handler in self._before.items():
            if handler is not None:  # None: not from Python, and cannot be put back
                signal.signal(number, handler)


@dataclasses.dataclass
class _Chunk:
    """A chunk that was dispatched and whose report was not read yet."""

    before: RunState  # without buffers, which are donated
    after: RunState  # likewise
    report: Report
    first: int
    length: int


class _Run:
    """One call of `train`: what is fixed, and the loop."""

    def __init__(
        self,
        *,
        algo: Algorithm,
        env: Environment | HostRecipe,
        program: Any,
        total_steps: int,
        seed: int,
        eval_env: Environment | HostRecipe,
        evaluation_episodes: int,
        explore: bool,
        target_return: float | None,
        evaluate_every: int,
        checkpoint_every: int,
        save_replay: bool,
    ):
        self.algo, self.env, self.program, self.seed = algo, env, program, seed
        self.eval_env, self.evaluation_episodes = eval_env, evaluation_episodes
        self.explore, self.target_return = explore, target_return
        self.rows = program.rows_per_iteration(algo)
        self.iterations = -(-total_steps // self.rows)
        self.total_ticks = self.iterations * self.rows // program.num_envs
        self.evaluate_each = self._iterations(evaluate_every)
        self.save_each = self._iterations(checkpoint_every)
        self.save_replay = save_replay
        self.history: list[dict[str, float]] = []
        self.evaluation: Evaluation | None = None
        self.seconds_per_iteration = 0.0
        self.timed_iterations, self.timed_seconds = 0, 0.0  # without compiling, evaluating and saving
        self.read_at: float | None = None

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
        self.display, self.checkpointer = display, checkpointer
        self._place()
        saved = checkpointer is not None and self.save_replay
        state = self.program.start(self.algo_there, self.env_there, self.seed, saved=saved)
        done = 0
        if checkpointer is not None and distributed.from_leader("is there a run", not checkpointer.is_empty()):
            state, done = self._resume(state)
        files = [] if directory is None else self._open_files(directory, done)
        self.loggers = Loggers([*files, *loggers])
        if display is not None:
            display.start(self.iterations * self.rows, done * self.rows)
        self.began = time.monotonic()
        stop = _Stop("finished")
        self.state, self.done = state, done
        del state
        try:
            with _Signals() as signals:
                try:
                    if done and distributed.from_leader("target reached before", self._reached_target()):
                        raise _Stop("target_return")
                    self._loop(signals)
                except _Stop as ended:
                    stop = ended
                result = self._finish(self.state, self.done, stop, directory)
                if signal.SIGTERM in (signals.agreed, signals.asked):
                    raise SystemExit(143)
                return result
        finally:
            self.loggers.close()
            if display is not None:
                display.close()

    def _place(self):
        """Puts the numbers of algorithm and environment where the program runs, once, so that no chunk moves them."""
        self.algo_there, self.env_there = self.program.place(self.algo), self.env
        if isinstance(self.env, Environment):
            self.env_there = self.program.place(self.env)
        same = self.eval_env is self.env
        if not same and isinstance(self.eval_env, Environment):
            self.eval_env = self.program.place(self.eval_env)
        elif same:
            self.eval_env = self.env_there
        self.eval_env = local(self.eval_env)

    # --- the loop ----------------------------------------------------------------------------------------------

    def _loop(self, signals):
        """Runs to the end; `self.state` and `self.done` are the last moment at which all before was known finite.

        Raises:
          _Stop: the run ends before its time.
        """
        state, done, pending, length = self.state, self.done, None, 1
        while done < self.iterations:
            border = self._next_border(done)
            length = min(self._chunk_length(length), border - done)
            before = state.replace(buffers={})
            state, report = self.program.chunk(self.algo_there, self.env_there, state, length, self.total_ticks)
            chunk = _Chunk(before, state.replace(buffers={}), report, done, length)
            done += length
            if pending is not None:
                self._read(pending)
            pending = chunk
            self.seconds_per_iteration = signals.agree(with_leader=self.seconds_per_iteration)
            if done == border or signals.agreed is not None:
                self._read(pending)
                pending = None
                self.state, self.done = state, done
                self._at_border(state, done, signals)

    def _next_border(self, done):
        following = [(done // each + 1) * each for each in (self.evaluate_each, self.save_each)]
        return min([*following, self.iterations])

    def _chunk_length(self, last):
        if not self.seconds_per_iteration:
            return 1
        wanted = int(_CHUNK_SECONDS / self.seconds_per_iteration)
        return max(1, min(wanted, last * 8))

    def _read(self, chunk):
        """Waits for a chunk and writes down what happened in it.

        Raises:
          _Stop: something was not finite; the state before the chunk is the last good one.
        """
        report = jax.device_get(chunk.report)
        now = time.monotonic()
        since, self.read_at = self.read_at, now
        if since is not None:  # the first chunk compiles
            self.seconds_per_iteration = (now - since) / chunk.length
            self.timed_iterations += chunk.length
            self.timed_seconds += now - since
        step = (chunk.first + chunk.length) * self.rows
        if int(report.failed_at) >= 0:
            # Replays were donated and may hold what was not finite: the state before the chunk has new ones.
            self.state = self.program.emptied(self.algo_there, self.env_there, chunk.before)
            self.done = chunk.first
            failed_step = (chunk.first + int(report.failed_at) + 1) * self.rows
            raise _Stop("non_finite", _problem(report, chunk, step, failed_step))
        row = {"step": step, "seconds": now - self.began}
        with np.errstate(invalid="ignore", divide="ignore"):  # a mean where no episode ended is NaN, and left out
            row |= {name: float(value) for name, value in report.metrics().items() if np.isfinite(value)}
        if since is not None:
            row["steps_per_second"] = chunk.length * self.rows / (now - since)
        self._write(row)

    def _write(self, row):
        self.history.append(row)
        metrics = {name: value for name, value in row.items() if name != "step"}
        self.loggers.write(int(row["step"]), metrics)
        if self.display is not None:
            self.display.update(int(row["step"]), metrics)

    def _at_border(self, state, done, signals):
        """Nothing is under way here, and all that came before was finite: evaluate, save, stop."""
        score = None
        last = done >= self.iterations
        if last or done % self.evaluate_each == 0:
            self._evaluate(state, done)
            score = self.evaluation.return_mean
        # Both once: what comes later is for the next border, which saves.
        reached = signals.agree(with_leader=score is not None and self._reached_target())
        asked = signals.agreed is not None
        if self.checkpointer is not None and (last or reached or asked or done % self.save_each == 0):
            self._save(done, state, score)
        self.read_at = time.monotonic()  # what evaluating and saving took is not training
        if reached and not last:
            raise _Stop("target_return")
        if asked and not last:
            raise _Stop("interrupted")

    def _save(self, done, state, score):
        kept = state if self.save_replay else state.replace(buffers={})
        self.checkpointer.save(done * self.rows, kept, score=score)

    def _reached_target(self):
        """Whether the evaluation of this moment, or of the run that is resumed here, is as good as asked for."""
        step, score = self.done * self.rows, None
        for row in self.history:
            if row["step"] == step:
                score = row.get("evaluation/return_mean", score)
        return self.target_return is not None and score is not None and score >= self.target_return

    def _evaluate(self, state, done):
        progress = self.program.place(np.float32(min(done / self.iterations, 1.0)))
        # Every process plays by itself, on one of its devices.
        algo, actor = _frozen(*local((self.algo_there, state.learner, progress)))
        self.evaluation = evaluate(
            algo,
            actor,
            self.eval_env,
            self.program.spec,
            seed=self.seed,
            episodes=self.evaluation_episodes,
            explore=self.explore,
        )
        step = done * self.rows
        if any(row["step"] == step and "evaluation/return_mean" in row for row in self.history):
            return  # a finished run that was started again: its row is there
        row = {f"evaluation/{name}": value for name, value in self.evaluation.metrics().items()}
        self._write({"step": step, "seconds": time.monotonic() - self.began} | row)

    # --- beginning and end -------------------------------------------------------------------------------------

    def _resume(self, fresh):
        # The setting may have changed since; a run whose algorithm has no replay has nothing to leave out.
        saved = any(leaf.name.startswith("buffers") for leaf in read_manifest(self.checkpointer.directory).leaves)
        in_file = fresh if saved else fresh.replace(buffers={})
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), in_file)
        kept = self.program.not_in_checkpoints(fresh)
        buffers = None if saved else fresh.buffers
        del fresh, in_file
        with distributed.jointly("restoring"):
            state, step, _ = self.checkpointer.restore(template)
        steps = distributed.exchange("restored", step)
        if len(set(steps)) > 1:
            raise CheckpointError(f"the processes found different checkpoints: {steps}; all must see the same files")
        state, how = state.replace(**kept), []
        if kept:
            how.append("host environments begin new episodes")
        if buffers:
            state = state.replace(buffers=buffers, empty_at=jax.tree.map(jax.numpy.copy, state.ticks))
            how.append("the replays are empty, and fill before it learns on")
        if how:
            self._note(f"resumed at step {step}; {'; '.join(how)}; all else is as it was")
        elif step < self.iterations * self.rows:
            self._note(f"resumed at step {step}")
        return state, step // self.rows

    def _note(self, text):
        if self.display is not None:
            self.display.note(text)

    def _open_files(self, directory, done):
        truth = JSONLLogger(directory.metrics_jsonl)
        truth.truncate_after(done * self.rows)
        self.history = read_metrics(directory.metrics_jsonl)
        return [
            truth,
            CSVLogger(directory.metrics_csv, directory.metrics_jsonl),
            TensorBoardLogger(directory.tensorboard, resumed_at=done * self.rows if done else None),
        ]

    def _finish(self, state, done, stop, directory):
        if stop.problem is not None:
            message = f"{stop.problem}; the state at step {done * self.rows}, before that chunk, is kept"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        if self.evaluation is None and stop.reason in ("finished", "target_return"):
            self._evaluate(state, done)  # a run that had ended and was started again
        if self.checkpointer is not None and stop.problem is not None and done:
            if distributed.from_leader("not saved yet", done * self.rows not in self.checkpointer.steps()):
                self._save(done, state, None)
        if self.checkpointer is not None:
            self.checkpointer.wait()
        wall = time.monotonic() - self.began
        result = Result(
            algo=self.algo,
            env=self.env,
            state=state,
            metrics=self.history,
            evaluation=self.evaluation,
            stopped=stop.reason,
            problem=stop.problem,
            total_steps=done * self.rows,
            steps_per_second=self.timed_iterations * self.rows / max(self.timed_seconds, 1e-9),
            wall_seconds=wall,
            spec=self.program.spec,
            progress=min(done / self.iterations, 1.0),
            run_dir=None if self.checkpointer is None else self.checkpointer.directory.parent,
        )
        if directory is not None:
            self.loggers.close()
            _write_result(result, directory)
        return result


@jax.jit
def _all_finite(tree):
    """Leaf by leaf; a leaf of whole numbers is."""
    inexact = jax.numpy.inexact
    return jax.tree.map(lambda x: not jax.numpy.issubdtype(x.dtype, inexact) or jax.numpy.isfinite(x).all(), tree)


def _problem(report, chunk, step, failed_step):
    """What was not finite and where: the metrics of the first iteration, and the leaves that the chunk left so."""
    named = jax.tree.leaves_with_path(jax.device_get(_all_finite(lasting(chunk.after))))
    leaves = [jax.tree_util.keystr(path, simple=True, separator=".") for path, fine in named if not fine]
    broken = [name for name, fine in sorted(report.finite.items()) if not fine]
    text = f"not finite in the iteration that ended at step {failed_step}"
    text += f": {', '.join(broken)}" if broken else ""
    if leaves:
        more = f" and {len(leaves) - _LEAVES_NAMED} more" if len(leaves) > _LEAVES_NAMED else ""
        text += f"; leaves at step {step}: {', '.join(leaves[:_LEAVES_NAMED])}{more}"
    return text


def _write_result(result: Result, directory: RunDirectory) -> None:
    evaluation = {} if result.evaluation is None else result.evaluation.metrics()
    record = {
        "evaluation": evaluation,
        "stopped": result.stopped,
        "problem": result.problem,
        "total_steps": result.total_steps,
        "steps_per_second": result.steps_per_second,
        "wall_seconds": result.wall_seconds,
    }
    try:
        write_json(directory.result, record)
        if result.metrics:
            plot_run(directory.path, directory.learning_curve)
    except OSError as error:
        warnings.warn(f"the result could not be written to {directory.path}: {error}", RuntimeWarning, stacklevel=4)
