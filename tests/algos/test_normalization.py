"""Running statistics against numpy in float64: in any batches, far from zero, over devices, for nested observations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxrl.algos import normalization
from jaxrl.core import spaces
from jaxrl.core.types import Counter, TimeStep
from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

ONE = SingleReplica()
update = jax.jit(lambda statistics, batch, weight: normalization.update(statistics, batch, weight, ONE))


def moments_of(statistics, name="array"):
    return np.asarray(statistics.moments[name].mean), np.asarray(statistics.moments[name].variance)


def batches(seed, count, shape=(16, 4, 3), mean=0.0, scale=1.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, *shape)) * scale + mean).astype(np.float32), rng.random((count, *shape[:2])) < 0.8


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1.0, -300.0, 1e4]),
    st.sampled_from([1e-3, 1.0, 50.0]),
    st.sampled_from([1, 20, 320]),
)
def test_equals_numpy_over_everything_that_counts_however_it_is_cut(seed, mean, scale, count):
    x, weight = batches(seed, count, shape=(320 // count, 4, 3), mean=mean, scale=scale)
    statistics = normalization.init(jnp.zeros(3))
    for batch, counts in zip(x, weight, strict=True):
        statistics = update(statistics, jnp.asarray(batch), jnp.asarray(counts))
    truth = x[weight].astype(np.float64)
    ours = moments_of(statistics)
    assert int(statistics.count) == weight.sum()
    np.testing.assert_allclose(ours[0], truth.mean(0), rtol=6e-8, atol=1e-6 * scale)
    np.testing.assert_allclose(ours[1], truth.var(0), rtol=3e-6)


def test_many_small_merges_lose_nothing():
    """20,000 batches of 4: a plain float32 sum stands still when an addition is under half a unit in the last place."""
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(20_000, 2, 2)) + np.linspace(100.0, 101.0, 20_000)[:, None, None]).astype(np.float32)

    @jax.jit
    def merge_all(x):
        ones = jnp.ones((2, 2), bool)
        start = normalization.init(jnp.zeros(()))
        return jax.lax.scan(lambda s, batch: (normalization.update(s, batch, ones, ONE), None), start, x)[0]

    statistics = merge_all(jnp.asarray(x))
    truth = x.astype(np.float64)
    np.testing.assert_allclose(moments_of(statistics)[0], truth.mean(), rtol=1.2e-7)
    np.testing.assert_allclose(moments_of(statistics)[1], truth.var(), rtol=1e-6)
    assert int(statistics.count) == 80_000


def test_a_late_change_still_moves_statistics_after_billions_of_rows():
    statistics = normalization.RunningStatistics(
        Counter(jnp.uint32(1), jnp.uint32(5)),  # 2^32 + 5 seen
        {"array": normalization.Moments(*(jnp.float32(v) for v in (10.0, 1.0, 0.0, 0.0)))},
    )
    x, ones = jnp.full((64, 64), 10.5, jnp.float32), jnp.ones((64, 64), bool)
    merge = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda _, s: normalization.update(s, x, ones, ONE), s))
    after = merge(statistics)
    assert int(after.count) == 2**32 + 5 + 1000 * 4096
    share = 1000 * 4096 / int(after.count)
    moved = float(after.moments["array"].mean) - 10.0  # in all some 500 units in the last place
    np.testing.assert_allclose(moved, 0.5 * share, rtol=2e-3)


def test_on_devices_together_as_on_one():
    x, weight = batches(3, 6, shape=(8, 16, 3), mean=100.0)
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    over_devices = jax.jit(
        jax.shard_map(
            lambda s, batch, counts: normalization.update(s, batch, counts, MeshReplicas("devices")),
            mesh=mesh,
            in_specs=(P(), P(None, "devices"), P(None, "devices")),
            out_specs=P(),
            check_vma=False,
        )
    )
    weight[:, :, :4] = False  # one device has nothing to add
    one = four = normalization.init(jnp.zeros(3))
    for batch, counts in zip(x, weight, strict=True):
        one = update(one, jnp.asarray(batch), jnp.asarray(counts))
        four = over_devices(four, jnp.asarray(batch), jnp.asarray(counts))
    assert int(one.count) == int(four.count) == weight.sum()
    np.testing.assert_allclose(moments_of(four)[0], moments_of(one)[0], rtol=1.2e-7)
    np.testing.assert_allclose(moments_of(four)[1], moments_of(one)[1], rtol=1e-6)


SPACE = spaces.Dict(
    {
        "body": spaces.Dict({"position": spaces.Box(-1, 1, (3,)), "touch": spaces.Box(0, 9, (2,), np.int32)}),
        "goal": spaces.Discrete(5),
        "pixels": spaces.Box(0, 255, (2, 2, 1), np.uint8),
        "switches": spaces.MultiDiscrete((2, 3)),
    }
)


def nested(seed, leading=(6, 4)):
    rng = np.random.default_rng(seed)

    def whole(high, shape, dtype):
        return jnp.asarray(rng.integers(0, high, leading + shape).astype(dtype))

    return {
        "body": {
            "position": jnp.asarray(rng.uniform(-1, 1, (*leading, 3)).astype(np.float32)),
            "touch": whole(10, (2,), np.int32),
        },
        "goal": whole(5, (), np.int32),
        "pixels": whole(256, (2, 2, 1), np.uint8),
        "switches": whole(2, (2,), np.int32),
    }


def test_only_floating_leaves_by_default():
    statistics = normalization.init(SPACE)
    assert set(statistics.moments) == {"body/position"}
    assert set(normalization.init(SPACE, integers=True).moments) == {"body/position", "body/touch", "pixels"}
    assert set(normalization.init(spaces.zeros(SPACE)).moments) == {"body/position"}
    seen = nested(0)
    statistics = update(statistics, seen, jnp.ones((6, 4), bool))
    result = normalization.normalize(statistics, seen)
    truth = np.asarray(seen["body"]["position"], np.float64).reshape(-1, 3)
    np.testing.assert_allclose(moments_of(statistics, "body/position")[0], truth.mean(0), rtol=1e-5, atol=1e-6)
    scaled = (truth - truth.mean(0)) / np.sqrt(truth.var(0) + 1e-8)
    np.testing.assert_allclose(result["body"]["position"].reshape(-1, 3), scaled, rtol=1e-4, atol=1e-5)
    for name in ("goal", "pixels", "switches"):
        assert result[name].dtype == seen[name].dtype
        np.testing.assert_array_equal(result[name], seen[name])
    np.testing.assert_array_equal(result["body"]["touch"], seen["body"]["touch"])


def test_parts_whose_names_join_alike_have_statistics_of_their_own():
    box = spaces.Box(-1e3, 1e3, (1,))
    space = spaces.Dict({"a/b": box, "a": spaces.Dict({"b": box})})
    x = jnp.arange(8.0).reshape(4, 2, 1)
    batch = {"a/b": 100.0 + x, "a": {"b": x / 10}}
    statistics = update(normalization.init(space), batch, jnp.ones((4, 2), bool))
    for scaled in jax.tree.leaves(normalization.normalize(statistics, batch)):
        np.testing.assert_allclose((scaled.mean(), scaled.std()), (0.0, 1.0), atol=1e-5)


@pytest.mark.long
def test_integers_where_asked():
    statistics = normalization.init(SPACE, integers=True)
    seen = nested(1)
    statistics = update(statistics, seen, jnp.ones((6, 4), bool))
    pixels = normalization.normalize(statistics, seen)["pixels"]
    assert pixels.dtype == jnp.float32
    np.testing.assert_allclose(np.mean(pixels, axis=(0, 1)), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.std(pixels, axis=(0, 1)), 1.0, rtol=1e-4)


def test_types_and_leading_axes_are_kept():
    statistics = update(normalization.init(jnp.zeros(3)), jnp.arange(24.0).reshape(4, 2, 3), jnp.ones((4, 2), bool))
    whole = jnp.arange(24.0).reshape(4, 2, 3)
    result = normalization.normalize(statistics, whole)
    np.testing.assert_allclose(normalization.normalize(statistics, whole[1, 1]), result[1, 1])
    assert normalization.normalize(statistics, whole.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_entries_that_do_not_count_may_hold_anything():
    x, weight = batches(4, 1)
    junk = np.where(weight[0][..., None], x[0], np.nan)
    clean = update(normalization.init(jnp.zeros(3)), jnp.asarray(x[0]), jnp.asarray(weight[0]))
    dirty = update(normalization.init(jnp.zeros(3)), jnp.asarray(junk), jnp.asarray(weight[0]))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_a_batch_of_nothing_changes_nothing():
    (x,), (weight,) = batches(5, 1)
    empty = normalization.init(jnp.zeros(3))
    for before in (empty, update(empty, jnp.asarray(x), jnp.asarray(weight))):
        after = update(before, jnp.asarray(x), jnp.zeros(weight.shape, bool))
        jax.tree.map(np.testing.assert_allclose, before, after)


@pytest.mark.parametrize("seen", [0, 1])
def test_the_identity_before_two_were_seen(seen):
    x = jnp.asarray([[[3.0, -40.0, 5.0]]])
    statistics = update(normalization.init(jnp.zeros(3)), x, jnp.full((1, 1), bool(seen)))
    np.testing.assert_array_equal(normalization.normalize(statistics, x), x)
    returns = update(normalization.init(spaces.Box(-jnp.inf, jnp.inf, ())), x[..., 0], jnp.full((1, 1), bool(seen)))
    np.testing.assert_array_equal(normalization.scale_reward(returns, x), x)


def test_clip_limits_both_sides_and_may_be_traced():
    x = jnp.asarray(np.random.default_rng(6).normal(size=(50, 2, 1)), jnp.float32)
    statistics = update(normalization.init(jnp.zeros(1)), x, jnp.ones((50, 2), bool))
    far = jnp.asarray([[1e6], [-1e6], [0.0]])
    limited = jax.jit(normalization.normalize)(statistics, far, jnp.float32(2.5))
    np.testing.assert_array_equal(limited[:2, 0], [2.5, -2.5])
    assert abs(float(limited[2, 0])) < 1
    np.testing.assert_array_equal(normalization.normalize(statistics, far)[:2, 0], [10.0, -10.0])


@pytest.mark.parametrize("discounted", [False, True], ids=["gamma", "and discounts"])
def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return(discounted):
    rng = np.random.default_rng(7)
    reward = (rng.normal(size=(200, 3)) * 7 + 2).astype(np.float32)
    first = rng.random((200, 3)) < 0.1
    first[0] = True
    own = rng.uniform(0.5, 1.0, (200, 3)).astype(np.float32) if discounted else np.ones((200, 3), np.float32)
    terminated = np.append(first[1:], first[:1], axis=0)  # whose discount means nothing
    running, truth = jnp.zeros(3), np.zeros(3)
    ours, theirs = [], []
    for r, f, d, end in zip(reward, first, own, terminated, strict=True):
        timestep = TimeStep(None, jnp.asarray(r), jnp.asarray(end), jnp.zeros(3, bool), jnp.asarray(f))
        if discounted:
            timestep = timestep.replace(discount=jnp.where(end, 0.0, d))
        running = normalization.discounted_return(running, timestep, 0.9)
        truth = np.where(f, 0.0, 0.9 * np.where(end, 1.0, d) * truth + r)
        ours.append(running)
        theirs.append(truth)
    np.testing.assert_allclose(np.stack(ours), np.stack(theirs), rtol=1e-4, atol=1e-4)
    statistics = update(normalization.init(spaces.Box(-jnp.inf, jnp.inf, ())), jnp.stack(ours), jnp.asarray(~first))
    deviation = np.stack(theirs)[~first].std()
    np.testing.assert_allclose(
        normalization.scale_reward(statistics, jnp.asarray(reward)), reward / deviation, rtol=1e-4
    )
    assert float(normalization.scale_reward(statistics, jnp.float32(1e9), 5.0)) == 5.0
    assert float(normalization.scale_reward(statistics, jnp.float32(0.0))) == 0.0  # the mean is not subtracted


def statistics_of(x):
    """Running statistics of rows [n, features], in three batches."""
    found = normalization.init(jnp.zeros(x.shape[1]))
    for batch in np.array_split(x.astype(np.float32), 3):
        found = update(found, jnp.asarray(batch), jnp.ones(len(batch), bool))
    return found


VARIED = np.random.default_rng(8).normal(size=(300, 1))


@given(
    st.floats(-20, 20, width=32),
    st.sampled_from([1e-5, 1e-4, 1e-2, 0.03, 1.0, 1e3, 1e6]),
    st.floats(-100, 100, width=32),
)
def test_units_and_origins_of_what_varies_do_not_matter(value, scale, origin):
    """Whatever a feature is measured in, what comes out is (x - mean) / std; the oracle is NumPy in float64."""
    unit = lambda x: (scale * (x + origin)).astype(np.float32)  # noqa: E731
    seen, new = unit(VARIED), unit(np.asarray([[value]]))
    ours = normalization.normalize(statistics_of(seen), jnp.asarray(new), jnp.inf)
    truth = seen.astype(np.float64)
    np.testing.assert_allclose(ours, (new - truth.mean(0)) / truth.std(0), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mean", [1.0, -101.325, 101325.0, 1.7e9, -3e17])
def test_an_offset_of_many_deviations_does_not_matter(mean):
    """Features that vary by 40 and 400 steps of float32, that are constant at first, and whose mean drifts."""
    noise = VARIED * np.asarray([40.0, 400.0, 40.0, 40.0]) * np.spacing(np.float32(abs(mean)))
    noise[:100, 2] = 0.0
    x = (mean * (1 + np.linspace(0, [0, 0, 0, 1], 300)) + noise).astype(np.float32)
    truth = x.astype(np.float64)
    ours = normalization.normalize(statistics_of(x), jnp.asarray(x), jnp.inf)
    np.testing.assert_allclose(ours, (truth - truth.mean(0)) / truth.std(0), atol=0.03)


@given(
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([0.0, 1e-8, 1e-7, 1e-6]),
    st.sampled_from([1.0, 1.0001, 1.001, 1.1, -3.0]),
)
def test_what_hardly_varied_is_zero_whatever_it_is_now(constant, jitter, factor):
    """Not a thousand deviations, where an environment differs a little from its data; nor what rounding leaves."""
    x = constant * (1 + jitter * VARIED[:60])
    now = jnp.asarray([[constant], [factor * constant], [factor * constant + 0.1]], jnp.float32)
    assert not np.any(normalization.normalize(statistics_of(x), now, jnp.inf))


@given(st.floats(-1e3, 1e3, width=32), st.floats(-20, 20, width=32))
def test_rewards_stay_as_they_are_while_returns_do_not_vary(constant, reward):
    """Sparse rewards are 0 for a long time: the first that is not does not become 10,000 times as large."""
    found = normalization.init(spaces.Box(-jnp.inf, jnp.inf, ()))
    found = update(found, jnp.full((8, 4), constant, jnp.float32), jnp.ones((8, 4), bool))
    assert normalization.scale_reward(found, jnp.float32(reward), jnp.inf) == np.float32(reward)


def test_rows_may_each_have_statistics_of_their_own():
    """As rollouts of several versions in one batch have; the first one has seen nothing, and is left as it is."""
    x, weight = batches(7, 3, mean=3.0, scale=2.0)
    one = normalization.init(jnp.zeros(3))
    reward = normalization.init(jnp.float32(0.0))
    apart, rewards = [], []
    for batch, counts in zip(x, weight, strict=True):
        apart += [one]
        rewards += [reward]
        one = update(one, jnp.asarray(batch), jnp.asarray(counts))
        reward = update(reward, jnp.asarray(batch[..., 0]), jnp.asarray(counts))
    rows = jnp.asarray(x[0][:, :3])  # [T, B, 3]
    together = normalization.normalize(jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart), rows)
    scaled = normalization.scale_reward(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rewards), rows[..., 0])
    for place, (mine, of_reward) in enumerate(zip(apart, rewards, strict=True)):
        np.testing.assert_allclose(together[:, place], normalization.normalize(mine, rows[:, place]), rtol=1e-6)
        alone = normalization.scale_reward(of_reward, rows[:, place, 0])
        np.testing.assert_allclose(scaled[:, place], alone, rtol=1e-6)
    assert (together[:, 0] == rows[:, 0]).all() and (together[:, 1] != rows[:, 1]).any()
