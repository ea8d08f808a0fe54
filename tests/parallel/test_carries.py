"""Recurrent policies on host environments, against one that counts: every carry is known from its observation."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import started
from helpers.tiers import one_quick

import jaxrl
from jaxrl.core import spaces
from jaxrl.core.sources import Sequence
from jaxrl.core.types import ActorOutput, ActorState, EnvSpec, Replay, Rollouts, UpdateInfo
from jaxrl.envs.host.time_steps import Episodes
from jaxrl.networks.cores import unroll

NUM_ENVS, LENGTH, ITERATIONS = 4, 5, 4
BROKEN = (1, 8)  # the environment that is built again once, and its row there


def length_of(env_index):
    """How many steps an episode has: endings of different environments drift apart, and from those of rollouts."""
    return 3 + 2 * (env_index % 2) + env_index // 2


@dataclass(frozen=True)
class Counting:
    """Shows (episode, step); the reward is the action."""

    breaks: bool = False

    name, observation_space, action_space = "test:Counting", spaces.Box(0.0, 99.0, (2,)), spaces.Discrete(99)

    def build(self, num_envs, seed, first_env=0):
        return CountingBatch(num_envs, first_env, self.breaks, num_envs)

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        return CountingBatch(num_envs, first_env, self.breaks, batch_size)


class CountingBatch:
    """Of those that were sent actions the last ones are ready first."""

    def __init__(self, num_envs, first_env, breaks, batch_size):
        self.num_envs, self.batch_size = num_envs, batch_size
        self._index = first_env + np.arange(num_envs)
        self._breaks, self._episodes = breaks, Episodes(num_envs)
        self._rows, self._episode, self._step = (np.full(num_envs, -1) for _ in range(3))
        self._sent = []

    def reset(self):
        return self._moment(np.arange(self.num_envs), np.zeros(self.num_envs, np.int32))

    def step(self, actions):
        return self._moment(np.arange(self.num_envs), actions)

    def async_reset(self):
        self.send(np.zeros(self.num_envs, np.int32), np.arange(self.num_envs))

    def send(self, actions, env_ids):
        self._sent += list(zip(env_ids, np.array(actions), strict=True))

    def recv(self):
        ready = [self._sent.pop() for _ in range(self.batch_size)]
        env_ids, actions = (np.asarray(x, np.int32) for x in zip(*ready, strict=True))
        return env_ids, self._moment(env_ids, actions)

    def _moment(self, ids, actions):
        self._rows[ids] += 1
        if self._breaks:
            self._episodes.begin(ids[(self._index[ids] == BROKEN[0]) & (self._rows[ids] == BROKEN[1])])
        begins = self._episodes.ended[ids]
        self._episode[ids] += begins
        self._step[ids] = np.where(begins, 0, self._step[ids] + 1)
        observation = np.stack([self._episode[ids], self._step[ids]], axis=-1).astype(np.float32)
        over = self._step[ids] == length_of(self._index[ids])
        return self._episodes.follow(ids, observation, actions.astype(np.float32), over, np.zeros_like(over))

    def close(self):
        pass


def counted(timesteps, carry):
    """How many rows of its episode there were at each of `[T, B]`, this one included; and the carry after."""
    return unroll(lambda carry, _: (carry + 1, carry + 1), carry, timesteps.reward, timesteps.first, jnp.int32(0))


@struct.dataclass
class Counts:
    """Learns nothing: its carry counts, it acts by that, and its state keeps the batches it was given."""

    unused: Any = np.float32(0.0)  # in place of parameters

    experience = {
        "rollout": Rollouts(LENGTH),
        "replay": Replay(
            capacity=NUM_ENVS * 4 * LENGTH,
            batch_size=16,
            min_size=2 * NUM_ENVS * LENGTH,
            rollout_length=LENGTH,
            sequence=Sequence(4, LENGTH, burn_in=2, stored_carry=True),
        ),
    }

    def validate(self, spec, num_envs, shards):
        return []

    def init(self, key, spec):
        row = {"first": jnp.bool_(False), "weight": jnp.bool_(False), "observation": jnp.zeros(2)}
        row |= {"again": jnp.int32(0), "mask": jnp.bool_(False)}
        rollout = self._zeros(row | {"count": jnp.int32(0)}, (LENGTH, NUM_ENVS))
        carries = self._zeros({"carry": jnp.int32(0), "final": jnp.int32(0)}, (NUM_ENVS,))
        return {
            "rollout": rollout | carries,
            "replay": self._zeros(row, (6, 16)) | self._zeros({"carry": jnp.int32(0)}, (16,)),
        }

    def _zeros(self, tree, shape):
        return {name: jnp.zeros((*shape, *x.shape), x.dtype) for name, x in tree.items()}

    def actor(self, state):
        return ActorState(self.unused)

    def initial_carry(self, spec, env_index, num_envs):
        return jnp.int32(0)

    def act(self, actor, timestep, carry, key, *, spec, explore):
        count, carry = counted(jax.tree.map(lambda x: x[None], timestep), carry)
        return ActorOutput(count[0], carry, {"count": count[0]})

    def update(self, state, batch, *, spec, key, replicas):
        rollout, replay = batch["rollout"], batch["replay"]

        def kept(batch, timesteps, mask):
            rows = batch.rows
            told = {"first": rows.first, "weight": rows.weight, "observation": rows.observation, "mask": mask}
            return told | {"again": counted(timesteps, batch.carry)[0], "carry": batch.carry}

        whole = kept(rollout, rollout.timesteps[:-1], jnp.ones_like(rollout.rows.first))
        whole |= {"count": rollout.rows.extras["count"], "final": rollout.final_carry}
        return {"rollout": whole, "replay": kept(replay, replay.timesteps, replay.mask)}, UpdateInfo(
            {"unused": jnp.float32(0.0)}
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    one_quick(
        [
            pytest.param({"lockstep": True, "groups": 2}, id="lockstep"),
            pytest.param({"actors": 2}, id="overlapped"),
            pytest.param({"ready": 2}, id="ready first"),
        ]
    ),
)
def test_carries_are_those_of_the_episode(topology):
    algo, env = Counts(), Counting(breaks=True)
    rollouts, met = [], {"within": 0, "stored": 0, "over an end": 0}
    with started(jaxrl.Sebulba(num_envs=NUM_ENVS, **topology), algo, env, 0) as (program, state):
        for iteration in range(ITERATIONS):
            state, _ = program.chunk(algo, env, state, 1, 100)
            if iteration == 0:
                continue  # the replay fills
            rollout, replay = (jax.tree.map(np.array, state.learner[name]) for name in ("rollout", "replay"))
            rollouts.append(rollout)
            step = rollout["observation"][..., 1]
            np.testing.assert_array_equal(rollout["first"], step == 0)
            np.testing.assert_array_equal(rollout["count"], step + 1)  # when acting
            np.testing.assert_array_equal(rollout["again"], step + 1)  # and when learning
            np.testing.assert_array_equal(rollout["final"], step[-1] + 1)
            begun = step[0] > 0
            np.testing.assert_array_equal(rollout["carry"][begun], step[0][begun])
            met["within"] += begun.sum()

            step, mask = replay["observation"][..., 1], replay["mask"]
            assert mask.any(axis=0).all()
            np.testing.assert_array_equal(replay["again"][mask], step[mask] + 1)
            begun = step[0] > 0
            np.testing.assert_array_equal(replay["carry"][begun], step[0][begun])
            met["stored"] += begun.sum()
            met["over an end"] += (replay["first"][1:] & mask[1:]).any(axis=0).sum()
    assert min(met.values()) >= 8, "too little was met for this to show anything"
    # The carry of a rollout's start is that of the one before it, whatever begins there.
    for before, after in zip(rollouts, rollouts[1:], strict=False):
        np.testing.assert_array_equal(after["carry"], before["final"])
    env, row = BROKEN
    broken = rollouts[row // LENGTH - 1]  # of the second iteration on
    episode, step = np.moveaxis(broken["observation"][:, env], -1, 0)
    assert step[row % LENGTH] == 0 and 0 < step[row % LENGTH - 1] < length_of(env)
    assert not broken["weight"][row % LENGTH - 1, env] and episode[row % LENGTH] == episode[row % LENGTH - 1] + 1


def test_the_carry_of_an_evaluation_begins_anew_with_each_episode():
    algo, env = Counts(), Counting()
    spec = EnvSpec(env.name, env.observation_space, env.action_space)
    found = jaxrl.evaluate(algo, ActorState(algo.unused), env, spec, episodes=3 * NUM_ENVS, num_envs=NUM_ENVS)
    lengths = length_of(np.arange(NUM_ENVS))
    np.testing.assert_array_equal(found.lengths.reshape(3, NUM_ENVS), np.tile(lengths, (3, 1)))
    # 1 + 2 + ... + length: what it did at each row is how many rows there had been.
    np.testing.assert_array_equal(found.returns.reshape(3, NUM_ENVS), np.tile(lengths * (lengths + 1) / 2, (3, 1)))
