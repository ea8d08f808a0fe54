"""The tournaments against a pass over all items in numpy: after any puts, with ties, and where nothing is there."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import one_quick
from hypothesis import strategies as st

from jaxrl.buffers import best_tree, sum_tree

TREES, MOST = 2, 6
ABSENT = -np.inf
FIRST = st.sampled_from([ABSENT, -2.0, -0.0, 0.0, 1.5])
SECOND = st.integers(-2, 2)


def ranks_of(first, second):
    return lambda tree, position: (first[tree, position], second[tree, position])


@functools.cache
def compiled(size):
    def put(levels, first, second, tree, position):
        return best_tree.put(levels, tree, position, size, ranks_of(first, second))

    def put_range(levels, first, second, start):
        return best_tree.put_range(levels, start, min(MOST, size), size, ranks_of(first, second))

    def best(levels, first, second):
        return best_tree.best(levels, TREES, size, ranks_of(first, second))

    return jax.jit(put), jax.jit(put_range), jax.jit(best)


def expected(first, second):
    """The largest of each row, and of equal ones the lowest position."""
    return [min(range(len(a)), key=lambda i: (-a[i], -b[i], i)) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("size", one_quick([1, 5, 33, 300, 5000], 1, 300))
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
def test_it_is_the_best_of_all_after_any_puts(size, data):
    put, put_range, best = compiled(size)
    first, second = np.full((TREES, size), ABSENT, np.float32), np.zeros((TREES, size), np.int32)
    levels = best_tree.init(TREES, size)
    place = st.one_of(st.integers(0, size - 1), st.integers(max(size - 20, 0), size - 1))
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            start, count = data.draw(place), min(MOST, size)
            position = (start + np.arange(count)) % size
            for tree in range(TREES):
                first[tree, position] = data.draw(st.lists(FIRST, min_size=count, max_size=count))
                second[tree, position] = data.draw(st.lists(SECOND, min_size=count, max_size=count))
            levels = put_range(levels, first, second, np.int32(start))
        else:
            # One place may come twice, and some are nowhere.
            tree = np.array(data.draw(st.lists(st.integers(0, TREES - 1), min_size=MOST, max_size=MOST)), np.int32)
            position = np.array(data.draw(st.lists(place, min_size=MOST, max_size=MOST)), np.int32)
            first[tree, position] = data.draw(st.lists(FIRST, min_size=MOST, max_size=MOST))
            second[tree, position] = data.draw(st.lists(SECOND, min_size=MOST, max_size=MOST))
            levels = put(levels, first, second, np.append(tree, 0)[:7], np.append(position, sum_tree.NOWHERE)[:7])
        np.testing.assert_array_equal(best(levels, first, second), expected(first, second))


def test_items_are_taken_from_the_best_to_the_worst():
    """As a batch draws and removes them: every block is emptied, and nothing absent comes before what is there."""
    size = 600
    put, put_range, best = compiled(size)
    rng = np.random.default_rng(0)
    first = rng.integers(0, 40, (TREES, size)).astype(np.float32)
    second = rng.integers(0, 3, (TREES, size)).astype(np.int32)
    levels = best_tree.init(TREES, size)
    for start in range(0, size, MOST):
        levels = put_range(levels, first, second, np.int32(start))
    tree = np.arange(TREES, dtype=np.int32)
    for _ in range(size):
        position = np.asarray(best(levels, first, second))
        np.testing.assert_array_equal(position, expected(first, second))
        first[tree, position] = ABSENT
        levels = put(levels, first, second, tree, position)
    assert (first == ABSENT).all()


def test_mapped_over_runs_it_is_the_same():
    size, runs = 300, 3
    rng = np.random.default_rng(1)
    first = jnp.asarray(rng.integers(0, 5, (runs, TREES, size)), jnp.float32)
    second = jnp.asarray(rng.integers(0, 5, (runs, TREES, size)), jnp.int32)
    start = jnp.asarray([0, 7, 290], jnp.int32)

    def one(first, second, start):
        ranks, levels = ranks_of(first, second), best_tree.init(TREES, size)
        levels = best_tree.put_range(levels, start, size, size, ranks)
        return best_tree.best(levels, TREES, size, ranks)

    found = jax.jit(jax.vmap(one))(first, second, start)
    for run in range(runs):
        np.testing.assert_array_equal(found[run], expected(np.asarray(first[run]), np.asarray(second[run])))
