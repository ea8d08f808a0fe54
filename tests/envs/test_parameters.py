"""Parameters of environments by name, under any wrappers."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.refused import raises, refused

import jaxrl
from jaxrl import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.envs import ScaleReward, StickyActions, TimeLimit, parameters, prepared, with_parameters
from jaxrl.envs.configs import from_config, to_config
from jaxrl.envs.episode import restart, transition


@struct.dataclass
class Own:
    """Its reward is its parameter."""

    distance: float = 1.0
    sizes: jax.Array = struct.field(default_factory=lambda: jnp.ones(3))
    count: int = 2
    width: int = struct.field(pytree_node=False, default=3)

    name = "my:Own"
    observation_space = spaces.Box(-1.0, 1.0, (3,))
    action_space = spaces.Discrete(2)
    resets = False

    def reset(self, key):
        return jnp.zeros(()), restart(jnp.zeros(3))

    def step(self, state, action, key):
        return state, transition(jnp.zeros(3), jnp.asarray(self.distance), jnp.asarray(False), jnp.asarray(False))


WRAPPED = prepared(StickyActions(ScaleReward(TimeLimit(Own(), max_steps=7), 2.0), 0.5))


def test_by_name_under_wrappers():
    found = parameters(WRAPPED)
    assert found["distance"] == 1.0 and found["probability"] == 0.5 and found["scale"] == 2.0
    assert "width" not in found and "env" not in found
    changed = with_parameters(WRAPPED, distance=3.0, probability=0.0)
    assert parameters(changed)["distance"] == 3.0 and parameters(changed)["probability"] == 0.0
    assert parameters(WRAPPED)["distance"] == 1.0
    assert jax.tree.structure(changed) == jax.tree.structure(WRAPPED)
    state, _ = changed.reset(jax.random.key(0))
    assert changed.step(state, jnp.int32(0), jax.random.key(1))[1].reward == 6.0


def test_of_gymnax_as_made_and_as_placed():
    env = jaxrl.make("gymnax:CartPole-v1", wrappers=(partial(ScaleReward, scale=0.1),))
    for given in (env, jax.device_put(env)):
        changed = with_parameters(given, gravity=12.5)
        assert parameters(changed)["gravity"] == 12.5
        same = [name for name, value in parameters(changed).items() if value == parameters(env)[name]]
        assert set(parameters(env)) - set(same) == {"gravity"}


def test_changed_parameters_are_written_to_files_and_read_back():
    changed = with_parameters(jaxrl.make("gymnax:Pendulum-v1"), g=5.0)
    assert parameters(from_config(to_config(changed))) == parameters(changed)


def test_as_many_as_are_mapped_over():
    changed = with_parameters(WRAPPED, distance=np.arange(4.0), sizes=np.ones((4, 3)))
    assert parameters(changed)["sizes"].shape == (4, 3)


CARTPOLE = partial(jaxrl.make, "gymnax:CartPole-v1")
PPO = jaxrl.PPO(rollout_length=8, epochs=1, minibatches=1)
RUN = {"total_steps": 16, "num_envs": 2}


@pytest.mark.parametrize("values", [np.ones(2), jnp.ones((1, 3))])
@pytest.mark.parametrize("name", ["gravity", "probability", "distance"])
def test_an_array_to_be_mapped_over_is_refused_where_a_run_needs_a_number(name, values):
    env = {
        "gravity": lambda: with_parameters(CARTPOLE(), gravity=values),
        "probability": lambda: CARTPOLE(wrappers=(partial(StickyActions, probability=values),)),
        "distance": lambda: ScaleReward(Own(distance=values), 2.0),
    }[name]()
    for call in (partial(jaxrl.train, PPO, **RUN), jaxrl.check_env):
        raises(ConfigError, f"parameter {name} of .*{re.escape(str(values.shape))}", call, env=env)


def test_whole_runs_may_be_mapped_over_parameters():
    def bound(env):
        jaxrl.make_train(PPO, env, **RUN)
        return env.reset(jax.random.key(0))[1].reward

    envs = jax.vmap(lambda gravity: CARTPOLE(gravity=gravity))(jnp.arange(1.0, 4.0))
    assert jax.eval_shape(jax.vmap(bound), envs).shape == (3,)


def test_what_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        with_parameters(WRAPPED, distanc=1.0, width=4, distance="far", sizes=np.ones(2), count=1.5)
    refused(lambda: with_parameters(None, gravity=1.0), "None is not a JAX environment")
    first, second, *others = caught.value.problems
    assert "unknown parameter of my:Own 'distanc'; did you mean 'distance'" in first
    assert "width of my:Own is static" in second
    assert [problem.split("=")[0] for problem in others] == [f"parameter {n}" for n in ("distance", "sizes", "count")]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("CartPole-v1", {"max_steps_in_episode": 0}, "max_steps_in_episode=0 must be at least 1"),
        ("CartPole-v1", {"gravity": float("nan")}, "parameter gravity=nan of gymnax:CartPole-v1 .*: it is NaN"),
        ("BernoulliBandit-misc", {"reward_prob": 1.1}, "reward_prob=1.1 must be at least 0 and at most 1"),
        ("FourRooms-misc", {"fail_prob": -0.1}, "fail_prob=-0.1 must be at least 0 and at most 1"),
    ],
)
def test_impossible_numbers_are_refused_when_made_and_when_changed(name, values, reason):
    raises(ConfigError, reason, jaxrl.make, f"gymnax:{name}", **values)
    raises(ConfigError, reason, with_parameters, jaxrl.make(f"gymnax:{name}"), **values)


def test_nan_within_an_array_is_refused():
    raises(
        ConfigError,
        "parameter gravity=.* NaN",
        jaxrl.make,
        "gymnax:CartPole-v1",
        gravity=np.array([9.8, np.nan], np.float32),
    )
