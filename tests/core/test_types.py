"""Rollouts: rows as the row convention says, and observations that lie once, also in compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.tiers import one_quick

import jaxrl
from jaxrl import envs, networks
from jaxrl.core import spaces
from jaxrl.core.types import Rollout, TimeStep
from jaxrl.envs.episode import restart, transition
from jaxrl.parallel.rollout import with_previous_action

T, B = 60, 5
FRAME = (32, 32, 4)


def lived(seed=0):
    """Time steps [T + 1, B] of episodes that end either way, or break off because an environment was built again."""
    rng = np.random.default_rng(seed)
    terminated, truncated, first = np.zeros((3, T + 1, B), bool)
    first[0] = rng.random(B) < 0.5
    for t in range(1, T + 1):
        over = terminated[t - 1] | truncated[t - 1]
        first[t] = over | (rng.random(B) < 0.05)
        ends = rng.random((2, B)) < 0.15
        terminated[t], truncated[t] = ends[0] & ~first[t], ends[1] & ~ends[0] & ~first[t]
    reward = np.where(first, 0.0, rng.normal(size=first.shape)).astype(np.float32)
    observation = rng.normal(size=(T + 1, B, 3)).astype(np.float32)
    return jax.tree.map(jnp.asarray, TimeStep(observation, reward, terminated, truncated, first))


def rollout(timesteps, **others):
    action = jnp.arange(T * B).reshape(T, B)
    return Rollout(timesteps, action, {"value": action * 2}, carry=(), final_carry=(), **others)


def test_rows_are_the_convention_one_by_one():
    timesteps = lived()
    made = rollout(timesteps)
    rows, met = jax.device_get(made.rows), {"terminated": 0, "truncated": 0, "last": 0, "broken": 0}
    seen = jax.device_get(timesteps)
    for t in range(T):
        for b in range(B):
            last = seen.terminated[t, b] or seen.truncated[t, b]
            broken = not last and seen.first[t + 1, b]
            counts = not last and not broken
            assert rows.weight[t, b] == counts
            assert rows.reward[t, b] == (seen.reward[t + 1, b] if counts else 0)
            assert rows.terminated[t, b] == (counts and seen.terminated[t + 1, b])
            assert rows.truncated[t, b] == (counts and seen.truncated[t + 1, b])
            assert rows.first[t, b] == seen.first[t, b]
            met["terminated"] += rows.terminated[t, b]
            met["truncated"] += rows.truncated[t, b]
            met["last"] += last
            met["broken"] += broken
    assert min(met.values()) > 5, "too little was met for this to show anything"
    np.testing.assert_array_equal(rows.observation, seen.observation[:-1])
    np.testing.assert_array_equal(rows.extras["value"], 2 * rows.action)
    jax.tree.map(np.testing.assert_array_equal, made.final, jax.tree.map(lambda x: x[-1], timesteps))


def test_what_follows_a_whole_episode_does_not_count():
    timesteps = lived(1)
    rows = jax.device_get(rollout(timesteps, whole_episodes=True).rows)
    last, first = np.asarray(timesteps.last[:-1]), np.asarray(timesteps.first[1:])
    broken = ~last & first
    over = last | broken  # an environment that was built again shows another episode
    assert over.argmax(axis=0)[broken.any(axis=0)].size and (broken.argmax(axis=0) < last.argmax(axis=0)).any()
    for b in range(B):
        end = int(np.argmax(over[:, b])) if over[:, b].any() else T
        np.testing.assert_array_equal(rows.weight[:, b], np.arange(T) < end)
        assert not (rows.terminated | rows.truncated)[end:, b].any() and not rows.reward[end:, b].any()


def test_a_previous_action_is_of_the_same_episode():
    timesteps = lived()[3].replace(first=jnp.asarray([True, False, True, False, False]))
    action = jnp.arange(1, B + 1)
    np.testing.assert_array_equal(with_previous_action(timesteps, action).previous_action, [0, 2, 0, 4, 5])


@struct.dataclass
class Frames:
    """Images, of which a rollout is mostly made."""

    name = "tests:Frames"
    observation_space = spaces.Box(0, 255, FRAME, np.uint8)
    action_space = spaces.Discrete(3)
    resets = False

    def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(FRAME, jnp.uint8))

    def step(self, state, action, key):
        now = state + 1
        return now, transition(jnp.full(FRAME, now, jnp.uint8), jnp.float32(1.0), now >= 9, jnp.asarray(False))


@pytest.mark.long
@pytest.mark.parametrize(
    ("algo", "most"),
    one_quick(
        [
            # An update on frames holds them as float32 besides: four times as many bytes, and with their gradient's.
            pytest.param(
                jaxrl.A2C(rollout_length=32, entropy_cost=0.01, network=networks.ActorCritic(networks.MLP((8,)))),
                5.5,
                id="on-policy",
            ),
            pytest.param(
                jaxrl.DQN(
                    learning_rate=2.5e-4,
                    n_step=1,
                    rollout_length=32,
                    capacity=16 * 64,
                    min_size=16 * 32,
                    batch_size=8,
                    network=networks.QNetwork(networks.MLP((8,))),
                ),
                1.5,
                id="replay",
            ),
        ]
    ),
)
def test_a_compiled_iteration_holds_the_observations_of_a_rollout_once(algo, most):
    env = envs.prepared(Frames())
    program = jaxrl.Anakin(num_envs=16, devices=1).bind(algo, env)
    state = program.start(algo, env, 0)
    compiled = program.compile_chunk(algo, env, state)
    frames = 16 * 32 * np.prod(FRAME)
    assert 1.0 <= compiled.memory_analysis().temp_size_in_bytes / frames < most
