"""The Gymnasium adapter: rows, endings, types and misuse, in this process and in workers."""

import gymnasium
import host_probes
import numpy as np
import pytest
from gymnasium import spaces as foreign
from helpers.counted import assert_counted
from helpers.programs import DQN, NUM_ENVS, PPO, ROWS, all_finite
from helpers.refused import raises, refused

import jaxrl
from jaxrl.cli import main
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, EnvironmentFailedError
from jaxrl.core.host_types import WatchedEnvironment
from jaxrl.envs.host import conversion
from jaxrl.envs.host import gymnasium as adapter
from jaxrl.run.directory.loading import load_run

NAME = "gymnasium:host_probes:Counting-v0"


def play(host, steps, actions=None):
    actions = np.zeros(host.num_envs, np.int32) if actions is None else actions
    shown = [host.reset(), *(host.step(actions) for _ in range(steps))]
    host.close()
    return shown


@pytest.fixture(scope="module", params=[0, 2], ids=["in process", "workers"])
def counted(request):
    """Eight moments of three environments whose episodes have two steps."""
    return play(jaxrl.make(NAME, workers=request.param, length=2).build(3, 0), 7)


def test_rows(counted):
    assert_counted(counted)
    for timestep, shown in zip(counted, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]], strict=True):
        np.testing.assert_array_equal(timestep.observation, [shown] * 3)


@pytest.mark.parametrize(
    ("end", "flags"), [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, False))]
)
def test_endings(end, flags):
    last = play(jaxrl.make(NAME, length=2, end=end).build(1, 0), 2)[-1]
    assert (last.terminated[0], last.truncated[0]) == flags


def test_gymnasiums_time_limit_truncates():
    shown = play(jaxrl.make("gymnasium:Pendulum-v1", max_episode_steps=3).build(2, 0), 4, np.zeros((2, 1)))
    assert [timestep.truncated.all() for timestep in shown] == [False, False, False, True, False]
    assert [timestep.first.all() for timestep in shown] == [True, False, False, False, True]


# --- seeds -------------------------------------------------------------------------------------------------------


def test_seeds_do_not_depend_on_workers_or_on_how_many_there_are():
    def observations(num_envs, seed, workers=0):
        recipe = jaxrl.make("gymnasium:CartPole-v1", workers=workers)
        # Long enough for second episodes, which no seed is given to.
        return np.stack([timestep.observation for timestep in play(recipe.build(num_envs, seed), 30)])

    alone = observations(3, 0)
    np.testing.assert_array_equal(alone, observations(3, 0, workers=2))
    np.testing.assert_array_equal(alone[:, :2], observations(2, 0))
    both = np.concatenate([alone[0], observations(3, 1)[0]])
    assert len(np.unique(both, axis=0)) == 6


