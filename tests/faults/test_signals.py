"""Ctrl-C and SIGTERM: what was learned is kept, and everything is as before."""

import math
import os
import signal
import threading

import pytest
from helpers import programs
from helpers.kills import Curriculum
from helpers.patience import PATIENCE
from helpers.programs import ROWS, assert_equal
from helpers.refused import raises
from helpers.strict_json import read_json

from jaxrl.parallel.program import Program
from jaxrl.run.directory import checkpoint
from jaxrl.run.loop import evaluating, run_loop

pytestmark = pytest.mark.usefixtures("one_iteration_chunks")
TOTAL = 12 * ROWS


class Raising:
    """Raises signals when the row of a step is written."""

    def __init__(self, *signals, step=3 * ROWS):
        self.signals, self.step, self.steps = list(signals), step, []

    def write(self, step, metrics):
        self.steps.append(step)
        if step >= self.step:
            signals, self.signals = self.signals, []
            for number in signals:
                signal.raise_signal(number)

    def close(self):
        pass


def train(run_dir=None, *loggers, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": 0, "evaluation_episodes": 8} | settings
    return programs.train(run_dir, total_steps=TOTAL, loggers=loggers, **settings)


@pytest.fixture
def handlers():
    """Our own handlers, which must be back in place afterwards."""
    mine = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: signal.getsignal(number) for number in mine}
    yield lambda: all(signal.getsignal(number) is handler for number, handler in ours.items())
    for number, handler in mine.items():
        signal.signal(number, handler)


def test_ctrl_c_finishes_the_chunk_saves_and_returns(tmp_path, handlers):
    logger = Raising(signal.SIGINT)
    result = train(tmp_path / "run", logger)
    # The row of step 3 is written while the fourth and fifth iterations are under way, and they are finished.
    assert result.stopped == "interrupted" and result.total_steps in (4 * ROWS, 5 * ROWS)
    assert logger.steps[-1] == result.total_steps
    assert not result.evaluation and math.isnan(result.evaluation.return_mean) and handlers()
    assert read_json(tmp_path / "run" / "result.json")["stopped"] == "interrupted"
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == result.total_steps
    assert result.policy([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    assert_equal(train(tmp_path / "run").state, train().state)


def test_ctrl_c_without_a_run_directory(handlers):
    result = train(None, Raising(signal.SIGINT))
    assert result.stopped == "interrupted" and result.metrics and handlers()


def test_ctrl_c_in_the_last_chunk_is_a_finished_run(handlers):
    result = train(None, Raising(signal.SIGINT, step=TOTAL))
    assert result.stopped == "finished" and result.total_steps == TOTAL and handlers()


def test_ctrl_c_while_evaluating_saves_there(tmp_path, handlers):
    class During(Raising):
        def write(self, step, metrics):
            if "evaluation/return_mean" in metrics:
                super().write(step, metrics)

    result = train(tmp_path / "run", During(signal.SIGINT, step=0), evaluate_every=4 * ROWS)
    assert result.stopped == "interrupted" and result.total_steps == 4 * ROWS and result.evaluation.episodes == 8
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == 4 * ROWS


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_another_signal_leaves_at_once(first, tmp_path, handlers):
    logger = Raising(first, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", logger)
    assert logger.steps[-1] == 3 * ROWS and handlers()
    assert train(tmp_path / "run").stopped == "finished", "the lock was not given back"


def test_ctrl_c_while_compiling_leaves_at_once(tmp_path, monkeypatch, hears_ctrl_c):
    """XLA cannot be interrupted: who compiles in the background is left there. Nothing is there to be saved yet."""
    compiled, asked = threading.Event(), []

    def compile_for_ever(*_):
        asked.append(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        compiled.wait(PATIENCE)

    monkeypatch.setattr(Program, "compile_chunk", compile_for_ever)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    assert not compiled.is_set() and len(asked) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    compiled.set()
    monkeypatch.undo()
    assert train(tmp_path / "run").stopped == "finished", "the lock was not given back"


class Left(Exception):
    """The process is left here."""


@pytest.mark.long
@pytest.mark.parametrize("at", [4, 12], ids=["in between", "at the end"])
def test_a_run_that_is_left_in_an_evaluation_goes_on_with_it(at, tmp_path, monkeypatch):
    """A command leaves its process there after a signal, once the state is saved; callbacks come after it."""
    evaluated = []

    def settings():
        evaluated.append(Curriculum())
        return {"callbacks": [evaluated[-1]], "evaluate_every": 4 * ROWS, "checkpoint_every": 6 * ROWS}

    whole = train(tmp_path / "whole", **settings())
    play = evaluating.Evaluations._play

    def left(self, algo, actor):
        if self._step == at * ROWS:
            self.signals._save()
            raise Left
        return play(self, algo, actor)

    monkeypatch.setattr(evaluating.Evaluations, "_play", left)
    with pytest.raises(Left):
        train(tmp_path / "run", **settings())
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == at * ROWS
    monkeypatch.undo()
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)
    result = train(tmp_path / "run", **settings())
    assert_equal(whole.state, result.state)
    assert vars(evaluated[0]) == vars(evaluated[-1]) and evaluated[-1].calls == 3
    told = [
        [{name: x for name, x in row.items() if name.startswith(("evaluation/", "callback/"))} for row in one.metrics]
        for one in (whole, result)
    ]
    assert told[0] == told[1]


def test_sigterm_saves_and_exits_143(tmp_path, handlers):
    with pytest.raises(SystemExit) as caught:
        train(tmp_path / "run", Raising(signal.SIGTERM))
    assert caught.value.code == 143 and handlers()
    record = read_json(tmp_path / "run" / "result.json")
    assert record["stopped"] == "interrupted"
    assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step == record["total_steps"]
    assert_equal(train(tmp_path / "run").state, train().state)


@pytest.mark.long
def test_a_closed_terminal_saves_and_exits_129(tmp_path, handlers):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            train(tmp_path / "run", Raising(signal.SIGHUP))
        assert caught.value.code == 129 and handlers() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        assert checkpoint.read_manifest(tmp_path / "run" / "checkpoints").step in (4 * ROWS, 5 * ROWS)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
        assert train(tmp_path / "run", Raising(signal.SIGHUP)).stopped == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_come_back_after_an_error(handlers, monkeypatch):
    def fail(*_):
        raise RuntimeError("from the program")

    monkeypatch.setattr(Program, "chunk", fail)
    raises(RuntimeError, "from the program", train)
    assert handlers()
