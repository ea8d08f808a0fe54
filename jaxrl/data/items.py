"""Numbering, shuffling and reading of a dataset's items, which are transitions or sequences.

Positions and order of the items are computed from the episode lengths; only the lengths and the episodes being read are
held in memory. Grain prefetches batches, but its samplers are not used, because they order the records of a file, and a
record is a whole episode.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

import jax
import numpy as np

from jaxrl.core.errors import ConfigError, DatasetError, unknown
from jaxrl.core.sources import Sequence
from jaxrl.core.types import SequenceBatch, Trajectory, TransitionBatch
from jaxrl.data import views
from jaxrl.data.episodes import Episode, Kind, check_kind, kind_of
from jaxrl.data.order import permuted, runs
from jaxrl.data.rows import rows_from_episode
from jaxrl.parallel.memory import size_of


class Episodes(Protocol):
    """A source of episodes, such as a `Dataset`."""

    @property
    def lengths(self) -> np.ndarray:
        """The number of transitions of each episode, int64."""
        ...

    def read(self, indices: np.ndarray) -> Iterator[Episode]:
        """Yield the episodes at these indices, in the given order."""
        ...


def with_extras(rows: Trajectory[np.ndarray], extras: tuple[str, ...]) -> Trajectory[np.ndarray]:
    """Return the rows with only the extra fields named in `extras`.

    Raises:
      ConfigError: an extra field is absent, or is text.
    """
    for name in extras:
        if name not in rows.extras:
            raise unknown("extra field of the steps", name, rows.extras)
        for leaf in jax.tree.leaves(rows.extras[name]):
            if leaf.dtype.kind in "OSU":
                raise ConfigError(f"extras={name!r}: the field is text, which a batch cannot hold; remove it")
    return rows.replace(extras={name: rows.extras[name] for name in extras})


class RowReader:
    """A reader of a dataset's episodes as rows; it checks that all rows have the same dtypes and shapes.

    Args:
      dataset: the dataset to read.
      extras: names of the extra fields of the steps to keep.
    """

    def __init__(self, dataset: Episodes, extras: tuple[str, ...]):
        self._dataset, self._extras = dataset, extras
        self._lengths = dataset.lengths
        self._kind: Kind | None = None  # of the first rows read

    def read(self, indices: np.ndarray) -> Iterator[Trajectory[np.ndarray]]:
        """Yield the rows of the episodes at these indices, in the given order, with leaves `[transitions + 1, ...]`.

        Raises:
          ConfigError: an extra field is absent, or is text.
          DatasetError: an episode has another length than `dataset.lengths` states, other arrays than the episodes read
            before, or a number that float32 cannot represent.
        """
        for index, episode in zip(indices.tolist(), self._dataset.read(indices), strict=True):
            if episode.length != self._lengths[index]:
                raise DatasetError(
                    f"episode {index} has {episode.length:,} transitions, but had {self._lengths[index]:,} "
                    "before; the function passed to map must return the same length at every call"
                )
            try:
                rows = with_extras(rows_from_episode(episode), self._extras)
                rows = rows.replace(discount=rows.discounts)  # a later episode may have discounts
                self._kind = check_kind(kind_of(rows, axes=1), self._kind)
            except DatasetError as error:
                raise DatasetError(f"episode {index}: {error}") from error
            yield rows


class Batches:
    """A callable that returns batch number k of a `Loader`. Threads can share an instance; each process has a copy."""

    def __init__(
        self,
        dataset: Episodes,
        batch_size: int,
        n_step: int,
        sequence: Sequence | None,
        seed: int,
        window: int | None,
        extras: tuple[str, ...],
        cache_bytes: int,
    ):
        self._size, self._n_step, self._sequence = batch_size, n_step, sequence
        self._lengths = dataset.lengths
        self._first_row = np.append(0, np.cumsum(self._lengths + 1))
        counts = self._counts()
        self.items = int(counts.sum())
        if not self.items:
            what = "a transition" if sequence is None else f"a sequence of {sequence.rows} steps"
            longest = f"the longest has {self._lengths.max():,} transitions" if len(counts) else "the dataset is empty"
            raise ConfigError(f"none of {len(counts):,} episodes has {what}; {longest}")
        self._order = _Order(counts, seed, window)
        self._cache = _Cache(dataset, extras, cache_bytes, 0 if window is None else 2 * window)

    def __call__(self, number: int) -> TransitionBatch | SequenceBatch:
        places = number * self._size + np.arange(self._size)
        episode, within = self._order(places)
        start, extent = self._place(episode, within)
        by_episode = np.argsort(episode, kind="stable")
        start, extent = start[by_episode], extent[by_episode]
        parts = [
            self._gather(held, start[part], extent[part])
            for part, held in self._read(episode[by_episode], start, extent)
        ]
        back = np.empty_like(by_episode)
        back[by_episode] = np.arange(self._size)
        axis = 0 if self._sequence is None else 1
        return jax.tree.map(lambda *x: np.concatenate(x, axis).take(back, axis), *parts)

    def _counts(self):
        """Return the number of items that begin in each episode."""
        if self._sequence is None:
            return self._lengths
        if self._sequence.end != "continue":
            lengths, which = np.unique(self._lengths, return_inverse=True)
            starts = [views.stretches(length + 1, self._sequence)[0] for length in lengths.tolist()]
            return np.asarray(list(map(len, starts)), np.int64)[which]
        period, latest = self._sequence.period, self._first_row[-1] - self._sequence.rows
        before = lambda row: -(-np.minimum(row, latest + 1) // period)  # noqa: E731  (number of items before a row)
        return np.maximum(before(self._first_row[1:]), 0) - np.maximum(before(self._first_row[:-1]), 0)

    def _place(self, episode, within):
        """Return (start, extent) of each item: its first row, and its extent for `views.gather_*`.

        The extent is the number of transitions to the episode's end for transitions, or of rows for sequences.
        """
        first, lengths = self._first_row[episode], self._lengths[episode]
        if self._sequence is None:
            return first + within, lengths - within
        if self._sequence.end == "continue":
            period = self._sequence.period
            return (-(-first // period) + within) * period, np.full_like(within, self._sequence.rows)
        stretches = [views.stretches(length + 1, self._sequence) for length in lengths.tolist()]
        pairs = [(starts[i], extents[i]) for (starts, extents), i in zip(stretches, within.tolist(), strict=True)]
        start, extents = np.asarray(pairs, np.int64).reshape(-1, 2).T
        return first + start, extents

    def _read(self, episode, start, extent):
        """Yield (slice of the items, rows of their episodes), with as many episodes at once as fit in the cache."""
        last = episode
        if self._sequence is not None and self._sequence.end == "continue":
            last = np.searchsorted(self._first_row, start + extent - 1, side="right") - 1
        numbers = sorted(
            {e for low, high in {*zip(episode.tolist(), last.tolist(), strict=True)} for e in range(low, high + 1)}
        )
        stream, held, size, begin = self._cache.get(numbers), {}, 0, 0
        for item in range(len(episode)):
            while last[item] not in held:
                number, rows = next(stream)
                held[number] = rows
                size += size_of(rows)
            final = item + 1 == len(episode)
            if final or (self._cache.full(size, len(held)) and episode[item + 1] != episode[item]):
                yield slice(begin, item + 1), held
                begin = item + 1
                if not final:
                    held = {number: rows for number, rows in held.items() if number >= episode[item + 1]}
                    size = sum(map(size_of, held.values()))

    def _gather(self, held, start, extent):
        def take(name, at):
            flat, order = at.ravel(), None
            owner = np.searchsorted(self._first_row, flat, side="right") - 1
            if (owner[1:] < owner[:-1]).any():
                order = np.argsort(owner, kind="stable")
                flat, owner = flat[order], owner[order]
            local = flat - self._first_row[owner]
            example, structure = jax.tree.flatten(getattr(held[int(owner[0])], name))
            found = [np.empty((len(flat), *x.shape[1:]), x.dtype) for x in example]
            for low, high in runs(owner):
                rows = local[low:high]
                for target, leaf in zip(found, jax.tree.leaves(getattr(held[int(owner[low])], name)), strict=True):
                    leaf.take(rows, 0, target[low:high], "clip")  # "raise" would write to a copy first
            if order is not None:
                back = np.argsort(order)
                found = [x[back] for x in found]
            return jax.tree.unflatten(structure, [x.reshape(at.shape + x.shape[1:]) for x in found])

        if self._sequence is None:
            return views.gather_transitions(take, start, extent, self._n_step)
        return views.gather_sequences(take, start, extent, self._sequence)


class _Order:
    """A mapping from positions in the endless stream of shuffled items to pairs (episode, item within the episode)."""

    def __init__(self, counts, seed, window):
        self._counts, self._seed, self._window = counts, seed, window
        self._items = int(counts.sum())
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = OrderedDict()

    def __call__(self, places):
        episode, within = np.empty((2, len(places)), np.int64)
        epochs = places // self._items
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            episode[here], within[here] = self._of_epoch(epoch, places[here] - epoch * self._items)
        return episode, within

    def _of_epoch(self, epoch, place):
        episodes, first, edges = self._epoch(epoch)
        window = np.searchsorted(edges, place, side="right") - 1
        shuffled = np.empty_like(place)
        for number in np.unique(window).tolist():
            here, low = window == number, edges[number]
            size = int(edges[number + 1] - low)
            shuffled[here] = low + permuted(place[here] - low, size, self._seed, epoch, number)
        at = np.searchsorted(first, shuffled, side="right") - 1
        return episodes[at], shuffled - first[at]

    def _epoch(self, epoch):
        """Return the episodes in the epoch's order, and the first item of each episode and of each window."""
        found = self._epochs.get(epoch if self._window is not None else 0)
        if found is not None:
            return found
        episodes = np.arange(len(self._counts))
        if self._window is not None:
            episodes = permuted(episodes, len(episodes), self._seed, epoch)
        first = np.append(0, np.cumsum(self._counts[episodes]))
        edges = first[[0, -1]] if self._window is None else np.append(first[: -1 : self._window], first[-1])
        found = self._epochs[epoch if self._window is not None else 0] = (episodes, first, edges)
        while len(self._epochs) > 2:
            self._epochs.popitem(last=False)
        return found


