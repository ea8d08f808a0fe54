"""Gymnasium environments passed by a program: an instance, a class, or a function that makes one."""

import functools
import pickle

import gymnasium
import host_probes
import numpy as np
import pytest
from gymnasium import spaces as foreign
from helpers.programs import SMALL
from helpers.refused import raises, refused
from helpers.strict_json import read_json

import jaxrl
from jaxrl import envs, networks
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError
from jaxrl.core.host_types import only_instance
from jaxrl.envs.configs import to_config
from jaxrl.run.directory.loading import load_run

COUNTING = "gymnasium:host_probes.Counting"


class Pick(gymnasium.Env):
    """Shows its size; the reward is the action; ends after four steps."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = foreign.Box(-10.0, 10.0, (1,), np.float32)
    action_space = foreign.Discrete(2)
    closed = False

    def __init__(self, size=1, render_mode=None):
        self.size, self.render_mode = size, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.array([self.size], np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.array([self.size], np.float32), float(action), self.steps == 4, False, {}

    def render(self):
        return np.full((8, 8, 3), self.steps, np.uint8) if self.render_mode == "rgb_array" else None

    def close(self):
        self.closed = True


gymnasium.register("PassedPick-v0", Pick, max_episode_steps=3)
PICK = f"gymnasium:{__name__}.Pick"


class Doubled(gymnasium.RewardWrapper):
    """A wrapper that does not say how to make it again."""

    def reward(self, reward):
        return 2.0 * reward


class Shifted(gymnasium.RewardWrapper, gymnasium.utils.RecordConstructorArgs):
    """A wrapper that does."""

    def __init__(self, env, by):
        gymnasium.utils.RecordConstructorArgs.__init__(self, by=by)
        super().__init__(env)
        self.by = by

    def reward(self, reward):
        return reward + self.by


def played(recipe, num_envs=2, steps=4):
    """Observations, rewards and endings of actions 1."""
    host = recipe.build(num_envs, 0)
    try:
        shown = [host.reset(), *(host.step(np.ones(num_envs, np.int32)) for _ in range(steps))]
    finally:
        host.close()
    assert all(timestep.reward.shape == (num_envs,) for timestep in shown)
    return [(*map(float, t.observation[0]), float(t.reward[0]), bool(t.last[0])) for t in shown]


FOUR = [(1.0, 0.0, False), *[(1.0, 1.0, False)] * 3, (1.0, 1.0, True)]


@pytest.mark.parametrize(
    ("passed", "size"),
    [
        (Pick, 1),
        (lambda: Pick(), 1),
        (lambda: Pick(3), 3),
        (functools.partial(Pick, 2), 2),
        (functools.partial(Pick, size=2), 2),
    ],
    ids=["class", "lambda", "lambda with a value", "partial", "partial by name"],
)
def test_classes_and_functions_make_every_environment(passed, size):
    recipe = envs.as_environment(passed)
    assert recipe.name == PICK and only_instance(recipe) is None
    assert played(recipe) == [(float(size), *rest) for _, *rest in FOUR]
    assert played(recipe) == played(recipe, num_envs=1)
    jaxrl.check_env(passed, steps=6)


def test_make_takes_arguments_and_workers():
    assert played(jaxrl.make(Pick, size=2))[0][0] == 2.0
    recipe = jaxrl.make(host_probes.Counting, workers=1, length=2)
    assert recipe.name == COUNTING and recipe.options == {"length": 2}
    host = recipe.build(2, 0)
    host.reset()
    shown = host.step(np.zeros(2, np.int32))
    host.close()
    assert shown.observation.tolist() == [[0, 1], [0, 1]]


def test_functions_by_name_have_their_own():
    def small():
        return Pick(1)

    assert envs.as_environment(small).name == PICK.replace("Pick", "test_functions_by_name_have_their_own.small")


def test_instances_with_a_spec_are_made_again():
    """One that is registered is the same as by its name, for config.json too; wrappers come along."""
    plain = envs.as_environment(gymnasium.make("PassedPick-v0", size=2))
    assert to_config(plain) == to_config(jaxrl.make("gymnasium:PassedPick-v0", size=2))
    limited = envs.as_environment(gymnasium.make("PassedPick-v0", max_episode_steps=2))
    assert to_config(limited) == to_config(jaxrl.make("gymnasium:PassedPick-v0", max_episode_steps=2))
    assert [row[-1] for row in played(limited)] == [False, False, True, False, False]
    wrapped = envs.as_environment(Shifted(gymnasium.make("PassedPick-v0", size=2), 5.0))
    assert wrapped.name == PICK and only_instance(wrapped) is None
    assert played(wrapped, steps=3) == [(2.0, 0.0, False), (2.0, 6.0, False), (2.0, 6.0, False), (2.0, 6.0, True)]
    unlimited = envs.as_environment(gymnasium.make("PassedPick-v0").unwrapped)
    assert played(unlimited) == FOUR, "the limit of three steps was taken away"


def test_instances_without_a_spec_are_lent():
    for env in (Pick(1), Doubled(gymnasium.make("PassedPick-v0")), Doubled(Pick(1))):
        recipe = envs.as_environment(env)
        assert recipe.name == PICK and only_instance(recipe) is env
        factor = 2.0 if isinstance(env, Doubled) else 1.0
        for _ in range(2):
            assert [row[1] for row in played(recipe, 1, 3)] == [0.0, factor, factor, factor]
        assert not env.unwrapped.closed, "it is the user's to close"
        raises(ConfigError, "two .* same time.* class Pick", recipe.build, 2, 0)
        first = recipe.build(1, 0)
        with pytest.raises(ConfigError, match="two are needed"):
            envs.as_environment(Doubled(env)).build(1, 0)
        first.close()
        jaxrl.check_env(env, steps=6)
        raises(ConfigError, "copied to another process", pickle.dumps, recipe)


SAME = Pick(1)


@pytest.mark.parametrize(
    ("passed", "settings", "says"),
    [
        (lambda: gymnasium.make_vec("PassedPick-v0", 2), {}, "returned a SyncVectorEnv; .*, and set num_envs=N"),
        (
            gymnasium.make_vec("PassedPick-v0", 2),
            {},
            "SyncVectorEnv is a vectorized environment; pass 'gymnasium:PassedPick-v0', and num_envs=N; workers=M",
        ),
        (gymnasium.vector.SyncVectorEnv, {}, "SyncVectorEnv is a vectorized environment; pass the class of one"),
        (lambda: 3, {}, "it returned a int; return one gymnasium.Env"),
        (lambda size: Pick(size), {}, "missing 1 required positional argument: 'size'"),
        (Pick, {"width": 3}, "cannot be made with width=3"),
        (Pick(), {"size": 3}, "was already made; pass its class or a function instead"),
        (Pick(), {"workers": 2}, "workers=2: .* is a single environment, .* pass the class Pick"),
        (lambda: Pick(), {"workers": 2}, "where workers cannot import it; move it to a module, or use workers=0"),
        (Pick, {"hide": 1}, "is not a JAX environment and does not support hide"),
    ],
)
def test_refusals(passed, settings, says):
    raises(ConfigError, says, jaxrl.make, passed, **settings)


def test_a_function_that_gives_the_same_again():
    recipe = envs.as_environment(lambda: SAME)
    refused(lambda: recipe.build(2, 0), "the same environment twice")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"num_envs=8: .* lambda: Pick\(\.\.\.\)"),
        ({"eval_env": Pick, "num_envs": 3}, "num_envs=3"),
        ({"num_envs": 1}, "evaluation needs another one; pass eval_env="),
        ({"num_envs": 1, "eval_env": Doubled(SAME)}, "evaluation needs another one; pass eval_env="),
    ],
)
def test_training_says_what_an_instance_lacks(settings, says):
    raises(ConfigError, says, jaxrl.train, jaxrl.PPO(), SAME, total_steps=64, progress=False, **settings)


def test_compiled_sweeps_say_that_it_is_on_the_host():
    raises(ConfigError, f"{PICK} is stepped on the host", jaxrl.sweep, "ppo", Pick, total_steps=64, progress=False)


ALGO = jaxrl.DQN(
    rollout_length=8, min_size=16, batch_size=8, capacity=64, replay_ratio=1 / 8, network=networks.QNetwork(torso=SMALL)
)
SETTINGS = {"total_steps": 64, "evaluate_every": 32, "evaluation_episodes": 3, "progress": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two training runs' results and the directory of the first: of a class, and of an instance."""
    path = tmp_path_factory.mktemp("passed") / "run"
    of_class = jaxrl.train(ALGO, Pick, num_envs=1, run_dir=path, **SETTINGS)
    of_instance = jaxrl.train(ALGO, Pick(), num_envs=1, eval_env=Pick(), **SETTINGS)
    return path, of_class, of_instance


