"""Policies read back from run directories."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl import networks
from jaxrl.config import decode, encode
from jaxrl.envs.wrappers import FrameStack
from jaxrl.errors import CheckpointError, ConfigError, RunDirectoryError
from jaxrl.loading import load, load_run
from jaxrl.schedules import Linear

ALGO = jaxrl.DQN(
    epsilon=Linear(1.0, 0.1),
    capacity=64,
    min_size=8,
    batch_size=4,
    rollout_length=4,
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


def test_policy_read_back_equals_the_one_trained(trained):
    result, path = trained
    policy = load(path)
    assert jax.tree.structure(policy.algo) == jax.tree.structure(result.policy.algo)
    np.testing.assert_array_equal(jax.tree.leaves(policy.algo), jax.tree.leaves(result.policy.algo))
    for mine, theirs in zip(jax.tree.leaves(policy.actor), jax.tree.leaves(result.policy.actor), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    observations = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(policy(observations)[0], result.policy(observations)[0])


def test_schedules_are_those_of_the_checkpoint(trained):
    _, path = trained
    assert load(path).actor.exploration["epsilon"] == pytest.approx(0.1)
    middle = load_run(path, step=32)
    assert middle.step == 32
    assert middle.policy.actor.exploration["epsilon"] == pytest.approx(0.55)
    assert middle.algo == ALGO


def test_best_is_the_checkpoint_of_the_highest_evaluation(trained):
    result, path = trained
    scores = {row["step"]: row["evaluation/return_mean"] for row in result.metrics if "evaluation/return_mean" in row}
    assert load_run(path, best=True).step == max(scores, key=lambda step: (scores[step], step))


def test_saved_result_loads(trained, tmp_path):
    result, _ = trained
    run = load_run(result.save(tmp_path / "saved"))
    assert run.step == result.total_steps
    np.testing.assert_array_equal(jax.tree.leaves(run.policy.actor)[0], jax.tree.leaves(result.policy.actor)[0])
    with pytest.raises(CheckpointError, match="has a score"):
        load(tmp_path / "saved", best=True)


def test_another_environment_takes_its_place(trained):
    _, path = trained
    heavy = jaxrl.make("gymnax:CartPole-v1", gravity=20.0)
    assert jax.tree.leaves(load_run(path, env=heavy).env) == jax.tree.leaves(heavy)


def test_environment_that_does_not_fit_is_told_in_its_own_words(trained):
    _, path = trained
    with pytest.raises(ConfigError, match="Acrobot-v1 has observations .*trained on") as caught:
        load(path, env="gymnax:Acrobot-v1")
    assert len(caught.value.problems) == 2  # the actions too


def test_no_run_directory(tmp_path):
    with pytest.raises(RunDirectoryError, match="no config.json"):
        load(tmp_path)


def test_directory_of_another_program(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "gpt"}')
    with pytest.raises(RunDirectoryError, match="lacks algorithm"):
        load(tmp_path)


def test_run_without_checkpoint(trained, tmp_path):
    _, path = trained
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(tmp_path)


def test_step_that_is_not_there(trained):
    _, path = trained
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 .*\[32, 64\]"):
        load(path, step=7)
    with pytest.raises(ConfigError, match="give one of them"):
        load(path, step=32, best=True)


def test_foreign_class_is_not_made_unless_handed_in(trained, tmp_path):
    _, path = trained
    config = json.loads((path / "config.json").read_text())
    config["algorithm"]["type"] = "subprocess:Popen"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "checkpoints").symlink_to(path / "checkpoints")
    with pytest.raises(ConfigError, match="jaxrl.load"):
        load(tmp_path)
    assert load_run(tmp_path, algo=ALGO).step == 64


@pytest.mark.parametrize(
    "value",
    [
        jaxrl.spaces.Dict({"image": jaxrl.spaces.Box(0, 255, (2, 2, 1), np.uint8), "which": jaxrl.spaces.Discrete(3)}),
        jaxrl.spaces.MultiDiscrete((2, 3)),
        jaxrl.DQN(),
        jaxrl.PPO(
            learning_rate=Linear(1e-3, 0.0),
            network=networks.ActorCritic(
                torso=networks.DictEncoder({"image": networks.MinAtarCNN(), "which": None}), core=networks.LSTM(8)
            ),
        ),
        jaxrl.Anakin(num_envs=4, devices=2),
        {"a": (1, 2.5, float("inf"), None, True)},
    ],
)
def test_configuration_survives_json(value):
    assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "gymnax:Breakout-MinAtar", "gymnax:Pendulum-v1"])
def test_environment_survives_json(name):
    env = jaxrl.make(name, wrappers=[lambda e: FrameStack(e, 2)])
    back = decode(json.loads(json.dumps(encode(env))))
    assert jax.tree.structure(back) == jax.tree.structure(env)  # what is static, hence the same compiled program
    assert all(map(lambda a, b: jnp.asarray(a) == jnp.asarray(b), jax.tree.leaves(back), jax.tree.leaves(env)))
