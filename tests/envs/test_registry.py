"""Names, suggestions, registration, laziness."""

import pytest
from helpers.processes import python
from helpers.refused import raises, refused
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl import envs
from jaxrl.cli.environment import make_environment
from jaxrl.core import suites
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.envs import AutoReset, EpisodeStatistics, FrameStack, Hide, StickyActions, TimeLimit
from jaxrl.envs.configs import from_config, to_config
from jaxrl.envs.probes import Probe


def test_make_wraps_in_order_under_the_auto_reset():
    env = envs.make("gymnax:CartPole-v1", wrappers=(lambda e: TimeLimit(e, 9), lambda e: FrameStack(e, 2)))
    assert isinstance(env, AutoReset) and isinstance(env.env, FrameStack) and isinstance(env.env.env, TimeLimit)
    assert isinstance(env.env.env.env, EpisodeStatistics)
    assert env.observation_space.shape == (8,) and env.name == "gymnax:CartPole-v1"
    assert not envs.make("gymnax:CartPole-v1", auto_reset=None).resets


def test_sticky_actions_are_a_parameter():
    """MinAtar's own paper has them; on the command line --env-params sticky_actions=0.1."""
    env = make_environment("gymnax:Breakout-MinAtar", ["sticky_actions=0.1"])
    sticky = env.env.env  # under the auto-reset and the statistics
    assert isinstance(sticky, StickyActions) and sticky.probability == 0.1
    assert to_config(from_config(to_config(env))) == to_config(env)
    refused(lambda: jaxrl.make("gymnax:Breakout-MinAtar", sticky_actions=1.5), "sticky_actions=1.5")
    refused(lambda: jaxrl.make("gymnasium:CartPole-v1", sticky_actions=0.1), "does not support sticky_actions")


def test_hidden_entries_are_a_parameter():
    env = make_environment("gymnax:Pendulum-v1", ["hide=(0,2)"])
    assert isinstance(env.env.env, Hide) and env.env.env.entries == (0, 2)
    assert to_config(from_config(to_config(env))) == to_config(env)
    assert make_environment("gymnax:Pendulum-v1", ["hide=2"]).observation_space.shape == (2,)
    refused(lambda: jaxrl.make("gymnasium:Pendulum-v1", hide=2), "does not support hide")


def test_register():
    with nothing_registered_for_good():
        jaxrl.register("my:Probe-v0", lambda reward=1.0: Probe(reward=reward))
        assert "my:Probe-v0" in envs.environments()
        assert envs.make("my:Probe-v0", reward=3.0, auto_reset=None).env.reward == 3.0
        raises(ConfigError, "did you mean 'my:Probe-v0'", envs.make, "my:Prob-v0")
        for taken in ("my:Probe-v0", "gymnax:Mine-v0", "envpool:Mine-v0"):
            raises(ConfigError, "taken", jaxrl.register, taken, Probe)
        raises(ConfigError, "'my:Mine-v0'", jaxrl.register, ":Mine-v0", Probe)
    assert "my:Probe-v0" not in envs.environments()


def test_every_name_is_listed_once_and_sorted():
    names = envs.environments()
    assert names == sorted(set(names)) and {"gymnax:CartPole-v1", "probe:Truncated"} <= set(names)
    assert {"envpool:Pong-v5", "gymnasium:LunarLander-v3"} <= set(names) and "gymnasium:LunarLander-v2" not in names


@pytest.mark.parametrize("name", ["brax:ant", "envpool:Pong-v5"])
def test_a_missing_package_names_its_extra(name, monkeypatch):
    missing, installed = name.partition(":")[0], suites.installed
    monkeypatch.setattr(suites, "installed", lambda suite: suite != missing and installed(suite))
    raises(MissingExtraError, rf"jaxrl\[{missing}\]", envs.make, name)
    assert not any(known.startswith(f"{missing}:") for known in envs.environments())


@pytest.mark.long
def test_importing_imports_no_suite():
    code = (
        "import sys, jaxrl.envs; jaxrl.envs.make('probe:Constant'); "
        "assert not {'brax', 'envpool', 'gymnax'} & set(sys.modules); "
        "from jaxrl.core import suites; suites.installed = {'brax', 'envpool', 'gymnax', 'probe'}.__contains__; "
        "jaxrl.envs.environments(); assert 'brax' not in sys.modules"
    )
    python("-c", code)
