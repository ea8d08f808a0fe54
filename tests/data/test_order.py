"""Permutations of which any part is computed at once: exact for every size, well mixed, and never another tomorrow."""

import numpy as np
import pytest
from scipy import stats

from jaxrl.data.order import permuted, runs


@pytest.mark.parametrize("n", [*range(1, 70), 100, 255, 1000, 4096, 65_537, 100_003])
def test_every_index_comes_once(n):
    assert sorted(permuted(np.arange(n), n, 3, n).tolist()) == list(range(n))


def test_a_part_is_that_of_the_whole_in_any_shape():
    whole = permuted(np.arange(5000), 5000, 1, 2)
    part = np.asarray([[4999, 0], [17, 17]])
    np.testing.assert_array_equal(permuted(part, 5000, 1, 2), whole[part])
    assert permuted(np.asarray([], np.int64), 5000, 1).size == 0
    n = 10**15 + 7
    found = permuted(np.arange(100), n, 5)
    assert len(set(found.tolist())) == 100 and 0 <= found.min() and found.max() < n


def test_they_are_the_same_on_every_machine_and_with_every_numpy():
    assert permuted(np.arange(10), 10, 0).tolist() == [3, 9, 5, 8, 1, 7, 6, 4, 0, 2]
    assert permuted(np.arange(8), 1000, 0, 1).tolist() == [610, 648, 526, 953, 394, 652, 184, 476]


@pytest.mark.long
@pytest.mark.parametrize("n", [5, 64, 65, 1000])
def test_they_are_spread_as_those_of_chance(n):
    """The place of one index and the distance of neighbors, over many keys."""
    bins, keys = 4, 2000
    found = np.stack([permuted(np.asarray([0, n // 2, n // 2 + 1]), n, key) for key in range(keys)])
    places = np.bincount(found[:, 0] * bins // n, minlength=bins)
    expected = np.bincount(np.arange(n) * bins // n, minlength=bins) * keys / n
    assert stats.chisquare(places, expected).pvalue > 1e-3
    apart = (found[:, 2] - found[:, 1]) % n
    counts = np.bincount((apart - 1) * bins // (n - 1), minlength=bins)
    expected = np.bincount(np.arange(n - 1) * bins // (n - 1), minlength=bins) * keys / (n - 1)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_other_keys_give_other_permutations():
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2**64 - 1,), (2**40,)]
    assert len({tuple(permuted(np.arange(200), 200, *key).tolist()) for key in keys}) == len(keys)
    assert len({tuple(permuted(np.arange(20), 20, *key).tolist()) for key in keys}) == len(keys)


def test_runs_are_stretches_of_equal_labels():
    assert list(runs(np.asarray([3, 3, 1, 3, 0, 0]))) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(runs(np.asarray([7]))) == [(0, 1)] and list(runs(np.asarray([]))) == []