class _Cache:
    """A cache of the rows of recently read episodes."""

    def __init__(self, dataset: Episodes, extras: tuple[str, ...], max_bytes: int, min_episodes: int):
        self._settings = dataset, extras, max_bytes, min_episodes
        self._reader, self._max_bytes, self._min_episodes = RowReader(dataset, extras), max_bytes, min_episodes
        self._rows: OrderedDict[int, Trajectory[np.ndarray]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self):
        return _Cache, self._settings

    def full(self, size: int, episodes: int) -> bool:
        """Return whether the rows of `episodes` episodes, `size` bytes in total, reach the limits of the cache."""
        return size >= self._max_bytes and episodes >= self._min_episodes

    def get(self, numbers: Iterable[int]) -> Iterator[tuple[int, Trajectory[np.ndarray]]]:
        """Yield (number, rows) for each of these episodes, reading those that are not cached."""
        with self._lock:
            here = {number: self._rows[number] for number in numbers if number in self._rows}
            for number in here:
                self._rows.move_to_end(number)
        fresh = self._reader.read(np.asarray([number for number in numbers if number not in here], np.int64))
        for number in numbers:
            if number in here:
                yield number, here.pop(number)
                continue
            rows = next(fresh)
            self._put(number, rows)
            yield number, rows

    def _put(self, number, rows):
        with self._lock:
            if number not in self._rows:
                self._rows[number] = rows
                self._bytes += size_of(rows)
            while self._bytes > self._max_bytes and len(self._rows) > self._min_episodes:
                self._bytes -= size_of(self._rows.popitem(last=False)[1])