# --- spaces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "element", "read"),
    [
        (foreign.Discrete(3, start=-1), spaces.Discrete(3), -1, 0),
        (foreign.MultiDiscrete([2, 3], start=[5, 0]), spaces.MultiDiscrete((2, 3)), [6, 2], [1, 2]),
        (foreign.MultiBinary(2), spaces.Box(False, True, (2,), np.bool_), [1, 0], [True, False]),
        (foreign.Box(-1e39, 2.0, (1,), np.float64), spaces.Box(-np.inf, 2.0, (1,)), [1.5], [1.5]),
        (foreign.Box(0, 2**40, (1,), np.int64), spaces.Box(0, 2**31 - 1, (1,), np.int32), [7], [7]),
        (
            foreign.Box(0, 255, (1, 1, 3), np.uint8),
            spaces.Box(0, 255, (1, 1, 3), np.uint8),
            [[[1, 2, 3]]],
            [[[1, 2, 3]]],
        ),
        (
            foreign.Dict(b=foreign.Discrete(2), a=foreign.Dict(c=foreign.Box(0, 1, (1,)))),
            spaces.Dict({"a": spaces.Dict({"c": spaces.Box(0.0, 1.0, (1,))}), "b": spaces.Discrete(2)}),
            {"b": 1, "a": {"c": [0.5]}},
            {"b": 1, "a": {"c": [0.5]}},
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_observation_spaces(theirs, ours, element, read):
    got = conversion.observations(theirs, "it")
    assert got.space == ours
    for _, space, value, expected in spaces.leaves_with_path(ours, got.convert(element), read):
        assert value.dtype == space.dtype and value.shape == space.shape
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("theirs", "ours", "action", "written"),
    [
        (foreign.Discrete(3, start=4), spaces.Discrete(3), 2, 6),
        (foreign.MultiDiscrete([2, 3], start=[5, 0]), spaces.MultiDiscrete((2, 3)), [1, 2], [6, 2]),
        (foreign.MultiBinary(2), spaces.MultiDiscrete((2, 2)), [1, 0], [1, 0]),
        (foreign.Box(-1, 1, (2,), np.float64), spaces.Box(-1.0, 1.0, (2,)), [-3.0, 0.5], [-1.0, 0.5]),
        (foreign.Box(-np.inf, 1, (1,)), spaces.Box(-np.inf, 1.0, (1,)), [3.0], [1.0]),
        (
            foreign.Box(np.int32([-1, 0]), np.int32([1, 4]), dtype=np.int32),
            spaces.MultiDiscrete((3, 5)),
            [0, 4],
            [-1, 4],
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_action_spaces(theirs, ours, action, written):
    got = conversion.actions(theirs, "it")
    assert got.space == ours
    value = got.convert(np.asarray(action))
    np.testing.assert_array_equal(value, written)
    assert value.dtype == theirs.dtype


@pytest.mark.parametrize("workers", [0, 1], ids=["in process", "workers"])
def test_actions_of_several_parts(workers):
    """An environment that checks what it is given and shows it."""
    recipe = jaxrl.make("gymnasium:host_probes:Parts-v0", workers=workers)
    parts = spaces.Tuple((spaces.MultiDiscrete((2, 2)), spaces.Discrete(2)))
    speed = spaces.Box(-1.0, 2.0, (2,))
    assert recipe.action_space == spaces.Dict({"gear": spaces.Discrete(3), "lights": parts, "speed": speed})
    host = recipe.build(2, 0)
    host.reset()
    actions = {
        "speed": np.float32([[0.5, 9.0], [-1.0, 0.0]]),
        "gear": np.int32([2, 1]),
        "lights": (np.int32([[0, 1], [1, 1]]), np.int32([0, 1])),
    }
    shown = host.step(actions)
    assert shown.observation.tolist() == [[0.5, 2.0, 2.0, 0.0, 1.0, 1.0], [-1.0, 0.0, 1.0, 1.0, 1.0, 2.0]]
    assert shown.reward.tolist() == [1.0, 0.0]
    raises(ValueError, r"shape \(1,\); use \(2,\)", host.step, actions | {"gear": np.int32([1])})
    host.close()


@pytest.mark.parametrize(
    ("convert", "space", "message"),
    [
        (conversion.observations, foreign.Text(3), "observation space Text.*FlattenObservation"),
        (conversion.observations, foreign.Dict(a=foreign.Text(3)), r"it\['a'\] has the observation space Text"),
        (conversion.observations, foreign.MultiDiscrete([[2, 3]]), "must be a vector"),
        (conversion.array_actions, foreign.Dict(a=foreign.Discrete(2)), "space Dict.*ActionWrapper.*MultiBinary$"),
        (conversion.actions, foreign.Dict(a=foreign.Tuple([foreign.Text(3)])), r"it\['a'\]\[0\] has the action space"),
        (conversion.actions, foreign.Box(0, 3, (2, 2), np.int32), "action space Box.* or a Dict or Tuple of these"),
    ],
)
def test_spaces_that_are_refused_by_name(convert, space, message):
    raises(ConfigError, message, convert, space, "it")


# --- misuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"), [(NAME, {}), (NAME, {"workers": 1}), ("envpool:CartPole-v1", {"num_threads": 1})]
)
def test_misuse_and_closing(name, parameters):
    recipe = jaxrl.make(name, **parameters)
    recipe.build(1, 0).close()  # before it began
    host = recipe.build(2, 0)
    raises(RuntimeError, "before it was reset", host.step, np.zeros(2, np.int32))
    host.reset()
    raises(ValueError, r"shape \(3,\).*use \(2,\)", host.step, np.zeros(3, np.int32))
    again = host.reset()
    assert again.first.all() and not again.episode.returns.any()
    if name == NAME:
        np.testing.assert_array_equal(again.observation, [[1, 0], [1, 0]])
    assert isinstance(host, WatchedEnvironment) and host.doing == "" and host.failures == 0
    host.close()
    host.close()
    for call in (host.reset, lambda: host.step(np.zeros(2, np.int32))):
        raises(RuntimeError, "was closed", call)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"workers": -1}, "workers=-1 must be at least 0"),
        ({"restarts": 2}, "restarts=2 needs workers"),
        ({"step_timeout": 5.0}, "step_timeout=5.0 needs workers"),
        ({"workers": 1, "step_timeout": 0}, "step_timeout=0 must be more than 0"),
        ({"workers": 1, "start_timeout": -1.0}, "start_timeout=-1.0 must be more than 0"),
        ({"workers": 1, "restarts": -1}, "restarts=-1 must be at least 0"),
        ({"lenth": 3}, r"cannot be made with lenth=3: unknown options \{'lenth': 3\}"),
    ],
)
def test_wrong_parameters(parameters, message):
    raises(ConfigError, message, jaxrl.make, NAME, **parameters)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("surely_not_installed", "'surely_not_installed'$"),  # whose package only the user may know
        ("Box2D", r"'Box2D'; pip install 'gymnasium\[box2d\]'$"),
    ],
)
def test_a_package_that_an_environment_misses_is_named(module, said):
    def needs_it():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    gymnasium.register("Needy-v0", entry_point=needs_it)
    try:
        with pytest.raises(ConfigError, match=said):
            jaxrl.make("gymnasium:Needy-v0").build(1, 0)
    finally:
        del gymnasium.registry["Needy-v0"]


