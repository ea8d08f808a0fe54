"""Minibatches: exact permutations, statistically good, the same content on any number of devices."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import one_quick
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algos import minibatches
from jaxrl.core import keys

KEYS = 6000
MANY = jax.jit(jax.vmap(minibatches.permutation, (0, None)), static_argnums=1)


@functools.cache
def many(n):
    """One permutation a key."""
    return np.asarray(MANY(keys.unrolled(jax.random.split(jax.random.key(1), KEYS)), n))


def replicas(shards, first_shard=0):
    return types.SimpleNamespace(shards=shards, first_shard=first_shard)


# Around the last sorted size; primes, squares, products of like and unlike primes; one more than a power of two.
@pytest.mark.parametrize("n", one_quick([1, 2, 32, 33, 37, 257, 961, 1021, 2 * 509, 8192], 1, 33, 257))
def test_every_index_comes_once(n):
    shuffled = np.asarray(MANY(keys.unrolled(jax.random.split(jax.random.key(n), 5)), n))
    assert shuffled.dtype == np.int32
    for one in shuffled:
        np.testing.assert_array_equal(np.sort(one), np.arange(n))
    if n > 30:
        assert len({one.tobytes() for one in shuffled}) == 5


@settings(max_examples=3)
@given(st.integers(33, 20_000))
def test_every_index_comes_once_whatever_the_size(n):
    shuffled = MANY(keys.unrolled(jax.random.split(jax.random.key(0), 2)), n)
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), np.broadcast_to(np.arange(n), (2, n)))


@pytest.mark.parametrize("n", [129, 1000, 8192, 2**20, 2**30, 2**31 - 1, 46341 * 46337])
def test_digits_are_small_enough_to_hash_and_hold_every_index(n):
    a, b = minibatches._digits(n)
    assert n <= a * b < n + 2 * b
    assert max(a, b) <= 2**16
    assert a * b < 2**32


def chi_square(counts, expected):
    """How many standard deviations the chi-square statistic of `counts` lies from its mean."""
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = counts.size
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [20, 149, 256])  # sorted, a prime, a power of two
def test_every_place_is_uniform_over_keys(n):
    shuffled, keys = many(n), KEYS
    counts = np.stack([np.bincount(column, minlength=n) for column in shuffled.T])
    assert abs(chi_square(counts, keys / n)) < 5
    # Each row and column of `counts` sums to `keys`, so one place alone says more than all together.
    for column in counts[:: max(1, n // 16)]:
        assert abs(chi_square(column, keys / n)) < 5


@pytest.mark.parametrize("n", one_quick([36, 65, 149, 256]))
def test_pairs_of_rows_land_as_in_a_random_permutation(n):
    """Neighbours, rows of one step and rows of one environment share a minibatch as often and as evenly."""
    digit, parts = minibatches._digits(n)[1], 4
    sizes = np.bincount(np.arange(n) * parts // n)
    expected = np.sum(sizes * (sizes - 1)) / (n * (n - 1))
    ours, keys = many(n), jax.random.split(jax.random.key(1), KEYS)
    by_sort = np.asarray(jax.jit(jax.vmap(lambda key: jax.random.permutation(key, n)))(keys))

    def together(shuffled, apart):
        """The share of pairs that land in one minibatch, for each key."""
        part = shuffled * parts // n
        return np.mean(part[:, apart:] == part[:, :-apart], axis=1)

    for apart in (1, 2, digit - 1, digit, digit + 1, 2 * digit):
        share = together(ours, apart)
        assert abs(share.mean() - expected) < 4 * share.std() / np.sqrt(len(keys)), apart
        assert 0.93 < share.std() / together(by_sort, apart).std() < 1.07, apart


@pytest.mark.parametrize("n", [65, 149])
def test_distances_of_pairs_are_uniform_over_keys(n):
    """(p(i) - p(j)) mod n takes every value but 0 equally often; with 4 rounds it would be the old one too often."""
    shuffled, digit = many(n), minibatches._digits(n)[1]
    for i, j in ((0, 1), (5, 7), (3, 3 + digit), (2, 2 + 2 * digit), (0, n - 1), (n // 2, n // 3)):
        counts = np.bincount((shuffled[:, i] - shuffled[:, j]) % n, minlength=n)[1:]
        assert abs(chi_square(counts, KEYS / (n - 1))) < 4.5, (i, j)


def test_keys_are_independent():
    """Two keys, even neighboring ones, agree at as many places as two random permutations: about one."""
    n, keys = 512, 2000
    shuffled = np.asarray(MANY(jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(jnp.arange(keys)), n))
    agree = np.sum(shuffled[1:] == shuffled[:-1], axis=1)
    assert abs(agree.mean() - 1.0) < 5 / np.sqrt(keys)
    assert abs(agree.var() - 1.0) < 0.25
    assert abs(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(shuffled, shuffled[1:], strict=False)])) < 0.005


def test_a_shard_shuffles_by_its_global_number():
    key = keys.root_key(4)
    shuffle = jax.jit(minibatches.shuffled_indices, static_argnums=(1, 2))
    everything = shuffle(key, 300, 4, jnp.int32(0))
    for first in range(0, 4, 2):
        np.testing.assert_array_equal(shuffle(key, 300, 2, jnp.int32(first)), everything[first : first + 2])
    assert len({row.tobytes() for row in np.asarray(everything)}) == 4


@pytest.mark.parametrize("recurrent", one_quick([False, True]))
def test_content_does_not_depend_on_the_device_count(recurrent):
    rows, envs, shards, count, epochs = 10, 16, 4, 2, 3
    where = np.stack(np.meshgrid(np.arange(rows), np.arange(envs), indexing="ij"), -1)  # (time, environment) of a row

    @functools.partial(jax.jit, static_argnames=("width", "here"))
    def draw(first_shard, *, width, here):
        return minibatches.minibatch_indices(
            keys.root_key(5), rows=rows, num_envs=width, count=count, epochs=epochs, recurrent=recurrent,
            replicas=replicas(here, first_shard),
        )  # fmt: skip

    def content(devices):
        """The (time, environment) pairs of every minibatch, over all devices together."""
        found = [set() for _ in range(epochs * count)]
        here, width = shards // devices, envs // devices
        for device in range(devices):
            local = where[:, device * width : (device + 1) * width]
            indices = np.asarray(draw(device * here, width=width, here=here))
            for seen, index in zip(found, indices, strict=True):
                taken = local[:, index].reshape(-1, 2) if recurrent else local.reshape(-1, 2)[index]
                pairs = list(map(tuple, taken.tolist()))
                assert len(pairs) == len(set(pairs)) == rows * width // count
                seen |= set(pairs)
        return found

    once = content(1)
    assert once == content(4)
    for epoch in range(epochs):
        together = once[epoch * count : (epoch + 1) * count]
        assert len(set.union(*together)) == sum(map(len, together)) == rows * envs
    assert len({frozenset(minibatch) for minibatch in once}) == epochs * count  # epochs differ


def test_every_minibatch_takes_its_portion_of_every_shard():
    rows, envs, shards, count = 12, 8, 4, 3
    draw = functools.partial(
        minibatches.minibatch_indices, rows=rows, num_envs=envs, count=count, replicas=replicas(shards)
    )
    indices = jax.jit(draw)(keys.root_key(6))
    assert indices.shape == (count, rows * envs // count)
    for minibatch in np.asarray(indices):
        from_shard = np.bincount(minibatch % envs // (envs // shards))
        np.testing.assert_array_equal(from_shard, [rows * envs // shards // count] * shards)


def test_taking_keeps_every_bit_and_type():
    rng = np.random.default_rng(7)
    tree = {
        "float": jnp.asarray(rng.normal(size=(6, 4, 3)), jnp.float32).at[0, 0, 0].set(jnp.nan),
        "flag": jnp.asarray(rng.random((6, 4)) < 0.5),
        "pixels": jnp.asarray(rng.integers(0, 256, (6, 4, 2, 2)), jnp.uint8),
        "whole": jnp.asarray(rng.integers(-(2**31), 2**31 - 1, (6, 4)), jnp.int32),
        "key": jax.random.split(jax.random.key(0), (6, 4)),
    }
    index = jnp.asarray([5, 0, 23, 7], jnp.int32)
    taken = minibatches.take_rows(minibatches.flatten_rows(tree), index)
    few = minibatches.take_environments(tree, jnp.asarray([3, 1], jnp.int32))
    carry = minibatches.take_environments(jax.tree.map(lambda x: x[0], tree), jnp.asarray([3, 1], jnp.int32), axis=0)
    for name, leaf in tree.items():
        data = jax.random.key_data if name == "key" else np.asarray
        flat = np.asarray(data(leaf)).reshape((24,) + data(leaf).shape[2:])
        np.testing.assert_array_equal(data(taken[name]), flat[np.asarray(index)])
        np.testing.assert_array_equal(data(few[name]), np.asarray(data(leaf))[:, [3, 1]])
        np.testing.assert_array_equal(data(carry[name]), np.asarray(data(leaf))[0, [3, 1]])
        assert taken[name].dtype == few[name].dtype == leaf.dtype


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_envs": 6, "shards": 4}, ["num_envs=6", "4 shards", "use 4 or 8"]),
        ({"num_envs": 2, "shards": 4}, ["num_envs=2", "use 4"]),
        ({"rows": 127, "num_envs": 8, "shards": 4}, ["254 rows", "num_envs=16", "minibatches=2 or 127"]),
        ({"recurrent": True, "num_envs": 8, "shards": 4}, ["the 2 environments", "num_envs=16", "=2"]),
        ({"recurrent": True, "num_envs": 20, "shards": 1, "count": 8}, ["num_envs=16 or 24", "minibatches=5 or 10"]),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_told_with_what_would(settings, words):
    settings = {"rows": 128, "num_envs": 8, "shards": 4, "count": 4} | settings
    told = "\n".join(minibatches.minibatch_problems(**settings))
    for word in words:
        assert word in told, told
    with pytest.raises(ValueError, match=words[0]):
        shards = settings.pop("shards")
        minibatches.minibatch_indices(jax.random.key(0), **settings, replicas=replicas(shards))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    num_envs=st.integers(1, 64),
    shards=st.integers(1, 8),
    count=st.integers(1, 12),
    recurrent=st.booleans(),
)
def test_what_is_suggested_works(**settings):
    problems = minibatches.minibatch_problems(**settings)
    if not problems:
        assert settings["num_envs"] % settings["shards"] == 0
        return
    (told,) = problems
    advice = told.rpartition("use ")[2]
    for part in advice.split(", or "):
        name = "count" if "minibatches" in part else "num_envs"
        for number in part.replace("num_envs=", "").replace("minibatches=", "").split(" or "):
            left = minibatches.minibatch_problems(**settings | {name: int(number)})
            # The advice on one thing may leave another: shards are told of before minibatches.
            assert not left or "shards; use" in told, (told, settings, left)


def test_no_problem_where_everything_divides():
    for recurrent in (False, True):
        settings = {"rows": 128, "num_envs": 64, "shards": 4, "count": 4, "recurrent": recurrent}
        assert minibatches.minibatch_problems(**settings) == []