@pytest.mark.long
def test_training(run):
    path, of_class, of_instance = run
    assert of_class.metrics[-1]["step"] == of_instance.metrics[-1]["step"] == 64
    assert of_class.evaluation.episodes == of_instance.evaluation.episodes == 3
    assert of_class.evaluation.return_mean == of_instance.evaluation.return_mean
    config = read_json(path / "config.json")["environment"]
    assert f"{config['suite']}:{config['name']}" == PICK
    again = jaxrl.train(ALGO, lambda: Pick(), num_envs=1, run_dir=path, **SETTINGS)
    assert again.metrics[-1]["step"] == 64, "it is the same run, which has ended"


@pytest.mark.long
def test_loading_and_evaluating(run, capsys):
    path, of_class, _ = run
    policy = jaxrl.load(path)  # needs no environment
    for env in (Pick, Pick(), lambda: Pick()):
        found = jaxrl.evaluate(policy.algo, policy.actor, env, policy.spec, episodes=2)
        assert found.episodes == 2 and found.return_mean == of_class.evaluation.return_mean
    assert load_run(path, env=Pick).env.factory.function is Pick
    assert main.main(["eval", str(path)]) != 0
    told = capsys.readouterr().err.strip()
    assert "pass it again: env=" in told and "--import MODULE --env gymnasium:ID" in told
    assert main.main(["eval", str(path), "--env", "gymnasium:PassedPick-v0", "--episodes", "2"]) == 0


def test_rendering(run, tmp_path):
    policy = run[1].policy
    assert jaxrl.render(policy, Pick, tmp_path / "class.gif").stat().st_size
    assert jaxrl.render(policy, Pick(render_mode="rgb_array"), tmp_path / "instance.gif").stat().st_size
    refused(lambda: jaxrl.render(policy, lambda: Pick(), tmp_path / "function.gif"), "has no render mode 'rgb_array'")
