"""An on-policy algorithm of one's own: the one that docs/new_algorithm.md writes, in every way that jaxrl runs one.

It is this page's code and no line more, so whatever it needed elsewhere in jaxrl would fail here.
"""

import re
import sys
import types
from pathlib import Path

import pytest
from helpers.programs import resumed
from helpers.refused import raises
from helpers.served import ServedFromHost

import jaxrl
from jaxrl.core.errors import ConfigError
from jaxrl.networks import GRU, MLP, ActorCritic

PAGE = Path(__file__).parents[2] / "docs" / "new_algorithm.md"
SETTINGS = {"num_envs": 8, "evaluate_every": 0, "progress": False, "seed": 1}


@pytest.fixture(scope="module")
def vpg():
    """The class of the page, registered as importing its file would."""
    (code, *_) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("own_on_policy")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), vars(module))
    return module.VPG


def small(vpg, **fields):
    return vpg(rollout_length=8, network=ActorCritic(MLP((16,)), **fields))


def test_it_is_registered_by_its_name(vpg):
    assert jaxrl.algos.make_algorithm("vpg", gamma=0.9) == vpg(gamma=0.9)
    raises(
        jaxrl.JaxrlError,
        "gamma",
        jaxrl.train,
        small(vpg).replace(gamma=2.0),
        "probe:Constant",
        total_steps=64,
        **SETTINGS,
    )


def test_a_class_without_an_update_is_refused_by_what_it_lacks(vpg):
    fields = {name: thing for name, thing in vars(vpg).items() if callable(thing) and name in ("act", "init", "actor")}
    half = type("Half", (), fields)()
    raises(
        ConfigError, "^Half lacks resolve, validate", jaxrl.train, half, "probe:Constant", total_steps=64, **SETTINGS
    )


def test_an_act_that_returns_an_action_alone_is_told_what_to_return(vpg):
    def act(self, actor, timestep, carry, key, *, spec, explore):
        return vpg.act(self, actor, timestep, carry, key, spec=spec, explore=explore).action

    algo = jaxrl.algos.base.algorithm(type("Bare", (vpg,), {"act": act, "__module__": __name__}))
    raises(
        ConfigError, r"^Bare.act .*ActorOutput", jaxrl.train, small(algo), "probe:Constant", total_steps=64, **SETTINGS
    )


@pytest.mark.long
@pytest.mark.parametrize("served", [False, True], ids=["anakin", "sebulba"])
def test_it_finds_the_best_action(vpg, served):
    """1 is the most that the probe gives, and -1 the least."""
    env = jaxrl.make("probe:ActionReward")
    topology = {"topology": jaxrl.Sebulba(num_envs=8), "num_envs": None} if served else {}
    result = jaxrl.train(
        small(vpg).replace(learning_rate=1e-2),
        ServedFromHost(env) if served else env,
        total_steps=8_000,
        **SETTINGS | topology,
        evaluation_episodes=32,
    )
    assert result.evaluation.return_mean > 0.9


@pytest.mark.long
@pytest.mark.parametrize("core", [None, GRU(8)], ids=["feed_forward", "recurrent"])
def test_it_resumes_bit_for_bit(vpg, core, tmp_path):
    algo = small(vpg, core=core)
    whole = resumed(tmp_path, algo, "gymnax:CartPole-v1", 512, **SETTINGS)
    assert jaxrl.load(tmp_path).algo == whole.algo
