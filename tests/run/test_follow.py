"""An evaluator that follows a run's directory."""

import threading

import numpy as np
import pytest
from helpers.programs import ENV, PPO, ROWS, anakin

import jaxrl
from jaxrl.core.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.run import follow as following
from jaxrl.run.checkpoint import complete_steps
from jaxrl.run.follow import follow
from jaxrl.run.loading import load_run
from jaxrl.run.loggers import read_metrics

EACH = 2 * ROWS


def train(run_dir, total_steps=3 * EACH, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": EACH, "evaluation_episodes": 4, "keep": 9} | settings
    return jaxrl.train(
        PPO, ENV, total_steps=total_steps, topology=anakin(), run_dir=run_dir, progress=False, **settings
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run that has ended."""
    return train(tmp_path_factory.mktemp("runs") / "run").run_dir


def steps(found):
    return [step for step, _ in found]


@pytest.mark.long
def test_every_checkpoint_is_evaluated_once(run_dir, tmp_path):
    out = tmp_path / "evaluations.jsonl"
    found = list(follow(run_dir, episodes=4, out=out))
    assert steps(found) == [EACH, 2 * EACH, 3 * EACH] == complete_steps(run_dir / "checkpoints")
    run = load_run(run_dir, step=2 * EACH)
    alone = jaxrl.evaluate(
        run.policy.algo, run.policy.actor, run.env, run.policy.spec, episodes=4, seed=run.held_out_seed
    )
    np.testing.assert_array_equal(found[1][1].returns, alone.returns)
    rows = read_metrics(out)
    assert [(row["step"], row["evaluation/return_mean"]) for row in rows] == [(s, x.return_mean) for s, x in found]
    assert list(follow(run_dir, episodes=4, out=out)) == []
    assert read_metrics(out) == rows


@pytest.mark.long
def test_it_begins_before_the_run_and_ends_after_it(tmp_path):
    """A run that is started again goes on being followed; the result of the first start ends nothing."""
    path, found, second = tmp_path / "run", [], threading.Event()

    class Second:
        """Waits until the follower has seen the checkpoint of the first start."""

        def write(self, step, metrics):
            assert second.wait(60)

        def close(self):
            pass

    def watch():
        for step, _ in follow(path, episodes=4, poll=0.01):
            found.append(step)
            second.set()

    train(path, total_steps=EACH)
    (path / "result.json").rename(path / "kept.json")
    watcher = threading.Thread(target=watch)
    watcher.start()
    train(path, total_steps=2 * EACH, loggers=[Second()])
    watcher.join(60)
    assert not watcher.is_alive()
    assert found == [EACH, 2 * EACH] == [row["step"] for row in read_metrics(path / "evaluations.jsonl")]


def test_it_waits_for_a_run_to_begin(tmp_path, run_dir, monkeypatch):
    class Waited(Exception):
        pass

    def sleep(seconds):
        raise Waited

    monkeypatch.setattr(following.time, "sleep", sleep)
    with pytest.raises(Waited):
        next(follow(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RunDirectoryError, match="holds a list"):
        next(follow(tmp_path))


def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(run_dir, tmp_path, monkeypatch):
    there = complete_steps(run_dir / "checkpoints")
    looks = iter([[EACH // 2, *there], there])
    monkeypatch.setattr(following.checkpoint, "complete_steps", lambda directory: next(looks))
    assert steps(follow(run_dir, episodes=4, out=tmp_path / "out.jsonl")) == there


def test_a_checkpoint_that_cannot_be_read_is_an_error(run_dir, tmp_path, monkeypatch):
    there = complete_steps(run_dir / "checkpoints")
    monkeypatch.setattr(following.checkpoint, "complete_steps", lambda directory: [EACH // 2, *there])
    with pytest.raises(CheckpointError, match=str(EACH // 2)):
        list(follow(run_dir, episodes=4, out=tmp_path / "out.jsonl"))


def test_a_file_with_something_else_in_it_is_kept(run_dir, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"notes\.txt' holds no evaluations.*name another"):
        next(follow(run_dir, episodes=4, out=notes))
    assert notes.read_text() == "mine\n"
