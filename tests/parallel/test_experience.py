"""A batch is made up of what a run lived through and of a dataset, shard by shard, and comes apart again."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.made import dataset_of, whole
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, assert_equal
from helpers.rows_alone import RowsAlone
from helpers.streams import Fed, rows_of

from jaxrl.buffers import batches
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Replay, Sequence
from jaxrl.core.types import Trajectory, TransitionBatch, env_spec
from jaxrl.data import rings
from jaxrl.parallel.experience import Experience, of_dataset
from jaxrl.parallel.layout import checked_layout
from jaxrl.parallel.replicas import SingleReplica

DQN = ALGORITHMS["dqn"]
EPISODES = rows_of([[6, 6], [12], [4, 8], [12]])


def test_a_joined_batch_keeps_shards_together_and_is_split_again():
    def batch(start, count):
        x = jnp.arange(start, start + count, dtype=jnp.float32)
        return TransitionBatch(x, x, x[:, None], x, x, x, x)

    joined = batches.join([batch(0, 6), batch(100, 2)], 2)
    np.testing.assert_array_equal(joined.observation, [0, 1, 2, 100, 3, 4, 5, 101])
    own, given = batches.split(joined.observation, [6, 2], 2)
    np.testing.assert_array_equal(own, np.arange(6))
    np.testing.assert_array_equal(given, [100, 101])


@pytest.mark.long
def test_joined_sequences_keep_time_and_shards():
    def batch(start, count):
        fed = Fed({"replay": Replay(64, count, 1, sequence=Sequence(3, 3))}, EPISODES, rollout=3, shards=2)
        return fed.feed(EPISODES).sample(start)

    parts = [batch(0, 6), batch(1, 2)]
    joined = batches.join(parts, 2)
    order = [(0, [0, 1, 2]), (1, [0]), (0, [3, 4, 5]), (1, [1])]
    for name in ("rows", "timesteps", "mask"):
        whole, pieces = getattr(joined, name), [getattr(part, name) for part in parts]
        expected = jax.tree.map(lambda *x: np.concatenate([x[part][:, items] for part, items in order], 1), *pieces)
        assert_equal(whole, expected)
    expected = [part.sample_info.step for part in parts]
    np.testing.assert_array_equal(
        joined.sample_info.step, np.concatenate([expected[part][items] for part, items in order])
    )
    back = batches.split(joined.sample_info, [6, 2], 2)
    assert_equal(back, [part.sample_info for part in parts])


@pytest.mark.parametrize("fraction, items", [(0.01, 1), (0.1, 3), (0.25, 8), (0.5, 16), (0.9, 29), (0.99, 31)])
@pytest.mark.parametrize("shards", [1, 2, 8, 32])
def test_the_dataset_gives_its_fraction_of_every_batch(fraction, items, shards):
    """To the item; a part that is not divisible by the shards is refused, with the nearest batch that is."""
    parts = Experience(DQN, env_spec(ENV), NUM_ENVS, shards, fraction)
    assert parts.items_of_dataset(DQN.experience["replay"]) == items
    if items % shards == 0:
        own, given = (part["replay"].batch_size for part in (parts.online_sources, parts.dataset_sources))
        assert (own, given) == (DQN.batch_size - items, items) and not parts.problems()
        return
    (problem,) = [line for line in parts.problems() if "dataset_fraction" in line]
    size, nearest = re.findall(r"=([\d.]+)", problem.rpartition("; use ")[2])
    algo = DQN.replace(batch_size=int(size))
    assert not dataclasses.replace(parts, algo=algo, dataset_fraction=float(nearest)).problems()


@pytest.mark.parametrize("batch_size, shards", [(96, 8), (100, 4), (13, 1)])
def test_a_batch_is_never_more_than_was_asked_for(batch_size, shards):
    """There are as few shards as it divides over; before, 100 over 8 shards became 104."""
    algo, spec = DQN.replace(batch_size=batch_size), env_spec(ENV)
    assert checked_layout(algo, spec, 8, 1, None).shards == shards
    assert Experience(algo, spec, 8, shards, 0.0).online_sources["replay"].batch_size == batch_size
    if shards < 4:
        with pytest.raises(ConfigError, match=f"batch_size={batch_size} "):
            checked_layout(algo, spec, 8, 4, None)


@pytest.mark.long
def test_every_shard_draws_its_part_and_priorities_return_to_where_items_came_from():
    shards, updates = 4, 8
    algo = resolve_schedules(DQN, jnp.float32(0.0))
    parts = Experience(algo, env_spec(ENV), NUM_ENVS, shards, 0.125, SingleReplica(shards))
    length = 16
    flags = {name: np.zeros((length, NUM_ENVS), bool) for name in ("terminated", "truncated", "first")}
    own = Trajectory(
        observation=np.zeros((length, NUM_ENVS, 4), np.float32),
        action=np.zeros((length, NUM_ENVS), np.int32),
        reward=np.zeros((length, NUM_ENVS), np.float32),
        weight=np.ones((length, NUM_ENVS), bool),
        **flags,
    )
    theirs = whole(np.ones((41, 4), np.float32), np.zeros(41, np.int32), np.ones(41), np.ones(41), "truncated")
    made, _ = rings.rings(dataset_of(theirs), parts.dataset_sources, parts.spec, columns=shards)
    dataset = {of_dataset(name): jax.tree.map(jnp.asarray, ring) for name, ring in made.items()}
    states = parts.empty(RowsAlone(jax.tree.map(lambda x: x[:8], own)), dataset)
    for start in (0, 8):
        states = parts.store(states, RowsAlone(jax.tree.map(lambda x: x[start : start + 8], own)))  # noqa: B023

    @jax.jit
    def update(states, dataset, number):
        held = parts.rings(states, dataset)
        states, batches = parts.sample(
            {name: state.replace(ring=held[name]) for name, state in states.items()}, jax.random.key(0), number
        )
        priorities = 2.0 + batches["replay"].observation[:, 0]  # 2 of the run's own, 3 of the dataset's
        states = parts.update_priorities(states, batches, {"replay": priorities})
        return states, batches["replay"], parts.statistics(states, batches)

    for number in range(updates):
        states, batch, figures = update(states, dataset, jnp.int32(number))
        given = np.asarray(batch.observation[:, 0]) == 1
        assert (given.reshape(shards, -1).sum(axis=1) == 1).all()
        assert batch.weight.all() and (batch.sample_info.probability > 0).all()
        np.testing.assert_array_equal(given, batch.rewards[:, 0] == 1)
    for name, items, priority in (("replay", 28, 2.0), ("replay_dataset", 4, 3.0)):
        index = states[name].index
        assert index.times_sampled.sum() == items * updates == float(index.sampled.as_float())
        assert set(np.unique(index.priority)) <= {-1.0, 1.0, priority}
        assert (np.asarray(index.priority == priority) == np.asarray(index.times_sampled > 0)).all()
        assert float(figures[f"{name}_times_sampled"]) >= 1.0
