"""Flashbax's buffers as a replay: transitions of the episodes, the same on any device; what they lack is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.streams import assert_two_devices_are_one, n_step, rows_of
from helpers.tiers import one_quick

from jaxrl.buffers import checks
from jaxrl.buffers.flashbax import FlashbaxReplay
from jaxrl.core.sources import Fifo, Prioritized, Replay, Uniform
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

ROWS = rows_of([[5, 3, 8], [16], [2, 14], [4, 4, 4, 4]], ("terminated", "truncated"))
SOURCE = Replay(48, 32, 8, rollout_length=4, storage="flashbax")
SAMPLERS = pytest.mark.parametrize("sampler", [Uniform(), Prioritized(0.6)], ids=["uniform", "prioritized"])


def bound(sampler, replicas, shards):
    return FlashbaxReplay("replay", dataclasses.replace(SOURCE, sampler=sampler), 4, 4, shards, replicas)


@SAMPLERS
@pytest.mark.parametrize("shards", one_quick([1, 2]))
def test_transitions_are_those_of_the_episodes(sampler, shards):
    buffer = bound(sampler, SingleReplica(shards), shards)
    state, add, sample = buffer.init(ROWS, ()), jax.jit(buffer.add), jax.jit(buffer.sample)
    for start in range(0, 16, 4):
        state = add(state, jax.tree.map(lambda x: jnp.asarray(x[start : start + 4]), ROWS), ())  # noqa: B023
    state, batch = sample(state, jax.random.key(0))
    weights = np.asarray(batch.weight)
    assert weights.any()
    for i in np.flatnonzero(weights):
        tick, column = int(batch.observation[i]) % 1000, int(batch.observation[i]) // 1000
        rewards, _, bootstrap, following = n_step(ROWS, tick, column, 1)
        assert ROWS.weight[tick, column] and [float(batch.rewards[i, 0])] == rewards
        assert (bool(batch.bootstrap[i]), float(batch.next_observation[i])) == (bootstrap, following)
    # A ring of 12 rows of each of 4 environments, and so 11 pairs of each.
    items = 4 * 11
    np.testing.assert_allclose(batch.sample_info.probability, 1 / items, rtol=1e-5)
    np.testing.assert_allclose(batch.sample_info.importance, 1.0, rtol=1e-5)
    figures = buffer.statistics(state, batch.sample_info)
    assert (figures["items"], figures["inserted"], figures["sampled"]) == (items, 64, 32)
    if isinstance(sampler, Prioritized):
        # A priority far above the rest is drawn nearly always.
        info = batch.sample_info
        first = np.asarray(info.position) == int(info.position[0])
        state = jax.jit(buffer.update_priorities)(state, info, jnp.where(first, 1e9, 1e-3))
        _, again = sample(state, jax.random.key(1))
        mine = np.asarray(again.observation).reshape(shards, -1)[0]
        assert (mine == float(batch.observation[0])).mean() > 0.9
        assert float(again.sample_info.importance.max()) == pytest.approx(1.0)


@pytest.mark.long
@SAMPLERS
def test_two_devices_draw_what_one_does(sampler):
    one, two = bound(sampler, SingleReplica(2), 2), bound(sampler, MeshReplicas("data", 1), 2)

    def step(buffer, state, rows, key):
        state, batch = buffer.sample(buffer.add(state, rows, ()), key)
        if isinstance(sampler, Prioritized):
            state = buffer.update_priorities(state, batch.sample_info, batch.rewards[:, 0])
        return state, batch

    part = jax.tree.map(lambda x: x[:12], ROWS)
    assert_two_devices_are_one(step, one, two, one.init(ROWS, ()), two.partition("data"), part)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"n_step": 2}, "one-step transitions only"),
        ({"sampler": Fifo()}, "the sampler Fifo()"),
        ({"extras": ("log_prob",)}, "does not store extras"),
        ({"capacity": 50}, "capacity=50; use 48"),
        ({"storage": "elsewhere"}, "must be one of ('ring', 'host', 'flashbax')"),
    ],
)
def test_what_flashbax_has_not_is_refused(changes, said):
    source = dataclasses.replace(SOURCE, **changes)
    assert any(said in line for line in checks.source_problems({"replay": source}, 4, 4, 1))


def test_another_platform_has_another_program_of_the_same_priorities():
    """For devices that are not here too: only the program that adds up priorities depends on them."""
    here, there = (bound(Prioritized(0.6), SingleReplica(1, platform), 1) for platform in ("cpu", "tpu"))
    programs, found = [], []
    for buffer in (here, there):
        state = buffer.add(buffer.init(ROWS, ()), jax.tree.map(lambda x: jnp.asarray(x[:4]), ROWS), ())
        _, batch = buffer.sample(state, jax.random.key(0))
        given = state, batch.sample_info, batch.rewards[:, 0]
        programs.append(str(jax.make_jaxpr(buffer.update_priorities)(*given)))
        found.append(jax.tree.leaves(buffer.update_priorities(*given)))
    assert programs[0] != programs[1]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
