"""What people print fits a screen."""

import base64
import copy
import dataclasses
import json
import pickle
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.kills import StopAtTheFifth
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS, SWEEP, assert_equal
from helpers.refused import raises
from helpers.served import ServedFromHost
from helpers.strict_json import check_folder, read_json
from helpers.tiers import one_quick

import jaxrl
from jaxrl.core.errors import ConfigError
from jaxrl.core.trees import tree_summary
from jaxrl.run import loggers
from jaxrl.run.callbacks import FunctionCallback, StopAtReturn
from jaxrl.run.directory.checkpoint import read_manifest
from jaxrl.run.directory.loading import load_run
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.result import write_result

WIDTH = 240


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "ppo"
    return programs.train(path, total_steps=ROWS, topology=jaxrl.Anakin(NUM_ENVS), evaluation_episodes=2)


def test_results(trained):
    text = repr(trained)
    assert text.startswith("Result(PPO on gymnax:CartPole-v1: 64 steps, finished, Evaluation(return ")
    assert str(trained.run_dir) in text and len(text.replace(str(trained.run_dir), "")) < WIDTH
    assert repr(trained.evaluation).startswith("Evaluation(return ") and len(repr(trained.evaluation)) < 80
    assert repr(trained.policy) == "Policy(PPO on gymnax:CartPole-v1)"
    assert repr(trained.state).startswith("RunState(") and len(repr(trained.state)) < 80
    assert repr(load_run(trained.run_dir)) == "LoadedRun(PPO on gymnax:CartPole-v1 at step 64)"


@pytest.mark.long
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


def interrupt(moment):
    if moment.step == 3 * ROWS:
        signal.raise_signal(signal.SIGINT)


SCHEDULED = DQN.replace(epsilon=jaxrl.schedules.Linear(1.0, 0.0))
ON_HOST = {"env": ServedFromHost(ENV), "topology": jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True)}
ENDS = {
    "fifth": {"callbacks": StopAtTheFifth},
    "target_return": {"callbacks": lambda: StopAtReturn(-1e9), "algo": PPO},
    "interrupted": {"callbacks": lambda: FunctionCallback(interrupt), "algo": PPO},
    "finished": {"algo": PPO, **ON_HOST},
}


@pytest.mark.long
@pytest.mark.parametrize("end", one_quick(list(ENDS)))
def test_a_saved_result_is_the_run_directory_of_its_run(end, tmp_path):
    """Files, policy and schedules, and how it goes on; whatever ended it."""
    settings = {"algo": SCHEDULED} | ENDS[end]
    make = settings.pop("callbacks", None)

    def train(run_dir, **more):
        callbacks = [] if make is None else [make()]
        everything = {"callbacks": callbacks, "callback_every": ROWS, "evaluation_episodes": 2}
        return programs.train(run_dir, total_steps=6 * ROWS - 3, **everything | settings | more)

    result = train(tmp_path / "run", evaluate_every=2 * ROWS)
    assert result.stopped == end
    for _ in range(2):  # a second time over the first
        result.save(tmp_path / "saved")
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("run", "saved")]
    assert names[0] - {"log.txt"} == names[1] and check_folder(tmp_path / "saved")
    for name in ("metrics.jsonl", "metrics.csv", "result.json", "config.json"):
        there, here = ((tmp_path / folder / name).read_text() for folder in ("run", "saved"))
        if name.endswith(".json"):
            there, here = json.loads(there), json.loads(here)
            for one in (there, here):
                one.pop("start", None)
            if name == "config.json":
                assert [one.pop("total_steps") for one in (there, here)] == [6 * ROWS - 3, 6 * ROWS]
        assert here == there, name
    ours, theirs = (read_manifest(tmp_path / name / "checkpoints") for name in ("saved", "run"))
    assert (ours.step, ours.score, ours.callbacks) == (theirs.step, theirs.score, theirs.callbacks)
    for policy in (jaxrl.load(tmp_path / "saved"), jaxrl.load(tmp_path / "run")):
        assert_equal(jax.tree.map(jnp.asarray, (policy.algo, policy.actor)), (result.policy.algo, result.policy.actor))
    if end != "finished":
        on = [train(tmp_path / name, evaluate_every=2 * ROWS, callbacks=[]) for name in ("saved", "run")]
        assert [one.stopped for one in on] == ["finished"] * 2
        assert_equal(on[0].state, on[1].state)


def test_notebooks_see_figures_and_the_curve(trained):
    page = trained._repr_html_()
    assert (
        "PPO on gymnax:CartPole-v1" in page and "return" in page and "finished" in page and str(trained.run_dir) in page
    )
    assert base64.b64decode(page.partition("base64,")[2].partition('"')[0]).startswith(b"\x89PNG")
    assert "img" not in dataclasses.replace(trained, metrics=[])._repr_html_()


@pytest.mark.long
def test_a_result_goes_to_another_process_by_pickle(trained):
    found = pickle.loads(pickle.dumps(trained))
    np.testing.assert_array_equal(found.evaluate(2).returns, trained.evaluate(2).returns)
    assert repr(found) == repr(trained) and found.metrics == trained.metrics
    assert jax.random.key_impl(found.state.key) == jax.random.key_impl(trained.state.key)
    jax.tree.map(np.testing.assert_array_equal, plain(found.state), plain(trained.state))
    assert copy.copy(trained).state is trained.state
    raises(ConfigError, "cannot be pickled.*jaxrl.load", pickle.dumps, dataclasses.replace(trained, spec=lambda: None))


def plain(tree):
    return jax.tree.map(lambda x: jax.random.key_data(x) if "key" in str(x.dtype) else x, tree)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"episodes": 0}, "episodes=0 must be at least 1"),
        ({"episodes": -3}, "episodes=-3 must be at least 1"),
        ({"episodes": 1.5}, "episodes=1.5 must be a whole number"),
        ({"episodes": None}, "episodes=None must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"explore": "yes"}, "explore='yes' must be True or False"),
        ({"step_timeout": 0}, "step_timeout=0 must be more than 0"),
        ({"step_timeout": float("nan")}, "step_timeout=nan must be more than 0"),
    ],
)
def test_an_evaluation_that_cannot_be_right_is_refused(trained, settings, said):
    raises(ConfigError, said, trained.evaluate, **settings)


def test_sizes():
    assert tree_summary({"a": np.zeros(250, np.float32), "b": (np.zeros((), np.int32), 3)}) == "2 arrays, 1.0 kB"


def test_metrics_that_cannot_be_read_cost_the_picture_alone(trained, tmp_path, monkeypatch):
    open_to_read = loggers.files.open_to_read

    def unreadable(path):
        if path == directory.metrics_jsonl:
            raise PermissionError(13, "Permission denied", str(path))
        return open_to_read(path)

    with RunDirectory(tmp_path, read_json(trained.run_dir / "config.json")) as directory:
        directory.metrics_jsonl.write_text('{"step": 64}\n')
        monkeypatch.setattr(loggers.files, "open_to_read", unreadable)
        with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl cannot be read"):
            write_result(trained, directory)
    assert read_json(directory.result)["total_steps"] == ROWS
