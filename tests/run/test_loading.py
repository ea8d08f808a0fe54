"""Policies read back from run directories."""

import json
import re

import jax
import numpy as np
import pytest
from helpers.programs import assert_equal
from helpers.refused import raises

import jaxrl
from jaxrl import networks
from jaxrl.core.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.core.schedules import Linear
from jaxrl.run.directory.loading import load, load_run

ALGO = jaxrl.DQN(
    learning_rate=2.5e-4,
    n_step=1,
    epsilon=Linear(1.0, 0.1),
    capacity=64,
    min_size=8,
    batch_size=4,
    rollout_length=4,
    replay_ratio=0.125,  # one an iteration of 2 environments
    network=networks.QNetwork(torso=networks.MLP((8,))),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run with two checkpoints, and its directory."""
    path = tmp_path_factory.mktemp("runs") / "dqn"
    result = jaxrl.train(
        ALGO,
        "gymnax:CartPole-v1",
        total_steps=60,  # 8 iterations of 8 rows: the run ends at 64
        num_envs=2,
        run_dir=path,
        evaluate_every=32,
        checkpoint_every=32,
        evaluation_episodes=2,
        progress=False,
    )
    return result, path


@pytest.fixture
def changed(trained, tmp_path):
    """A function that changes the config.json of a copy of the run; the path of the copy."""
    config = json.loads((trained[1] / "config.json").read_text())
    (tmp_path / "checkpoints").symlink_to(trained[1] / "checkpoints")

    def change(make):
        (tmp_path / "config.json").write_text(json.dumps(make(config)))
        return tmp_path

    return change


@pytest.mark.long
def test_policy_read_back_equals_the_one_trained(trained):
    result, path = trained
    policy = load(path)
    assert_equal((policy.algo, policy.actor), (result.policy.algo, result.policy.actor))
    assert jax.tree.structure(policy.algo) == jax.tree.structure(result.policy.algo)
    observations = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(policy(observations)[0], result.policy(observations)[0])


@pytest.mark.long
def test_schedules_are_those_of_the_checkpoint(trained):
    _, path = trained
    assert load(path).actor.exploration["epsilon"] == pytest.approx(0.1)
    middle = load_run(path, step=32)
    assert middle.step == 32
    assert middle.policy.actor.exploration["epsilon"] == pytest.approx(0.55)
    assert middle.algo == ALGO


@pytest.mark.long
def test_best_is_the_checkpoint_of_the_highest_evaluation(trained):
    result, path = trained
    scores = {row["step"]: row["evaluation/return_mean"] for row in result.metrics if "evaluation/return_mean" in row}
    assert load_run(path, best=True).step == max(scores, key=lambda step: (scores[step], step))


def test_another_environment_takes_its_place(trained):
    _, path = trained
    heavy = jaxrl.make("gymnax:CartPole-v1", gravity=20.0)
    assert jax.tree.leaves(load_run(path, env=heavy).env) == jax.tree.leaves(heavy)


def test_environment_that_does_not_fit_is_told_in_its_own_words(trained):
    _, path = trained
    with pytest.raises(ConfigError, match="Acrobot-v1.*observation_space") as caught:
        load(path, env="gymnax:Acrobot-v1")
    assert len(caught.value.problems) == 2  # the actions too


def test_no_run_directory(tmp_path):
    raises(RunDirectoryError, "no config.json", load, tmp_path)


def test_directory_of_another_program(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "gpt", "format": 1}')
    raises(RunDirectoryError, "lacks algorithm", load, tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (None, "has format None"),
        (2, "has format 2, but this jaxrl reads format 1; use the version that wrote it"),
        ("1", "has format '1'"),
        (True, "has format True"),
    ],
)
def test_another_format_is_refused_in_a_line(changed, number, words):
    path = changed(lambda config: {k: v for k, v in (config | {"format": number}).items() if v is not None})
    (path / "checkpoints").unlink()
    with pytest.raises(RunDirectoryError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    raises(
        RunDirectoryError,
        words,
        jaxrl.train,
        ALGO,
        "gymnax:CartPole-v1",
        total_steps=60,
        num_envs=2,
        run_dir=path,
        progress=False,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": 3}, "no valid algorithm"),
        ({"algorithm": {"type": "torso:mlp"}}, "no valid algorithm"),
        ({"environment": "gymnax:CartPole-v1"}, "no valid environment"),
        ({"environment": {"suite": "gymnax"}}, "does not describe an environment"),
        ({"topology": {"type": "torso:mlp"}}, "no valid topology"),
        ({"total_steps": "many"}, "total_steps='many'"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind(changed, change, words):
    raises(ConfigError, words, load, changed(lambda config: config | change))


@pytest.mark.parametrize(("field", "value"), [("gamma", 7.0), ("gamma", "high"), ("batch_size", -1), ("network", 3)])
def test_fields_are_checked(changed, field, value):
    raises(
        ConfigError, field, load, changed(lambda config: config | {"algorithm": config["algorithm"] | {field: value}})
    )


def test_no_file_of_a_run_names_a_module(trained):
    _, path = trained
    texts = {file: file.read_text() for file in path.rglob("*.json*") if "state" not in file.parts}
    assert len(texts) >= 4
    for file, text in texts.items():
        named = set(re.findall(r"(?:jaxrl|gymnax|flax|optax)[.:][\w.:]+", text))
        assert named <= {"gymnax:CartPole"}, (file, named)


def test_run_without_checkpoint(trained, tmp_path):
    _, path = trained
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    raises(CheckpointError, "no checkpoint", load, tmp_path)


def test_step_that_is_not_there(trained):
    _, path = trained
    raises(CheckpointError, r"no checkpoint 7 .*\[32, 64\]", load, path, step=7)
    raises(ConfigError, "pass one of them", load, path, step=32, best=True)


def test_foreign_class_is_not_made_unless_handed_in(changed):
    path = changed(lambda config: config | {"algorithm": config["algorithm"] | {"type": "subprocess:Popen"}})
    raises(ConfigError, "not a registered name", load, path)
    assert load_run(path, algo=ALGO).step == 64
