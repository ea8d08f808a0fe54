"""Loaders: every item once an epoch and as a view of its episode has it, whatever is kept; exact to go on with."""

import dataclasses
import itertools
import weakref
from collections import Counter

import jax
import numpy as np
import pytest
from helpers.made import ENDINGS, made
from helpers.recorded import assert_bitwise
from helpers.refused import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.core.sources import Sequence
from jaxrl.core.types import TransitionBatch
from jaxrl.data import views
from jaxrl.data.batching import Loader, arrays
from jaxrl.data.rows import rows_from_episode
from jaxrl.parallel import memory

pytest.importorskip("grain")


class InMemory:
    """A dataset of episodes that are there; counts how often each is read, and how many are held at once."""

    def __init__(self, lengths, discounted=False):
        self._made = [made(n, ENDINGS[i % 3], i, True, discounted and i % 2) for i, n in enumerate(lengths)]
        self.lengths = np.asarray(lengths, np.int64)
        self.reads: Counter[int] = Counter()
        self.held = self.most_held = 0

    def __iter__(self):
        return iter(self._made)

    def read(self, indices):
        for index in indices.tolist():
            one = self._made[index]
            one = dataclasses.replace(one, observation=jax.tree.map(np.copy, one.observation))
            self.reads[index] += 1
            self.held += 1
            self.most_held = max(self.most_held, self.held)
            weakref.finalize(one.observation["picture"], self._freed)
            yield one

    def _freed(self):
        self.held -= 1


def columns(batch, axis):
    """The items of a batch."""
    size = batch.weight.shape[0] if axis == 0 else batch.mask.shape[1]
    return [jax.tree.map(lambda x, i=i: np.take(x, [i], axis=axis), batch) for i in range(size)]


def settled(item):
    """An item with discounts, as a loader gives them, zero where they mean nothing."""
    item = item.with_discounts()
    if isinstance(item, TransitionBatch):
        return item
    return item.replace(rows=item.rows.replace(discount=np.where(item.rows.weight, item.rows.discount, np.float32(0))))


def expected(dataset, n_step, sequence):
    """By the number of its first row, every item of a dataset."""
    if sequence is None:
        found = [item for one in dataset for item in columns(views.transitions(one, n_step), 0)]
        return {int(item.observation["number"][0]): item for item in found}
    if sequence.end == "continue":
        rows = [rows_from_episode(one) for one in dataset]
        rows = jax.tree.map(lambda *x: np.concatenate(x), *(one.replace(discount=one.discounts) for one in rows))
        take = lambda name, at: jax.tree.map(lambda x: x[at], getattr(rows, name))  # noqa: E731
        start = np.arange(0, len(rows.first) - sequence.rows + 1, sequence.period)
        batch = views.gather_sequences(take, start, np.full_like(start, sequence.rows), sequence)
        found = columns(batch, 1)
    else:
        found = [item for one in dataset for item in columns(views.sequences(one, sequence), 1)]
    return {int(item.rows.observation["number"][0, 0]): item for item in found}


SEQUENCES = st.builds(
    Sequence,
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(("write", "truncate", "zero_pad", "continue")),
    st.integers(0, 2),
)


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=7),
    st.none() | SEQUENCES,
    st.integers(1, 4),
    st.integers(1, 9),
    st.none() | st.integers(1, 8),
    st.sampled_from((0, 1000, 1 << 28)),
    st.integers(0, 3),
)
def test_an_epoch_has_every_item_once_as_its_view_has_it(lengths, sequence, n_step, size, window, cache_bytes, seed):
    dataset = InMemory(lengths, discounted=True)
    wanted = expected(dataset, n_step, sequence)
    settings = {"n_step": n_step, "sequence": sequence, "seed": seed, "window": window, "extras": ("value",)}
    if not wanted:
        with pytest.raises(ConfigError, match="episodes has"):
            Loader(dataset, size, **settings)
        return
    loader = Loader(dataset, size, **settings, cache_bytes=cache_bytes)
    assert loader.items == len(wanted)
    axis = 0 if sequence is None else 1
    stream = (item for number in itertools.count() for item in columns(loader.batch(number), axis))
    for _ in range(3):  # epochs
        epoch = list(itertools.islice(stream, len(wanted)))
        firsts = [item.observation if sequence is None else item.rows.observation for item in epoch]
        numbers = [int(first["number"].ravel()[0]) for first in firsts]
        assert sorted(numbers) == sorted(wanted)
        for number, item in zip(numbers, epoch, strict=True):
            assert_bitwise(settled(item), settled(wanted[number]))


