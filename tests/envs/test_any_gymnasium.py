"""Gymnasium environments of other packages: composite spaces, wrappers by name, and the errors that lead a newcomer."""

import functools
import json
import shlex

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as foreign
from helpers.programs import NUM_ENVS, ROWS, all_finite
from helpers.refused import raises, refused

import jaxrl
from jaxrl.cli import main
from jaxrl.cli.environment import make_environment
from jaxrl.core import config, spaces
from jaxrl.core.errors import ConfigError, EnvironmentFailedError
from jaxrl.envs.host import worker_program

BOX = foreign.Box(-1, 1, (2,), np.float64)
SPACES = {
    "tuple": foreign.Tuple((foreign.Discrete(3, start=5), BOX)),
    "nested": foreign.Dict(b=foreign.Tuple((BOX, foreign.MultiBinary(2))), a=foreign.Discrete(2)),
    "integers": foreign.Box(0, 10, (3,), np.int64),
    "choices": foreign.MultiDiscrete([2, 3], start=[1, -1]),
    "bits": foreign.MultiBinary((2, 2)),
    "long tuple": foreign.Tuple([foreign.Discrete(i + 1) for i in range(11)]),  # "10" comes before "2"
}


class Shown(gymnasium.Env):
    """Draws observations of any space, and returns NumPy's scalars as many environments do."""

    def __init__(self, space="tuple", actions=None, length=3, render_mode=None):
        self.observation_space = SPACES[space] if isinstance(space, str) else space
        self.action_space = actions or foreign.Discrete(2, start=-1)
        self._length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._steps += 1
        return self._seen(), np.float64(0.5), np.bool_(self._steps >= self._length), np.bool_(False), {}

    def _seen(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.seen = self.observation_space.sample()
        return self.seen


class Doubled(gymnasium.RewardWrapper):
    def __init__(self, env, by=2.0):
        super().__init__(env)
        self._by = by

    def reward(self, reward):
        return self._by * reward


# --- composite spaces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
def test_observations_of_any_space_of_numbers(space):
    jaxrl.check_env(jaxrl.make(Shown, space=space), steps=8)


def test_a_tuple_is_a_dictionary_of_its_positions():
    env = Shown("long tuple")  # lent, so that what it gave can be seen
    recipe = jaxrl.make(env)
    assert recipe.observation_space == spaces.Dict({str(i): spaces.Discrete(i + 1) for i in range(11)})
    host = recipe.build(1, 0)
    for play in (host.reset, lambda: host.step(np.zeros(1, np.int32))):
        shown = play().observation
        assert [int(shown[str(i)][0]) for i in range(11)] == [int(x) for x in env.seen]
    host.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "tuple"
    result = jaxrl.train(
        jaxrl.PPO(rollout_length=ROWS, epochs=1, minibatches=1),
        Shown,
        total_steps=NUM_ENVS * ROWS,
        num_envs=NUM_ENVS,
        run_dir=path,
        evaluation_episodes=1,
        progress=False,
    )
    assert all_finite(result.state.learner)
    return path


def test_a_policy_reads_the_environments_own_tuples(trained):
    policy, env = jaxrl.load(trained, env=Shown), Shown()
    seen, _ = env.reset(seed=0)
    assert isinstance(seen, tuple) and seen[0] >= 5
    action, _ = policy(seen)
    ours = {"0": np.int32(seen[0] - 5), "1": np.float32(seen[1])}
    assert env.action_space.contains(action)
    named, _ = policy({"0": seen[0], "1": seen[1]})
    assert action == named and set(ours) == set(policy.spec.observation_space.spaces)
    batch, _ = policy((np.stack([seen[0]] * 3), np.stack([seen[1]] * 3)))
    assert list(batch) == [action] * 3


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (foreign.Text(5), "wrappers=FlattenObservation"),
        (foreign.Sequence(BOX), "your own gymnasium.ObservationWrapper"),
        (foreign.Graph(BOX, None), "your own gymnasium.ObservationWrapper"),
        (foreign.MultiDiscrete([[2, 3]]), "must be a vector.*wrappers=FlattenObservation"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_cannot_be_read_says_what_to_do(space, says):
    raises(ConfigError, says, jaxrl.make, Shown, space=space)


def test_a_text_among_numbers_is_left_out_by_the_command_that_the_error_shows():
    gymnasium.register("Mission-v0", Shown, kwargs={"space": foreign.Dict(mission=foreign.Text(9), x=BOX)})
    try:
        with pytest.raises(ConfigError, match="'mission'.*--env-params") as caught:
            jaxrl.make("gymnasium:Mission-v0")
        words = shlex.split(str(caught.value).partition("--env-params ")[2])
        assert make_environment("gymnasium:Mission-v0", words).observation_space == spaces.Dict(
            {"x": spaces.Box(-1.0, 1.0, (2,))}
        )
    finally:
        del gymnasium.registry["Mission-v0"]


# --- wrappers ----------------------------------------------------------------------------------------------------


STACKED = {"FrameStackObservation": {"stack_size": 3}}


@pytest.mark.parametrize(
    "wrappers",
    [
        {**STACKED, "FlattenObservation": {}},
        [["FrameStackObservation", {"stack_size": 3}], "FlattenObservation"],
        (
            functools.partial(gymnasium.wrappers.FrameStackObservation, stack_size=3),
            gymnasium.wrappers.FlattenObservation,
        ),
    ],
    ids=["table", "names", "classes"],
)
def test_wrappers_by_name_and_class_are_the_same_in_their_order(wrappers):
    recipe = jaxrl.make("gymnasium:CartPole-v1", wrappers=wrappers)
    assert recipe.observation_space.shape == (12,)
    assert recipe.parameters["wrappers"] == (("FrameStackObservation", {"stack_size": 3}), ("FlattenObservation", {}))
    again = config.decode(json.loads(json.dumps(config.encode(recipe))))
    assert again == recipe
    host = again.build(2, 0)
    assert host.reset().observation.shape == (2, 12)
    host.close()


def test_a_wrapper_of_a_module_in_workers():
    recipe = jaxrl.make("gymnasium:host_probes:Counting-v0", wrappers={"host_probes:Tripled": {}}, workers=1)
    host = recipe.build(1, 0)
    host.reset(), host.step(np.zeros(1, np.int32))
    assert host.step(np.zeros(1, np.int32)).reward.tolist() == [6.0]
    host.close()
    raises(
        ConfigError,
        "may set wrappers",
        recipe.restore,
        "Counting-v0",
        recipe.parameters,
        recipe.observation_space,
        recipe.action_space,
    )


def test_wrappers_of_a_class_that_is_passed():
    host = jaxrl.make(Shown, wrappers=functools.partial(Doubled, by=4.0)).build(1, 0)
    host.reset()
    assert host.step(np.zeros(1, np.int32)).reward.tolist() == [2.0]
    host.close()
    raises(ConfigError, "wrappers: .*already made", jaxrl.make, Shown(), wrappers="FlattenObservation")


# --- what a newcomer meets ---------------------------------------------------------------------------------------


def test_a_run_on_another_packages_environment_says_the_flags_that_load_it():
    options = {"length": 2, "wrappers": "FlattenObservation"}
    recipe = jaxrl.make("gymnasium:host_probes:Counting-v0", **options)
    with pytest.raises(ConfigError, match="a saved configuration must not") as caught:
        recipe.restore(recipe.id, recipe.parameters, recipe.observation_space, recipe.action_space)
    shell = str(caught.value).partition("in a shell ")[2].partition(", in Python")[0]
    flag, name, params, *words = shlex.split(shell)
    assert (flag, params) == ("--env", "--env-params") and make_environment(name, words) == recipe


def test_rewards_of_several_objectives_say_what_to_do():
    raises(
        EnvironmentFailedError,
        "gymnasium.RewardWrapper",
        jaxrl.make,
        Shown,
        wrappers={f"{__name__}:Doubled": {"by": np.ones(2)}},
    )


def test_envs_lists_the_constructors_arguments(capsys):
    assert main.main(["envs", "gymnasium:host_probes:Counting-v0"]) == 0
    said = capsys.readouterr().out
    assert "length" in said and "'terminated'" in said and "max_episode_steps" in said


def test_a_module_that_cannot_be_imported_is_an_error_in_one_line(tmp_path, monkeypatch):
    """Before, MuJoCo without its library of graphics ended commands with a traceback."""
    (tmp_path / "without_graphics.py").write_text("None.glGetError")
    monkeypatch.syspath_prepend(tmp_path)
    refused(lambda: jaxrl.make("gymnasium:without_graphics:Any-v0"), "AttributeError")


def test_what_is_registered_for_batches_alone_is_refused():
    gymnasium.register("OnlyVector-v0", vector_entry_point="gymnasium.vector:SyncVectorEnv")
    try:
        raises(ConfigError, "only registered as a vectorized environment", jaxrl.make, "gymnasium:OnlyVector-v0")
    finally:
        del gymnasium.registry["OnlyVector-v0"]


# --- packages that nobody here wrote -----------------------------------------------------------------------------


@pytest.mark.learning
def test_minigrid():
    """PPO solves Empty-5x5 (best 0.955, random near 0.2), one seed."""
    pytest.importorskip("minigrid")
    name = "gymnasium:minigrid:MiniGrid-Empty-5x5-v0"
    raises(ConfigError, "'mission'.*leave it out", jaxrl.make, name)
    env = jaxrl.make(name, wrappers="minigrid.wrappers:ImgObsWrapper")
    jaxrl.check_env(env, steps=120)
    result = jaxrl.train(jaxrl.PPO(), env, total_steps=150_000, explore_in_evaluation=True, progress=False)
    assert result.evaluation.return_mean > 0.8


PICTURES = {
    "ResizeObservation": {"shape": (84, 84)},
    "GrayscaleObservation": {},
    "FrameStackObservation": {"stack_size": 4},
}


@pytest.mark.learning
@pytest.mark.parametrize(
    ("package", "name", "algo", "parameters"),
    [
        ("minigrid", "minigrid:MiniGrid-Empty-5x5-v0", "ppo", {"wrappers": "minigrid.wrappers:ImgObsWrapper"}),
        ("highway_env", "highway_env:highway-fast-v0", "ppo", {"config": {"duration": 3}}),
        ("flappy_bird_gymnasium", "flappy_bird_gymnasium:FlappyBird-v0", "dqn", {"use_lidar": False}),
        ("Box2D", "LunarLander-v3", "ppo", {"max_episode_steps": 50}),
        ("ale_py", "ale_py:ALE/Pong-v5", "ppo", {"max_episode_steps": 30, "frameskip": 4, "wrappers": PICTURES}),
    ],
)
def test_a_package_is_trained_evaluated_rendered_and_loaded(package, name, algo, parameters, tmp_path):
    pytest.importorskip(package)
    env = jaxrl.make(f"gymnasium:{name}", **parameters)
    fields = {"min_size": 32} if algo == "dqn" else {"rollout_length": 16, "epochs": 1, "minibatches": 1}
    small = {"total_steps": 64, "num_envs": 2, "evaluation_episodes": 1, "evaluate_every": 0, "progress": False}
    jaxrl.train(jaxrl.make_algorithm(algo, **fields), env, **small, run_dir=tmp_path / "run")
    policy = jaxrl.load(tmp_path / "run", env=env)
    evaluated = jaxrl.evaluate(policy.algo, policy.actor, env, policy.spec, episodes=1).metrics()
    assert np.isfinite(evaluated["return_mean"])
    assert jaxrl.render(policy, path=tmp_path / "played.gif", max_steps=5).stat().st_size > 500
    wrappers = env.parameters.get("wrappers", ())
    own = worker_program.made(name.rpartition(":")[2], {k: x for k, x in parameters.items() if k != "wrappers"})
    for wrapper, arguments in wrappers:
        own = worker_program.wrapper(wrapper)(own, **arguments)
    observation, _ = own.reset(seed=0)
    action, _ = policy(observation)
    assert own.action_space.contains(action)


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward", "RecordVideo", "HumanRendering"])
def test_wrappers_that_a_file_cannot_ask_for(name):
    """They keep statistics that a resumed run loses, or write files and open windows, which a file must not ask for."""
    from jaxrl.envs.host.gymnasium import GymnasiumRecipe

    recipe = jaxrl.make("gymnasium:Pendulum-v1")
    spaces = recipe.observation_space, recipe.action_space
    raises(ConfigError, name, GymnasiumRecipe.restore, "Pendulum-v1", {"wrappers": ((name, {}),)}, *spaces)
    for spoiled in (5, "RecordVideo", (("FlattenObservation",),)):
        with pytest.raises(ConfigError):
            GymnasiumRecipe.restore("Pendulum-v1", {"wrappers": spoiled}, *spaces)


def test_arguments_of_wrappers_in_numpys_types_can_be_in_files():
    arguments = {"min_action": np.float32(-1.0), "max_action": np.float64(1.0)}
    recipe = jaxrl.make("gymnasium:Pendulum-v1", wrappers={"RescaleAction": arguments})
    assert recipe.parameters["wrappers"] == (("RescaleAction", {"min_action": -1.0, "max_action": 1.0}),)
