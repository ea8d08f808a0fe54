"""A policy as one function: nothing is drawn where the best action is taken, for any batch, and it is the run's own."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.exported import (
    IMAGES,
    PARTS,
    PLAIN,
    RECURRENT,
    VECTORS,
    assert_same,
    combinations,
    nested,
    observations,
    policy_of,
    ppo,
)
from helpers.tiers import one_quick

import jaxrl
from jaxrl import networks
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, env_spec
from jaxrl.envs.delegate import forward
from jaxrl.export.function import ActFunction
from jaxrl.export.policies import PLATFORMS, exported
from jaxrl.run.policies.policy import Policy

COMBINATIONS = combinations()


def abstract(algo, spec):
    """A policy of zeros: nothing is compiled to make it."""
    algo = resolve_schedules(algo.resolve(spec, 8), np.float32(1.0))
    shapes = jax.eval_shape(lambda key: algo.actor(algo.init(key, spec)), jax.eval_shape(lambda: jax.random.key(0)))
    return Policy(algo, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), spec)


@pytest.mark.parametrize(
    "name", one_quick(COMBINATIONS, "sac-vectors-continuous", "dqn-images-discrete", "r2d2-vectors-discrete")
)
def test_the_best_action_draws_nothing_for_any_batch(name):
    function = ActFunction(abstract(*COMBINATIONS[name]))
    program = str(function.traced())
    assert "random" not in program and "threefry" not in program and "[b" in program
    assert bool(function.arguments["carry"]) == name.startswith(("dreamer", "r2d2"))


def test_sampling_draws():
    program = str(ActFunction(abstract(*COMBINATIONS["sac-vectors-continuous"]), sample=True).traced())
    assert "random_bits" in program


def assert_exported_same(policy, *, sample=False, **how):
    """The exported program against the run's policy."""
    function = ActFunction(policy, sample)
    program = jax.jit(exported(function).call)

    def act(seen, carry, first, reward, key):
        if carry is None:
            carry = tuple(np.zeros((len(first), *x.shape[1:]), x.dtype) for x in function.arguments["carry"])
        return program(seen, carry, first, reward, *([jax.random.key_data(key)] if sample else []))

    assert_same(policy, act, sample=sample, **how)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo-vectors-discrete", "sac-vectors-continuous", "dqn-vectors-discrete"])
def test_samples_are_those_of_the_run_by_the_same_key(name):
    assert_exported_same(policy_of(*COMBINATIONS[name]), batches=(1, 16), steps=3, sample=True)


ATARI = jaxrl.spaces.Box(0, 255, (4, 84, 84), np.uint8)
TORSOS = [
    (networks.MLP((8, 8), "relu", "layer"), VECTORS),
    (networks.MinAtarCNN(2, 3, 4, normalization="layer"), IMAGES),
    (networks.NatureCNN(), ATARI),
    (networks.ImpalaCNN(), ATARI),
    (networks.ImpalaResNet(), ATARI),
    (networks.default_torso(nested(IMAGES)), nested(IMAGES)),
]


# Of numbers that no bound cuts off, which differ for any two observations.
WIDE = jaxrl.spaces.Box(-1e9, 1e9, (2,))
POLICIES = COMBINATIONS | RECURRENT | {"parts": (PLAIN, EnvSpec("test", VECTORS, PARTS))}
POLICIES |= {type(torso).__name__: (ppo(torso), EnvSpec("test", space, WIDE)) for torso, space in TORSOS}


@pytest.mark.parametrize("name", one_quick(POLICIES, "sac-vectors-continuous"))
def test_every_policy_acts_as_its_run_does(name):
    batches = (1, 256) if name in COMBINATIONS else (1, 16)
    assert_exported_same(policy_of(*POLICIES[name]), batches=batches, steps=100 if name in RECURRENT else 4)


@struct.dataclass
class Masked:
    """CartPole in which one of the two pushes may be forbidden."""

    env: Any

    name, resets = forward("name"), forward("resets")
    observation_space, action_space = forward("observation_space"), forward("action_space")

    def reset(self, key):
        return self._masked(*self.env.reset(key))

    def step(self, state, action, key):
        return self._masked(*self.env.step(state, action, key))

    def _masked(self, state, time_step):
        return state, time_step.replace(action_mask=time_step.observation[:2] > 0)


@pytest.mark.long
def test_a_mask_is_an_argument_and_is_obeyed():
    env = Masked(jaxrl.make("gymnax:CartPole-v1"))
    spec = env_spec(env)
    policy = policy_of(PLAIN, spec, env)
    function = ActFunction(policy)
    assert list(function.arguments) == ["observation", "carry", "first", "reward", "action_mask"]
    seen, n = observations(spec, 8), spec.action_space.n
    mask = np.eye(n, dtype=bool)[np.arange(8) % n]
    action, _ = jax.jit(exported(function).call)(seen, (), np.ones(8, bool), np.zeros(8, np.float32), mask)
    np.testing.assert_array_equal(action, np.arange(8) % n)
    with pytest.raises(ConfigError, match="needs the environment"):
        ActFunction(Policy(policy.algo, policy.actor, spec))


def test_it_is_for_all_platforms_and_any_batch():
    algo, spec = COMBINATIONS["ppo-vectors-discrete"]
    program = exported(ActFunction(abstract(algo, spec)))
    assert program.platforms == PLATFORMS == ("cpu", "cuda", "tpu")
    assert str(program.in_avals[0].shape) == "(b, 4)" and not program.disabled_safety_checks


def test_what_needs_the_batch_as_a_number_is_refused_in_a_line(monkeypatch):
    algo, spec = COMBINATIONS["ppo-vectors-discrete"]
    act = jaxrl.PPO.act

    def one_by_one(algo, actor, timestep, carry, key, **how):
        output = act(algo, actor, timestep, carry, key, **how)
        rows = [output.action[row] for row in range(int(timestep.first.shape[0]))]
        return output.replace(action=jnp.stack(rows))

    monkeypatch.setattr(jaxrl.PPO, "act", one_by_one)
    policy = abstract(algo, spec)
    with pytest.raises(ConfigError, match="PPO .*for every batch size") as caught:
        ActFunction(policy)
    assert "\n" not in str(caught.value)
    assert policy(observations(spec, 2))[0].shape == (2,), "jaxrl itself plays it"
