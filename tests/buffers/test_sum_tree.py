"""The wide sums: exact parents after any writes, frequencies in proportion, nothing of weight 0 drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl.buffers import sum_tree

RNG = np.random.default_rng(0)
put_range = jax.jit(sum_tree.put_range, static_argnums=3)


@jax.jit
def put(levels, position, weight):
    """Set weights in the only tree."""
    trees = sum_tree.put([level[None] for level in levels], jnp.zeros_like(position), position, weight)
    return tuple(level[0] for level in trees)


@jax.jit
def draw(levels, uniform):
    """Draw from the only tree."""
    return sum_tree.draw([level[None] for level in levels], jnp.zeros(uniform.shape[1], jnp.int32), uniform)


def assert_sums(levels, leaves):
    """Each level is the sum of the one below up to one addition's rounding, and the leaves are as given."""
    np.testing.assert_array_equal(np.asarray(levels[0])[: len(leaves)], leaves)
    for lower, upper in zip(levels[:-1], levels[1:], strict=True):
        sums = np.asarray(lower, np.float64).reshape(-1, sum_tree.FAN).sum(-1)
        np.testing.assert_allclose(np.asarray(upper)[: len(sums)], sums, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 31, 33, 512, 513, 5000])
def test_sums_stay_those_of_the_leaves(size):
    levels, leaves = sum_tree.zeros(size), np.zeros(size, np.float32)
    for _ in range(20):
        count = min(size, 24)
        start = int(RNG.integers(size))
        weight = RNG.random(count).astype(np.float32)
        levels = put_range(levels, jnp.int32(start), weight, size)
        leaves[(start + np.arange(count)) % size] = weight
        position = RNG.choice(size, min(size, 16), replace=False).astype(np.int32)
        weight = RNG.random(len(position)).astype(np.float32)
        levels = put(levels, position, weight)
        leaves[position] = weight
    assert_sums(levels, leaves)


@pytest.mark.parametrize("size", [20, 100, 5000])
def test_writes_to_nowhere_are_dropped(size):
    levels = put(sum_tree.zeros(size), jnp.array([3, sum_tree.NOWHERE], jnp.int32), jnp.array([1.0, 9.0]))
    leaves = np.zeros(size, np.float32)
    leaves[3] = 1.0
    assert_sums(levels, leaves)
    assert float(levels[-1].sum()) == 1.0


@pytest.mark.parametrize("size", [20, 700])
def test_counted_items_are_found_by_their_rank(size):
    trees = 2
    there = RNG.random((trees, size)) < 0.3
    there[1, : size // 2] = False  # whole blocks with nothing
    rows = [put_range(sum_tree.zeros(size, jnp.int32), jnp.int32(0), row.astype(np.int32), size) for row in there]
    levels = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    assert all(level.dtype == jnp.int32 for level in levels)
    tree = np.repeat(np.arange(trees, dtype=np.int32), size)
    position = np.tile(np.arange(size, dtype=np.int32), trees)
    before = np.asarray(jax.jit(sum_tree.before)(levels, tree, position)).reshape(trees, size)
    np.testing.assert_array_equal(before, np.cumsum(there, axis=1) - there)
    found = np.asarray(jax.jit(sum_tree.find)(levels, tree, position)).reshape(trees, size)
    for row, places in zip(found, there, strict=True):
        np.testing.assert_array_equal(row[: places.sum()], np.flatnonzero(places))
    assert ((0 <= found) & (found < sum_tree.widths(size)[0])).all()


@pytest.mark.parametrize("size", [20, 700])
def test_frequencies_are_in_proportion(size):
    weight = RNG.random(size).astype(np.float32) ** 3
    weight[RNG.random(size) < 0.2] = 0.0
    levels = put_range(sum_tree.zeros(size), jnp.int32(0), weight, size)
    draws = 100_000
    uniform = jax.random.uniform(jax.random.key(1), (len(levels), draws))
    position = np.asarray(draw(levels, uniform))
    counts = np.bincount(position, minlength=size)
    assert counts[weight == 0].sum() == 0
    expected = weight[weight > 0] / weight.sum(dtype=np.float64) * draws
    seen, expected = counts[weight > 0], expected
    rare = expected < 5
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.long
def test_a_million_equal_weights_are_drawn_evenly():
    """One number of 24 bits for all levels would favor some of a million items by 12 %."""
    size = 2**20
    levels = put_range(sum_tree.zeros(size), jnp.int32(0), np.ones(size, np.float32), size)
    uniform = jax.random.uniform(jax.random.key(2), (len(levels), 400_000))
    position = np.asarray(draw(levels, uniform))
    for bits in (4, 8, 12):
        counts = np.bincount(position % 2**bits, minlength=2**bits)
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24, 1.0])
@pytest.mark.parametrize("only", [0, 7, 99])
def test_the_edges_of_the_uniform_never_give_a_weight_of_0(u, only):
    levels = put(sum_tree.zeros(100), jnp.array([only], jnp.int32), jnp.array([0.1]))
    assert int(draw(levels, jnp.full((len(levels), 1), u))[0]) == only


@pytest.mark.long
def test_a_million_updates_leave_no_drift():
    size, updates, batch = 4096, 1_000_000, 256

    @functools.partial(jax.jit, donate_argnums=0)
    def many(levels, key):
        def body(i, levels):
            keys = jax.random.split(jax.random.fold_in(key, i))
            position = jax.random.randint(keys[0], (batch,), 0, size)
            # Over twelve orders of magnitude, where adding differences would lose the small ones.
            weight = 10.0 ** jax.random.uniform(keys[1], (size,), minval=-6.0, maxval=6.0)
            return put(levels, position, weight[position])

        return jax.lax.fori_loop(0, updates // batch, body, levels)

    levels = many(sum_tree.zeros(size), jax.random.key(0))
    assert_sums(levels, np.asarray(levels[0]))
    levels = sum_tree.put_range(levels, jnp.int32(0), jnp.zeros(size), size)
    assert float(levels[-1].sum()) == 0.0
