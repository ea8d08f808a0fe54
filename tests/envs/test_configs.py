"""Environments survive being written as JSON and read back, and no file has a module imported or a class made."""

import functools
import json
import warnings

import gymnasium
import jax
import numpy as np
import pytest
from flax import struct
from helpers.played import played
from helpers.processes import python
from helpers.refused import raises
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl import envs
from jaxrl.core import config
from jaxrl.core.errors import ConfigError
from jaxrl.envs import wrappers
from jaxrl.envs.configs import from_config, full_name, to_config
from jaxrl.envs.probes import Probe
from jaxrl.run.loop.run_loop import Loop


def there_and_back(env):
    return from_config(json.loads(json.dumps(to_config(env), allow_nan=False)))


ENVIRONMENTS = {
    "cartpole": lambda: jaxrl.make("gymnax:CartPole-v1"),
    "parameters": lambda: jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=7, gravity=3.5),
    "constructor": lambda: jaxrl.make("gymnax:DeepSea-bsuite", size=4),
    "minatar": lambda: jaxrl.make("gymnax:Breakout-MinAtar"),
    "pooled": lambda: jaxrl.make("gymnax:MountainCar-v0", auto_reset="pooled"),
    "wrapped": lambda: jaxrl.make(
        "gymnax:Pendulum-v1",
        wrappers=(
            lambda env: wrappers.TimeLimit(env, 9),
            lambda env: wrappers.ActionRepeat(env, 2),
            lambda env: wrappers.FrameStack(env, 3),
        ),
    ),
    "probe": lambda: jaxrl.make("probe:Truncated", continuous=True),
    "arrays": lambda: jaxrl.make("gymnax:DiscountingChain-bsuite"),
    "brax": lambda: jaxrl.make("brax:fast", episode_length=5),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name):
    """What comes back is the same environment: the same program, name and spaces, and the same episodes."""
    env = ENVIRONMENTS[name]()
    back = there_and_back(env)
    assert jax.tree.structure(back) == jax.tree.structure(env)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(env), strict=True):
        np.testing.assert_array_equal(one, other)
    assert back.name == env.name
    assert back.observation_space == env.observation_space and back.action_space == env.action_space
    jax.tree.map(np.testing.assert_array_equal, *(played(one, None, jax.random.key(0), 12) for one in (env, back)))
    assert envs.prepared(back) is not None


def test_a_file_holds_the_suite_the_name_and_numbers():
    config = to_config(jaxrl.make("gymnax:CartPole-v1", gravity=3.5))
    assert (config["suite"], config["name"]) == ("gymnax", "CartPole-v1") and full_name(config) == "gymnax:CartPole-v1"
    assert config["parameters"]["gravity"] == 3.5 and config["parameters"]["max_steps_in_episode"] == 500
    assert config["wrappers"] == [{"type": "wrapper:episodestatistics"}, {"type": "wrapper:autoreset"}]
    assert "gymnax." not in json.dumps(config) and "jaxrl" not in json.dumps(config)


HOSTS = {
    "gymnasium": ("gymnasium:CartPole-v1", {"max_episode_steps": 7, "workers": 2, "restarts": 0, "info": ("a", "b")}),
    "envpool": ("envpool:CartPole-v1", {"max_episode_steps": 7}),
    "atari": ("envpool:Pong-v5", {"preset": "classic"}),
}


@pytest.mark.parametrize("name", HOSTS)
def test_recipes(name):
    env, parameters = HOSTS[name]
    recipe = jaxrl.make(env, **parameters)
    back = there_and_back(recipe)
    assert back == recipe and type(back) is type(recipe) and back.name == env


class Corridor(struct.PyTreeNode):
    """An environment of a user's own."""

    probe: Probe = Probe(reward=1.0)
    length: int = struct.field(pytree_node=False, default=3)

    name, resets = "corridor", False
    observation_space, action_space = Probe().observation_space, Probe().action_space

    def reset(self, key):
        return self.probe.reset(key)

    def step(self, state, action, key):
        return self.probe.step(state, action, key)


class Doubled(struct.PyTreeNode):
    """A wrapper of a user's own."""

    env: object
    factor: float = 2.0

    name, resets = "doubled", False
    observation_space, action_space = Probe().observation_space, Probe().action_space

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action, key):
        return self.env.step(state, action, key)


