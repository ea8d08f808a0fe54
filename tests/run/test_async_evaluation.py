"""Evaluations in a thread of their own: the run is the same, and what they find comes one evaluation later."""

import threading

import numpy as np
import pytest
from helpers import programs
from helpers.patience import PATIENCE
from helpers.programs import ROWS, assert_equal
from helpers.refused import raises
from helpers.tiers import one_quick

from jaxrl.run.directory.checkpoint import Checkpointer, best_step, read_manifest
from jaxrl.run.loggers import read_metrics
from jaxrl.run.loop import evaluating, run_loop
from jaxrl.run.policies import evaluation
from jaxrl.run.policies.evaluation import Evaluation

EACH = 4 * ROWS  # between evaluations
TOTAL = 3 * EACH


def train(run_dir=None, **settings):
    settings = {"evaluate_every": EACH, "checkpoint_every": EACH, "evaluation_episodes": 8} | settings
    return programs.train(run_dir, total_steps=TOTAL, **settings)


@pytest.fixture(autouse=True)
def long_chunks(monkeypatch):
    """Chunks that end at borders only, whatever the machine is doing."""
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 1e6)


@pytest.fixture(scope="module")
def in_step(tmp_path_factory):
    """The run whose evaluations are waited for."""
    return train(tmp_path_factory.mktemp("runs") / "in_step")


def evaluations(run_dir):
    rows = read_metrics(run_dir / "metrics.jsonl")
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("evaluation/")}
        for row in rows
        if "evaluation/return_mean" in row
    }


def scores(run_dir):
    with Checkpointer(run_dir / "checkpoints", config={}) as saved:
        return {step: read_manifest(saved.directory, step).score for step in saved.steps()}


def assert_same_run(result, other):
    assert_equal(result.state, other.state)
    assert evaluations(result.run_dir) == evaluations(other.run_dir)
    assert scores(result.run_dir) == scores(other.run_dir)
    np.testing.assert_array_equal(result.evaluation.returns, other.evaluation.returns)


def found(score):
    return Evaluation(np.array([score], np.float32), np.array([1], np.int32), 0)


@pytest.mark.long
def test_beside_a_run_evaluations_find_what_they_find_in_step(tmp_path, in_step):
    beside = train(tmp_path / "beside", async_evaluation=True)
    assert_same_run(beside, in_step)
    assert list(evaluations(beside.run_dir)) == [EACH, 2 * EACH, 3 * EACH]
    assert None not in scores(beside.run_dir).values()
    assert best_step(beside.run_dir / "checkpoints") == best_step(in_step.run_dir / "checkpoints")


@pytest.mark.long
def test_the_run_goes_on_meanwhile(monkeypatch):
    """The first evaluation ends when the run has come further: it would never, were it waited for."""
    further = threading.Event()

    class Rows:
        def write(self, step, metrics):
            if step > EACH and "evaluation/return_mean" not in metrics:
                further.set()

        def close(self):
            pass

    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)  # chunks of one iteration: some end before the next border
    monkeypatch.setattr(evaluating, "evaluate", lambda *_, **__: found(float(further.wait(PATIENCE))))
    result = train(async_evaluation=True, loggers=[Rows()])
    assert evaluation.scores_of(result.metrics) == dict.fromkeys((EACH, 2 * EACH, 3 * EACH), 1.0)


def test_a_target_that_is_reached_ends_the_run_at_the_next_evaluation(tmp_path, monkeypatch):
    numbers = iter([100.0, 1.0])
    monkeypatch.setattr(evaluating, "evaluate", lambda *_, **__: found(next(numbers)))
    settings = {"async_evaluation": True, "target_return": 50.0}
    result = train(tmp_path / "run", **settings)
    assert (result.stopped, result.total_steps, result.evaluation.return_mean) == ("target_return", 2 * EACH, 1.0)
    assert scores(result.run_dir) == {EACH: 100.0, 2 * EACH: 1.0}
    numbers = iter([1.0])  # for the result, of a run that had ended
    again = train(tmp_path / "run", **settings)
    assert (again.stopped, again.total_steps) == ("target_return", 2 * EACH)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("kept", one_quick([False, True]))
def test_an_evaluation_that_was_cut_short_is_played_again(tmp_path, in_step, monkeypatch, kept):
    """The run ends, as by a kill, before or after the second evaluation is written down."""
    end, times = evaluating.Evaluations._end, []

    def killed(self, outcome):
        if self._step == 2 * EACH:
            times.append(0)
            if kept:
                end(self, outcome)
            raise ConnectionAbortedError("killed")
        end(self, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(evaluating.Evaluations, "_end", killed)
        with pytest.raises(ConnectionAbortedError):
            train(tmp_path / "run", async_evaluation=True)
    assert times and list(evaluations(tmp_path / "run")) == ([EACH, 2 * EACH] if kept else [EACH])
    assert max(scores(tmp_path / "run")) == 2 * EACH
    assert_same_run(train(tmp_path / "run", async_evaluation=True), in_step)


def test_a_checkpoint_stays_until_its_score_is_known(tmp_path):
    """Saved more often than evaluated, and one kept: the best one's score comes when two newer ones are there."""
    with Checkpointer(tmp_path, config={}, keep=1) as saved:
        saved.awaiting = 1
        for step in (1, 2, 3):
            saved.save(step, {"x": np.float32(step)})
        saved.wait()
        assert saved.steps() == [1, 3]
        saved.score(1, 10.0)
        assert (saved.best, best_step(tmp_path)) == (1, 1)
        saved.save(4, {"x": np.float32(4)}, score=5.0)
        saved.score(2, 20.0)  # long gone
        assert (saved.steps(), saved.best) == ([1, 4], 1)
        saved.score(4, float("nan"))
        saved.save(5, {"x": np.float32(5)}, score=11.0)
        saved.wait()
        assert saved.steps() == [5]


def test_an_evaluation_that_raises_ends_the_run(monkeypatch):
    def fail(*_, **__):
        raise OSError("no such game")

    monkeypatch.setattr(evaluating, "evaluate", fail)
    raises(OSError, "no such game", train, async_evaluation=True)