def test_names():
    known = adapter.names()
    assert {"CartPole-v1", "LunarLander-v3", "Ant-v5", "Counting-v0"} <= set(known)
    assert not {"CartPole-v0", "LunarLander-v2", "Ant-v4", "GymV21Environment-v0"} & set(known)
    refused(lambda: jaxrl.make("gymnasium:host_probes:Countin-v0"), "did you mean 'Counting-v0'")
    refused(lambda: jaxrl.make("gymnasium:no_such_module:Counting-v0"), "'no_such_module'")
    refused(lambda: jaxrl.make(NAME).build(0, 0), "num_envs=0")


def test_workers_need_environments_that_they_can_import(monkeypatch):
    gymnasium.register("Lambda-v0", entry_point=lambda: host_probes.Counting())
    gymnasium.register("Main-v0", entry_point=host_probes.Counting)
    try:
        raises(ConfigError, "within a function.*workers=0", jaxrl.make, "gymnasium:Lambda-v0", workers=1)
        monkeypatch.setattr(host_probes.Counting, "__module__", "__main__")
        raises(ConfigError, "main program.*workers=0", jaxrl.make, "gymnasium:Main-v0", workers=1)
        assert jaxrl.make("gymnasium:Main-v0").build(1, 0).reset().first.all()
    finally:
        del gymnasium.registry["Lambda-v0"], gymnasium.registry["Main-v0"]


@pytest.mark.parametrize("workers", [0, 1], ids=["in process", "workers"])
def test_options_of_a_file_that_the_environment_does_not_know(workers):
    made = jaxrl.make("gymnasium:CartPole-v1", workers=workers)
    recipe = adapter.GymnasiumRecipe.restore(
        "CartPole-v1", {"nonsense": 1, "workers": workers}, made.observation_space, made.action_space
    )
    raises(EnvironmentFailedError, r"(?s)CartPole-v1.*nonsense", recipe.build, 1, 0)


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("name", "algo"), [("gymnasium:CartPole-v1", DQN), ("envpool:CartPole-v1", PPO)])
def test_a_run_is_trained_and_its_environment_is_read_back_and_evaluated(name, algo, tmp_path):
    env, run = jaxrl.make(name, max_episode_steps=12), tmp_path / "run"
    settings = {"num_envs": NUM_ENVS, "evaluation_episodes": 4, "run_dir": run, "progress": False}
    result = jaxrl.train(algo, env, total_steps=6 * ROWS, **settings)
    assert all_finite(result.state.learner) and result.evaluation.lengths.max() <= 12
    last = [row for row in result.metrics if "train/episodes" in row][-1]
    # Every row is a transition but for the last rows of episodes, of which each environment has at least three.
    assert 0 < last["train/transitions"] <= 6 * ROWS - 3 * NUM_ENVS
    assert load_run(run).env == env
    assert main.main(["eval", str(run), "--episodes", "4"]) == 0