def test_environments_and_wrappers_of_a_user():
    with nothing_registered_for_good():
        jaxrl.register("mine:Corridor-v0", Corridor)
        env = jaxrl.make("mine:Corridor-v0", length=5, wrappers=[Doubled])
        raises(ConfigError, "jaxrl.register", there_and_back, env)
        jaxrl.register(Doubled)
        config = to_config(env)
        assert full_name(config) == "mine:Corridor-v0" and config["parameters"]["length"] == 5
        back = there_and_back(env)
        assert jax.tree.structure(back) == jax.tree.structure(env)
        assert back.env.env.env.length == 5 and back.env.factor == 2.0
    raises(ConfigError, "'mine:Corridor-v0'.*register", from_config, config)
    with nothing_registered_for_good():
        jaxrl.register(Corridor)
        assert there_and_back(Corridor(length=2)) == Corridor(length=2)


def corridor(length=3, reward=1.0):
    return wrappers.TimeLimit(Corridor(Probe(reward=reward), length), 4)


FUNCTIONS = {
    "lambda": (lambda **given: corridor(**given), {"length": 5, "reward": np.float32(0.5)}),
    "partial": (functools.partial(corridor, length=5), {}),
    "wrapped within": (lambda length: Doubled(corridor(length)), {"length": 5}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_registered_function_makes_is_written_by_its_name_and_parameters(name):
    function, given = FUNCTIONS[name]
    with nothing_registered_for_good():
        jaxrl.register("mine:Corridor-v0", function)
        env = jaxrl.make("mine:Corridor-v0", **given, wrappers=[wrappers.ActionRepeat], sticky_actions=0.25)
        config = to_config(env)
        assert full_name(config) == "mine:Corridor-v0" and config["parameters"].keys() == given.keys()
        for now in (env, envs.with_parameters(env, max_steps=9, reward=7.0, probability=0.5)):
            back = there_and_back(there_and_back(now))
            assert jax.tree.structure(back) == jax.tree.structure(now) and to_config(back) == to_config(now)
            jax.tree.map(np.testing.assert_array_equal, back, now)
    raises(ConfigError, "'mine:Corridor-v0'.*register", from_config, config)


def test_so_are_recipes_that_no_file_can_make():
    with nothing_registered_for_good():
        jaxrl.register("mine:Passed", lambda length: jaxrl.make(lambda: gymnasium.make("CartPole-v1"), info=("x",)))
        jaxrl.register("mine:Module", lambda length: jaxrl.make("gymnasium:host_probes:Counting-v0", length=length))
        jaxrl.register("mine:Plain", lambda length: jaxrl.make("gymnasium:CartPole-v1", max_episode_steps=length))
        passed, module, plain = (jaxrl.make(f"mine:{name}", length=7) for name in ("Passed", "Module", "Plain"))
        for recipe, name in (passed, "mine:Passed"), (module, "mine:Module"):
            config = to_config(recipe)
            assert full_name(config) == name and config["parameters"] == {"length": 7}
            assert to_config(there_and_back(recipe)) == config and there_and_back(recipe).name == recipe.name
    assert there_and_back(plain) == plain, "what files can make needs no function"


def test_runs_that_cannot_be_loaded_say_so_before_they_train(tmp_path, monkeypatch):
    monkeypatch.setattr(Loop, "train", lambda _: 1 / 0)
    train = functools.partial(jaxrl.train, jaxrl.PPO(), total_steps=32, num_envs=4, progress=False)
    with nothing_registered_for_good(), warnings.catch_warnings(action="error"):
        jaxrl.register("mine:Corridor-v0", corridor)
        with pytest.raises(ZeroDivisionError):
            train("mine:Corridor-v0", run_dir=tmp_path / "one")
        with (
            pytest.raises(ZeroDivisionError),
            pytest.warns(RuntimeWarning, match="^Corridor.*env=.*--env"),
        ):
            train(corridor(), run_dir=tmp_path / "other")


def test_classes_that_are_not_registered_are_said_to_be_so():
    raises(ConfigError, r"Corridor.*could not be written", there_and_back, Corridor())


GOOD = to_config(jaxrl.make("gymnax:CartPole-v1"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"suite": "gymnasium", "name": "host_probes:Counting-v0", "parameters": {}, "wrappers": []}, "must not"),
        ({"suite": "gymnasium", "name": ".os:X", "parameters": {}, "wrappers": []}, "must not"),
        ({"suite": "gymnasium", "parameters": {"workers": "many"}, "wrappers": []}, "the wrong type: workers='many'"),
        ({"suite": "envpool", "parameters": {"base_path": "/tmp"}, "wrappers": []}, "does not accept base_path"),
        ({"suite": "envpool", "parameters": {"vzd_path": "/tmp/x"}, "wrappers": []}, "must not set vzd_path"),
        ({"suite": "envpool", "parameters": {"game_args": "+quit"}, "wrappers": []}, "must not set game_args"),
        ({"suite": "envpool", "parameters": {"xml_file": "/tmp/x.xml"}, "wrappers": []}, "may set xml_file"),
        ({"suite": "gymnasium", "parameters": {"map": ["a", "../x"]}, "wrappers": []}, "may set map"),
        (
            {"name": "DeepSea-bsuite", "parameters": {"size": 10**6}},
            "size=1000000 of gymnax:DeepSea-bsuite exceeds 2048, the maximum in saved configurations",
        ),
        ({"name": "DeepSea-bsuite", "parameters": {"size": float("nan")}}, "size=nan of gymnax:DeepSea-bsuite exceeds"),
        ({"suite": "os", "name": "system"}, "unknown environment 'os:system'"),
        ({"suite": "user", "name": "X"}, "unknown class or function 'X'"),
        ({"suite": 3}, "does not describe an environment"),
        ({"parameters": 3}, "does not describe an environment"),
        ({"wrappers": {}}, "does not describe an environment"),
        ({"name": "CartPol-v1"}, "did you mean 'CartPole-v1'"),
        ({"parameters": {"gravity": "much"}}, "does not fit its default"),
        ({"parameters": {"gravit": 1.0}}, "did you mean 'gravity'"),
        ({"wrappers": [{"type": "os:system"}]}, "is not a registered environment wrapper"),
        ({"wrappers": [{"type": "torso:mlp"}]}, "is not a registered environment wrapper"),
        ({"wrappers": [3]}, "is not a registered environment wrapper"),
        ({"wrappers": [{"type": "wrapper:autoreset", "color": 1}]}, "has no field color"),
        ({"wrappers": [{"type": "wrapper:framestack", "frames": "x"}]}, "the wrong type: frames='x'"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_files_that_jaxrl_did_not_write(change, words):
    raises(ConfigError, words, from_config, GOOD | change)


@pytest.mark.long
def test_a_module_that_a_file_names_is_not_imported(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    config = {"suite": "gymnasium", "name": "evil:CartPole-v1", "parameters": {}, "wrappers": []}
    code = (
        "from jaxrl.envs.configs import from_config\nfrom jaxrl.core.errors import ConfigError\n"
        f"try:\n    from_config({config!r})\nexcept ConfigError as error:\n    print(error)"
    )
    assert "imports a module" in python("-c", code, cwd=tmp_path).stdout


def test_environments_of_other_libraries_are_made_by_hand_only(monkeypatch):
    """Shimmy's options name modules; neither an environment nor a part of one in a file leads to them."""

    def shimmy(**options):
        return gymnasium.make("CartPole-v1", **options)

    monkeypatch.setitem(gymnasium.registry, "Old-v0", gymnasium.envs.registration.EnvSpec("Old-v0", shimmy))
    recipe = jaxrl.make("gymnasium:Old-v0")
    recipe.build(1, 0).close()
    for read, written in ((from_config, to_config(recipe)), (config.decode, config.encode(recipe))):
        raises(ConfigError, "gymnasium:Old-v0", read, written)
    raises(ConfigError, "no field by_hand", config.decode, config.encode(recipe) | {"by_hand": True})


def test_reading_a_host_recipe_makes_no_environment(monkeypatch):
    recipe = jaxrl.make("gymnasium:CartPole-v1")
    monkeypatch.setattr(gymnasium, "make", lambda *_, **__: pytest.fail("made"))
    assert there_and_back(recipe) == recipe
