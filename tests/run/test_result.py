"""What people print fits a screen."""

import json

import numpy as np
import pytest
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, SWEEP

import jaxrl
from jaxrl.core.summary import byte_size, tree_summary
from jaxrl.run import loggers
from jaxrl.run.directory import RunDirectory
from jaxrl.run.loading import load_run
from jaxrl.run.result import write_result

WIDTH = 240


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "ppo"
    settings = {"num_envs": NUM_ENVS, "evaluation_episodes": 2, "progress": False}
    return jaxrl.train(PPO, ENV, total_steps=ROWS, run_dir=path, **settings)


def test_results(trained):
    text = repr(trained)
    assert text.startswith("Result(PPO on gymnax:CartPole-v1: 64 steps, finished, Evaluation(return ")
    assert str(trained.run_dir) in text and len(text.replace(str(trained.run_dir), "")) < WIDTH
    assert repr(trained.evaluation).startswith("Evaluation(return ") and len(repr(trained.evaluation)) < 80
    assert repr(trained.policy) == "Policy(PPO on gymnax:CartPole-v1)"
    assert repr(trained.state).startswith("RunState(") and len(repr(trained.state)) < 80
    assert repr(load_run(trained.run_dir)) == "LoadedRun(PPO on gymnax:CartPole-v1 at step 64)"


def test_the_run_is_judged_on_other_episodes_than_its_own_evaluations(trained):
    np.testing.assert_array_equal(trained.evaluate(2, seed=trained.seed).returns, trained.evaluation.returns)
    judged = trained.evaluate(16)
    assert list(judged.returns) != list(trained.evaluate(16, seed=trained.seed).returns)
    np.testing.assert_array_equal(judged.returns, trained.evaluate(16).returns)


@pytest.mark.long
def test_sweeps():
    found = jaxrl.sweep(PPO.replace(learning_rate=1e-2), ENV, seeds=2, learning_rate=[1e-2, 1e-3], **SWEEP)
    text = repr(found)
    assert text.startswith("SweepResult(2 configurations x 2 seeds, 128 steps; best: learning_rate=0.0")
    assert len(text) < WIDTH
    found.failed[:] = True
    assert repr(found).endswith("no score)")


def test_sizes():
    assert [byte_size(n) for n in (0, 999, 1000, 1_250_000, 3 * 10**9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "3.0 GB",
    ]
    assert tree_summary({"a": np.zeros(250, np.float32), "b": (np.zeros((), np.int32), 3)}) == "2 arrays, 1.0 kB"


def test_metrics_that_cannot_be_read_cost_the_picture_alone(trained, tmp_path, monkeypatch):
    open_to_read = loggers.files.open_to_read

    def unreadable(path):
        if path == directory.metrics_jsonl:
            raise PermissionError(13, "Permission denied", str(path))
        return open_to_read(path)

    with RunDirectory(tmp_path, json.loads((trained.run_dir / "config.json").read_text())) as directory:
        directory.metrics_jsonl.write_text('{"step": 64}\n')
        monkeypatch.setattr(loggers.files, "open_to_read", unreadable)
        with pytest.warns(RuntimeWarning, match=r"could not be written.*metrics\.jsonl cannot be read"):
            write_result(trained, directory)
    assert json.loads(directory.result.read_text())["total_steps"] == ROWS
