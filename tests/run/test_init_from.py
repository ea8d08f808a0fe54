"""A run that begins with what another one has learned: what is taken over, what is refused, and how it resumes."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from helpers import programs
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, assert_equal
from helpers.refused import raises
from helpers.strict_json import read_json

import jaxrl
from jaxrl import networks
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.core.schedules import Linear
from jaxrl.core.types import env_spec
from jaxrl.run.directory.init_from import load_initial, recorded_parent
from jaxrl.run.directory.loading import load_run

# Schedules as PPO's own is, and so all train with the program of many other tests.
FROZEN = PPO.replace(learning_rate=Linear(1e-30, 1e-30))  # what it begins with stays
STEADY = PPO.replace(learning_rate=Linear(1e-2, 1e-2))  # the same, however long the run is
HEAVY = jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=12, gravity=20.0)
SMALL = {"widths": (8,)}
PENDULUM = env_spec(jaxrl.make("gymnax:Pendulum-v1"))


def train(algo=PPO, env=ENV, total_steps=2 * ROWS, **settings):
    settings = {"evaluate_every": 0, "checkpoint_every": ROWS, "evaluation_episodes": 2} | settings
    return programs.train(algo=algo, env=env, total_steps=total_steps, **settings)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "parent"
    return train(run_dir=path), path


@pytest.mark.long
@pytest.mark.parametrize("kind", ["run", "checkpoint", "policy", "learner"])
def test_parameters_are_taken_over(parent, kind):
    before, path = parent
    first = path / "checkpoints" / f"{ROWS:012d}"
    source = {"run": path, "checkpoint": first, "policy": before.policy, "learner": before.state.learner}[kind]
    result = train(FROZEN, HEAVY, total_steps=ROWS, init_from=source, seed=3)
    expected = load_run(path, step=ROWS if kind == "checkpoint" else None).policy.actor.params
    assert_equal(result.policy.actor.params, expected, tolerance=1e-20)
    assert result.total_steps == ROWS


@pytest.mark.long
def test_learning_goes_on_with_the_optimizer_it_had(parent):
    before, path = parent
    initial = load_initial(path, PPO, ENV, env_spec(ENV))
    assert initial.parent["taken"] == ["network", "updates"] and initial.parent["fresh"] == []
    fresh = jax.tree.map(jnp.zeros_like, before.state.learner)
    assert_equal(initial.into(fresh, lambda tree: tree), before.state.learner)


def test_another_optimizer_begins_afresh(parent):
    _, path = parent
    other = PPO.replace(optimizer=jaxrl.algos.optimizers.RMSProp())
    said = load_initial(path, other, ENV, env_spec(ENV)).parent
    assert said["taken"] == ["network.params", "updates"] and said["fresh"] == ["network.optimizer_state"]


def learner(algo, spec=PENDULUM):
    algo = algo.resolve(spec, 1)
    return algo, algo.init(jax.random.key(1), spec)


@pytest.mark.long
def test_offline_first_and_then_online():
    """Critics with their targets, policy and their optimizers; what the other algorithm lacks begins afresh."""
    settings = {"policy": networks.Actor(**SMALL), "critic": networks.Critic(**SMALL)}
    env = jaxrl.make("gymnax:Pendulum-v1")
    for offline, online, fresh in (
        (jaxrl.TD3BC(**settings, normalize_observation=False), jaxrl.TD3(**settings), []),
        (jaxrl.CQL(**settings), jaxrl.SAC(**settings), []),
        (jaxrl.IQL(**settings), jaxrl.SAC(**settings), ["policy.optimizer_state", "log_temperature"]),
        (jaxrl.SAC(**settings), jaxrl.GAIL(**settings), ["discriminator"]),
    ):
        _, before = learner(offline)
        algo, after = learner(online)
        initial = load_initial(before, algo, env, PENDULUM)
        assert initial.parent["fresh"] == fresh, type(offline).__name__
        made = initial.into(after, lambda tree: tree)
        for part in ("policy", "critic"):
            assert_equal(getattr(made, part).params, getattr(before, part).params)
            assert_equal(getattr(made, part).target_params, getattr(before, part).target_params)


@pytest.mark.long
def test_targets_follow_a_policy():
    settings = {"policy": networks.Actor(**SMALL), "critic": networks.Critic(**SMALL)}
    algo, before = learner(jaxrl.TD3(**settings))
    policy = jaxrl.Policy(algo, algo.actor(jax.tree.map(lambda x: x + jnp.ones_like(x), before)), PENDULUM)
    initial = load_initial(policy, algo, jaxrl.make("gymnax:Pendulum-v1"), PENDULUM)
    made = initial.into(before, lambda tree: tree)
    assert_equal(made.policy.params, policy.actor.params)
    assert_equal(made.policy.target_params, policy.actor.params)
    assert_equal(made.critic, before.critic)
    assert "critic" in initial.parent["fresh"] and "policy.params" in initial.parent["taken"]


# --- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "env", "words"),
    [
        (
            PPO.replace(network=networks.ActorCritic(torso=networks.MLP((8,)))),
            ENV,
            r"stored as float32.*, expected float32\[4, 8\]",
        ),
        (
            PPO.replace(network=networks.ActorCritic(torso=networks.MLP((16, 16)))),
            ENV,
            "leaf .* is missing",
        ),
        (PPO.replace(normalize_observation=True), ENV, "normalizes less .*use its normalize_observation"),
        (PPO, "gymnax:Acrobot-v1", "observation_space .* trained on"),
        (jaxrl.DQN(network=networks.QNetwork(torso=networks.MLP((16,))), capacity=2048), ENV, "does not fit this DQN"),
    ],
    ids=["width", "depth", "statistics", "spaces", "algorithm"],
)
def test_what_does_not_fit_is_told_before_it_compiles(parent, algo, env, words):
    before, path = parent
    for source in (path, before.policy, before.state.learner):
        if source is before.state.learner and ("space" in words or "normalize" in words):
            continue  # a learner state alone does not know its environment, nor what its statistics are for
        raises(ConfigError, words, train, algo, env, init_from=source)


def test_what_is_none(parent, tmp_path):
    before, _ = parent
    for wrong in (3, "", before, [], {"a": "b"}):
        raises(ConfigError, "is empty|is not a run", train, init_from=wrong)
    raises(RunDirectoryError, "is not a run directory", train, init_from=tmp_path / "nothing")


# --- its files -----------------------------------------------------------------------------------------------------


def test_it_names_its_parent_and_resumes_bit_for_bit(parent, tmp_path):
    _, original = parent
    path, copy = tmp_path / "child", tmp_path / "parent"
    shutil.copytree(original, copy)
    whole = train(STEADY, HEAVY, total_steps=4 * ROWS, init_from=copy)
    train(STEADY, HEAVY, init_from=copy, run_dir=path)
    named = read_json(path / "config.json")["parent"]
    assert named["run"] == str(copy) and named["step"] == 2 * ROWS and named["algorithm"] == "PPO"
    assert "network" in named["taken"] and named["fresh"] == []
    shutil.rmtree(copy)  # it has what it needs
    resumed = train(STEADY, HEAVY, total_steps=4 * ROWS, init_from=copy, run_dir=path)
    assert_equal(resumed.state, whole.state)
    raises(RunDirectoryError, r"parent: .*-> \(absent\)", train, STEADY, HEAVY, total_steps=4 * ROWS, run_dir=path)
    raises(RunDirectoryError, "parent", train, STEADY, HEAVY, total_steps=4 * ROWS, run_dir=path, init_from=original)


@pytest.mark.parametrize("change", [{"taken": [1]}, {"fresh": [None]}, {"step": "x"}, {"taken": ["\x1b[2J"]}])
def test_a_parent_that_jaxrl_did_not_write_is_another_configuration(parent, tmp_path, change):
    _, original = parent
    path = shutil.copytree(original, tmp_path / "child")
    config = read_json(path / "config.json")
    named = {"run": str(original), "step": 2 * ROWS, "taken": ["network"], "fresh": []}
    (path / "config.json").write_text(json.dumps(config | {"parent": named}))
    assert recorded_parent(path, original) == named
    (path / "config.json").write_text(json.dumps(config | {"parent": named | change}))
    assert recorded_parent(path, original) is None


@pytest.mark.long
def test_a_parent_that_goes_on_does_not_change_a_child_that_was_killed_early(parent, tmp_path):
    """Before its first checkpoint it takes the parent's step that it took."""
    _, original = parent
    path, copy = tmp_path / "child", tmp_path / "parent"
    shutil.copytree(original, copy)
    whole = train(env=HEAVY, init_from=copy, run_dir=path)
    shutil.rmtree(path / "checkpoints")
    for name in ("metrics.jsonl", "metrics.csv", "result.json"):
        (path / name).unlink()
    (path / "checkpoints").mkdir()
    train(total_steps=3 * ROWS, run_dir=copy)
    again = train(env=HEAVY, init_from=copy, run_dir=path)
    assert_equal(again.state, whole.state)


@pytest.mark.long
def test_on_several_devices(parent):
    before, path = parent
    topology = jaxrl.Anakin(num_envs=NUM_ENVS, devices=2)
    result = train(FROZEN, total_steps=ROWS, topology=topology, init_from=path)
    assert_equal(result.policy.actor.params, before.policy.actor.params, tolerance=1e-20)
