"""An evaluator that follows a run's directory."""

import dataclasses
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from helpers import programs
from helpers.patience import PATIENCE
from helpers.programs import ENV, PPO, ROWS, anakin
from helpers.refused import raises

import jaxrl
from jaxrl import networks
from jaxrl.core.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.core.types import env_spec
from jaxrl.envs.host.watchdog import STEP_TIMEOUT
from jaxrl.parallel.multihost import distributed, place
from jaxrl.parallel.multihost.place import Place
from jaxrl.run import training
from jaxrl.run.ahead import compile_ahead
from jaxrl.run.directory import follow as following
from jaxrl.run.directory.checkpoint import complete_steps
from jaxrl.run.directory.follow import follow, follow_launched
from jaxrl.run.directory.loading import load_run
from jaxrl.run.directory.run_directory import RunDirectory, read_config
from jaxrl.run.loggers import read_metrics
from jaxrl.run.settings import RunSettings
from jaxrl.sweeps.launcher import launch as experiments

EACH = 2 * ROWS


def train(run_dir, total_steps=3 * EACH, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": EACH, "evaluation_episodes": 4, "keep": 9} | settings
    return programs.train(run_dir, total_steps=total_steps, **settings)


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
            assert second.wait(PATIENCE)

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


@pytest.mark.long
def test_it_waits_for_a_run_to_begin(tmp_path, run_dir, monkeypatch):
    class Waited(Exception):
        pass

    def sleep(seconds):
        raise Waited

    monkeypatch.setattr(following.time, "sleep", sleep)
    with pytest.raises(Waited):
        next(follow(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("[]")
    raises(RunDirectoryError, "contains a list", next, follow(tmp_path))


@pytest.mark.long
def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(run_dir, tmp_path, monkeypatch):
    there = complete_steps(run_dir / "checkpoints")
    looks = iter([[EACH // 2, *there], there])
    monkeypatch.setattr(following.checkpoint, "complete_steps", lambda directory: next(looks))
    assert steps(follow(run_dir, episodes=4, out=tmp_path / "out.jsonl")) == there


def test_a_checkpoint_that_cannot_be_read_is_an_error(run_dir, tmp_path, monkeypatch):
    there = complete_steps(run_dir / "checkpoints")
    monkeypatch.setattr(following.checkpoint, "complete_steps", lambda directory: [EACH // 2, *there])
    raises(CheckpointError, str(EACH // 2), list, follow(run_dir, episodes=4, out=tmp_path / "out.jsonl"))


def test_a_file_with_something_else_in_it_is_kept(run_dir, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    raises(ConfigError, r"notes\.txt exists", next, follow(run_dir, episodes=4, out=notes))
    assert notes.read_text() == "mine\n"


# --- as a part of a run that was launched --------------------------------------------------------------------------

START = "5" * 16
LEARNER, EVALUATOR = (Place("127.0.0.1:1", 1, index, evaluators=1, start=START) for index in range(2))


@pytest.fixture
def placed(monkeypatch):
    """Gives this process a place, and its signals back."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(place, "_learners_ended", [])
    monkeypatch.setattr(following, "_LATE", 0.0)
    yield lambda own: monkeypatch.setattr(place, "_own", [own])
    signal.signal(signal.SIGINT, before)


def follow_to_its_end(run_dir, algo=PPO):
    with pytest.raises(SystemExit) as ended:
        settings = {"total_steps": ROWS, "run_dir": run_dir, "evaluation_episodes": 4, "topology": anakin()}
        follow_launched(RunSettings(algo=algo, eval_env=ENV, **settings))
    assert ended.value.code == 0


@pytest.mark.long
def test_an_evaluator_waits_until_the_directory_is_the_learners(run_dir, tmp_path, monkeypatch, placed):
    """What an earlier run left there is not evaluated, and its result ends nothing."""
    path, config, waited = tmp_path / "run", read_config(run_dir), []
    shutil.copytree(run_dir, path)

    def sleep(seconds):
        waited.append((path / "evaluations.jsonl").exists())
        if len(waited) == 3:
            RunDirectory(path, config, launch=START).close()
        if len(waited) == 5:
            place._learners_ended.append(time.monotonic())

    placed(EVALUATOR)
    monkeypatch.setattr(following.time, "sleep", sleep)
    follow_to_its_end(path)
    assert waited == 3 * [False] + 2 * [True]
    expected = tmp_path / "expected.jsonl"
    list(follow(run_dir, episodes=4, out=expected))
    assert read_metrics(path / "evaluations.jsonl") == read_metrics(expected) != []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "XLA would be waited for"


def test_an_evaluator_ends_where_learners_trained_nothing(run_dir, tmp_path, monkeypatch, placed):
    placed(EVALUATOR)
    monkeypatch.setattr(following.time, "sleep", lambda seconds: place._learners_ended.append(time.monotonic()))
    for path in (run_dir, tmp_path / "nowhere"):
        follow_to_its_end(path)
        assert not (path / "evaluations.jsonl").exists()


@pytest.mark.long  # trains layers of its own
def test_an_evaluator_knows_what_config_json_cannot_hold(tmp_path, placed):
    @dataclasses.dataclass(frozen=True)
    class Own(networks.MLP):
        """Not registered."""

    algo = dataclasses.replace(PPO, network=networks.ActorCritic(torso=Own((8,))))
    placed(EVALUATOR)
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "_own", [LEARNER])
        train(path, total_steps=ROWS, algo=algo, checkpoint_every=0)
    raises(ConfigError, "opaque|Own", list, follow(path, episodes=4, out=tmp_path / "out.jsonl"))
    follow_to_its_end(path, algo)
    assert [row["step"] for row in read_metrics(path / "evaluations.jsonl")] == [ROWS]


def test_a_training_in_an_evaluators_process_follows_with_its_settings(tmp_path, monkeypatch, placed):
    called, other = [], jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=7)

    def followed(settings):
        called.append(settings)
        raise SystemExit(0)

    monkeypatch.setattr(training, "follow_launched", followed)
    placed(EVALUATOR)
    settings = {"evaluation_episodes": 5, "explore_in_evaluation": True, "total_steps": ROWS, "run_dir": tmp_path}
    settings["resources"] = jaxrl.Resources(learner="99999")  # of the learners
    with pytest.raises(SystemExit):
        jaxrl.train(PPO, ENV, eval_env=other, topology=jaxrl.Anakin(num_envs=64, devices=64), **settings)
    [found] = called
    assert found.run_dir == tmp_path and found.algo == PPO.resolve(env_spec(ENV), 64)
    assert found.eval_env == jaxrl.envs.prepared(other)
    assert (found.evaluation_episodes, found.explore_in_evaluation, found.topology.step_timeout) == (
        5,
        True,
        STEP_TIMEOUT,
    )
    with pytest.raises(SystemExit):
        topology = jaxrl.Sebulba(num_envs=2, step_timeout=7.0)
        jaxrl.train("ppo", "gymnasium:CartPole-v1", topology=topology, total_steps=ROWS, run_dir=tmp_path)
    found = called[1]
    assert (found.evaluation_episodes, found.explore_in_evaluation, found.topology.step_timeout) == (10, False, 7.0)
    assert not distributed.is_leader(), "files and results are the learners'"


@pytest.mark.parametrize("place", [LEARNER, EVALUATOR], ids=lambda place: place.role)
def test_what_an_evaluator_cannot_follow_is_refused_in_all_processes(placed, place):
    placed(place)
    raises(ConfigError, "run_dir=None", jaxrl.train, PPO, ENV, total_steps=ROWS)
    sweep = {"total_steps": ROWS, "seeds": 2}
    for refused in (
        lambda: jaxrl.sweep(PPO, ENV, **sweep),
        lambda: jaxrl.tune(PPO, ENV, **sweep),
        lambda: experiments(PPO, ENV, run_dir="runs/none", **sweep),
        lambda: compile_ahead(RunSettings(algo=PPO, env=ENV, total_steps=ROWS, run_dir="runs/none")),
    ):
        raises(ConfigError, "does not support evaluators", refused)