def order_of(loader, batches):
    return np.concatenate([loader.batch(number).observation["number"] for number in range(batches)])


def test_the_order_depends_on_the_seed_and_the_epoch_and_on_nothing_else():
    dataset = InMemory([5, 9, 1, 7, 3, 7])  # 32 transitions
    order = order_of(Loader(dataset, 8), 8)
    np.testing.assert_array_equal(order, order_of(Loader(dataset, 8, cache_bytes=0), 8))
    np.testing.assert_array_equal(order, order_of(Loader(dataset, 16), 4))
    assert (order[:32] != order[32:]).any()
    assert (order != order_of(Loader(dataset, 8, seed=1), 8)).any()
    windowed = order_of(Loader(dataset, 8, window=2), 8)
    assert (windowed[:32] != windowed[32:]).any()


def test_a_window_reads_each_episode_once_an_epoch_and_holds_few():
    dataset = InMemory([6] * 30)
    loader = Loader(dataset, 7, window=3, cache_bytes=0)
    drawn = []
    for number in range(180 // 7):
        drawn += (loader.batch(number).observation["number"] // 1000).tolist()
    assert max(dataset.reads.values()) == 1
    assert dataset.most_held <= 6 + 4  # two windows, and those that a batch is made of
    for begin in range(0, 18 * 9, 18):
        assert len(set(drawn[begin : begin + 18])) == 3


def test_a_window_that_fits_is_of_episodes_that_are_kept_twice():
    dataset = InMemory([6] * 30)
    rows = memory.size_of(rows_from_episode(next(iter(dataset))).replace(extras={}))
    for cache_bytes, window in ((30 * rows, None), (29 * rows, 14), (9 * rows, 4), (rows, 1)):
        fitted, wanted = (Loader(dataset, 16, window=size, cache_bytes=cache_bytes) for size in ("fit", window))
        np.testing.assert_array_equal(order_of(fitted, 30), order_of(wanted, 30))


def test_what_is_kept_is_bounded():
    dataset = InMemory([20] * 40)
    rows = memory.size_of(rows_from_episode(next(iter(dataset))).replace(extras={}))
    loader = Loader(dataset, 64, cache_bytes=5 * rows)
    for number in range(10):
        loader.batch(number)
    assert dataset.most_held <= 3 * 5 + 1  # kept, used for a part of a batch, and to be used for it
    assert max(dataset.reads.values()) > 1  # and what is not kept is read again


# --- in order, and from any place ------------------------------------------------------------------------------------


def test_iterators_go_on_exactly_where_they_were():
    dataset = InMemory([5, 9, 1, 7, 3, 7])
    loader = Loader(dataset, 6, n_step=3)
    iterator = iter(loader)
    for number in range(5):
        assert_bitwise(next(iterator), loader.batch(number))
    state = iterator.get_state()
    assert state == {"next_batch": 5}
    following = [next(iterator) for _ in range(4)]
    again = iter(Loader(dataset, 6, n_step=3))
    again.set_state(state)
    for wanted in following:
        assert_bitwise(next(again), wanted)
    iterator.set_state(state)
    assert_bitwise(next(iterator), following[0])
    iterator.close()
    again.close()


def test_a_pipeline_is_grains():
    loader = Loader(InMemory([5, 9, 1]), 4)
    doubled = loader.pipeline(2).map(lambda batch: batch.rewards * 2)
    np.testing.assert_array_equal(next(iter(doubled)), loader.batch(2).rewards * 2)


@pytest.mark.parametrize("sequence", [None, Sequence(3, 2, "truncate")])
def test_taken_batches_are_stacked(sequence):
    dataset = InMemory([5, 9, 1, 7])
    with Loader(dataset, 4, sequence=sequence) as loader:
        for first, count in ((0, 3), (3, 3), (6, 2), (8, 2), (1, 2), (3, 2)):
            taken = loader.take(first, count)
            for number in range(count):
                assert_bitwise(jax.tree.map(lambda x, n=number: x[n], taken), loader.batch(first + number))
        loader.close()
        assert_bitwise(jax.tree.map(lambda x: x[0], loader.take(7, 1)), loader.batch(7))


def test_what_fails_while_reading_ahead_is_raised_and_can_be_tried_again():
    dataset = InMemory([5, 9, 1, 7])
    with Loader(dataset, 4, cache_bytes=0) as loader:
        read, dataset.read = dataset.read, lambda indices: iter(())[0]
        with pytest.raises(TypeError):
            loader.take(0, 2)
        dataset.read = read
        assert_bitwise(jax.tree.map(lambda x: x[1], loader.take(0, 2)), loader.batch(1))


# --- in memory -------------------------------------------------------------------------------------------------------


def test_all_rows_are_those_of_the_episodes():
    dataset = InMemory([5, 9, 1])
    everything = arrays(dataset, extras=("value",))
    assert_bitwise(everything, jax.tree.map(lambda *x: np.concatenate(x), *(rows_from_episode(one) for one in dataset)))
    assert arrays(dataset).extras == {} and everything.discount is None
    dataset = InMemory([5, 9, 1], discounted=True)
    wanted = [x for one in dataset for x in rows_from_episode(one).discounts]
    np.testing.assert_array_equal(arrays(dataset).discount, wanted)


def test_rows_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    dataset = InMemory([5, 9, 1])
    row = memory.size_of(arrays(dataset)) // 18
    monkeypatch.setattr(memory, "free_on_host", lambda: 18 * row)
    dataset.reads.clear()
    with pytest.raises(ConfigError, match="18 rows need .*dataset.loader"):
        arrays(dataset)
    assert dataset.reads == {0: 1}


# --- what a dataset promises and does not keep ----------------------------------------------------------------------


def shorter(one):
    return views.truncate(one, lambda one: np.arange(len(one.is_last)) == 2)


def longer(one):
    return views.last_step_counts(one) if one.is_terminal[-1] else made(9, ENDINGS[1])


def changed(**arrays):
    """Changes an array of an episode, by its name."""

    def change(one):
        return dataclasses.replace(one, **{name: function(getattr(one, name)) for name, function in arrays.items()})

    return change


WRONG = {
    "shorter": (shorter, "transitions"),
    "longer": (longer, "transitions"),
    "another type": (changed(observation=lambda x: x | {"vector": x["vector"].astype(np.float64)}), "vector"),
    "a field less": (changed(action=lambda x: {"how": x["how"]}), "which"),
    "a reward beyond float32": (
        changed(reward=lambda x: np.where(np.arange(len(x)) == 1, -1e300, x.astype(np.float64))),
        "reward",
    ),
    "a reward of text": (changed(reward=lambda x: x.astype(str)), "reward"),
    "a discount that means nothing": (changed(discount=lambda x: np.full_like(x, 1.1)), "discount"),
}


class Broken(InMemory):
    """A dataset whose last episode is not what it promised."""

    def __init__(self, change):
        super().__init__([5, 6, 7])
        self._made[2] = change(self._made[2])


@pytest.mark.parametrize(("change", "field"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("end", [None, "write", "continue"])
def test_memory_that_nobody_wrote_is_never_given(change, field, end):
    sequence = None if end is None else Sequence(3, 1, end)
    with Loader(Broken(change), 64, sequence=sequence) as loader:
        for read in (lambda: loader.batch(0), lambda: loader.take(0, 2), lambda: next(iter(loader))):
            with pytest.raises(DatasetError, match=f"episode 2.*{field}"):
                read()
    with pytest.raises(DatasetError, match=f"episode 2.*{field}"):
        arrays(Broken(change))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_settings_out_of_range_are_told_together():
    with pytest.raises(ConfigError) as error:
        Loader(InMemory([3]), 0, n_step=0, seed=-1, workers=-1)
    named = [problem.partition("=")[0] for problem in error.value.problems]
    assert named == ["batch_size", "n_step", "seed", "workers"]
    refused(lambda: Loader(InMemory([3]), 1, window=0), "window=0")
    refused(lambda: Loader(InMemory([3]), 1, sequence=Sequence(2, stored_carry=True)), "stored_carry")
    with pytest.raises(ConfigError, match="9 steps; .* 3 transitions"):
        Loader(InMemory([3, 2]), 1, sequence=Sequence(9, end="write"))
    refused(lambda: Loader(InMemory([]), 1), "none of 0 episodes")
    refused(lambda: arrays(InMemory([])), "the dataset has no episodes")
    loader = Loader(InMemory([3]), 1, extras=("values",))
    refused(lambda: loader.batch(0), "did you mean 'value'")
    refused(lambda: loader.batch(-1), "number=-1 must be at least 0")
    refused(lambda: loader.take(0, 0), "count=0 must be at least 1")
