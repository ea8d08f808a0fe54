"""The adapter: flashbax's buffers give transitions of the episodes, and refuse what they cannot do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers.streams import rows_of

from jaxrl.errors import ConfigError
from jaxrl.sources import Fifo, Prioritised, Replay, Uniform

pytest.importorskip("flashbax")
from jaxrl.buffers.flashbax import FlashbaxReplay  # noqa: E402

ROWS = rows_of([[5, 3, 8], [16], [2, 14], [4, 4, 4, 4]], ("terminated", "truncated"))


@pytest.mark.parametrize("sampler", [Uniform(), Prioritised(0.6)], ids=["uniform", "prioritised"])
@pytest.mark.filterwarnings("ignore")
def test_transitions_are_those_of_the_episodes(sampler):
    buffer = FlashbaxReplay(Replay(48, 32, 8, sampler=sampler), 4)
    state = buffer.init(ROWS)
    add = jax.jit(buffer.add)
    for start in range(0, 16, 4):
        state = add(state, jax.tree.map(lambda x: jnp.asarray(x[start : start + 4]), ROWS))  # noqa: B023
    assert bool(buffer.can_sample(state))
    batch, indices = jax.jit(buffer.sample)(state, jax.random.key(0))
    weights = np.asarray(batch.weight)
    assert weights.any()
    for i in np.flatnonzero(weights):
        tick, column = int(batch.observation[i]) % 1000, int(batch.observation[i]) // 1000
        assert ROWS.weight[tick, column] and float(batch.next_observation[i]) == tick + 1 + 1000 * column
        assert float(batch.rewards[i, 0]) == ROWS.reward[tick, column]
        assert bool(batch.bootstrap[i]) != bool(ROWS.terminated[tick, column])
    if isinstance(sampler, Prioritised):
        # A priority far above the rest is drawn nearly always.
        first = np.asarray(indices) == int(indices[0])
        state = jax.jit(buffer.update_priorities)(state, indices, jnp.where(first, 1e9, 1e-3))
        again, _ = jax.jit(buffer.sample)(state, jax.random.key(1))
        assert (np.asarray(again.observation) == float(batch.observation[0])).mean() > 0.9


@pytest.mark.parametrize("source", [Replay(48, 8, 8, n_step=2), Replay(48, 8, 8, sampler=Fifo())])
def test_what_flashbax_has_not_is_refused(source):
    with pytest.raises(ConfigError, match="flashbax"):
        FlashbaxReplay(source, 4)
