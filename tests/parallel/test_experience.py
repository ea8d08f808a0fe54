"""A batch is made up of what a run lived through and of a dataset, shard by shard, and comes apart again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, assert_equal
from helpers.streams import Fed, rows_of

from jaxrl.buffers import replay
from jaxrl.core.sources import Replay, Sequence
from jaxrl.core.types import TransitionBatch, env_spec
from jaxrl.parallel.experience import Experience

DQN = ALGORITHMS["dqn"]
EPISODES = rows_of([[6, 6], [12], [4, 8], [12]])


def test_a_joined_batch_keeps_shards_together_and_is_split_again():
    def batch(start, count):
        x = jnp.arange(start, start + count, dtype=jnp.float32)
        return TransitionBatch(x, x, x[:, None], x, x, x, x)

    joined = replay.join([batch(0, 6), batch(100, 2)], 2)
    np.testing.assert_array_equal(joined.observation, [0, 1, 2, 100, 3, 4, 5, 101])
    own, given = replay.split(joined.observation, [6, 2], 2)
    np.testing.assert_array_equal(own, np.arange(6))
    np.testing.assert_array_equal(given, [100, 101])


def test_joined_sequences_keep_time_and_shards():
    def batch(start, count):
        fed = Fed({"replay": Replay(64, count, 1, sequence=Sequence(3, 3))}, EPISODES, rollout=3, shards=2)
        return fed.feed(EPISODES).sample(start)

    parts = [batch(0, 6), batch(1, 2)]
    joined = replay.join(parts, 2)
    order = [(0, [0, 1, 2]), (1, [0]), (0, [3, 4, 5]), (1, [1])]
    for name in ("rows", "timesteps", "mask"):
        whole, pieces = getattr(joined, name), [getattr(part, name) for part in parts]
        expected = jax.tree.map(lambda *x: np.concatenate([x[part][:, items] for part, items in order], 1), *pieces)
        assert_equal(whole, expected)
    expected = [part.sample_info.step for part in parts]
    np.testing.assert_array_equal(
        joined.sample_info.step, np.concatenate([expected[part][items] for part, items in order])
    )
    back = replay.split(joined.sample_info, [6, 2], 2)
    assert_equal(back, [part.sample_info for part in parts])


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.99])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_both_parts_of_a_batch_are_there_and_make_it_up(fraction, shards):
    parts = Experience(DQN, env_spec(ENV), NUM_ENVS, shards, fraction)
    own, given = (part["replay"].batch_size for part in (parts.online_sources, parts.dataset_sources))
    assert own + given == DQN.batch_size and own > 0 and given > 0 and given % shards == own % shards == 0
    assert abs(given / DQN.batch_size - fraction) <= max(0.5 * shards, 1 * shards) / DQN.batch_size
