"""Loading of datasets for training: as arrays in memory, or as an endless stream of shuffled batches from disk.

The items of batch number k depend only on the dataset, the settings, the seed and k, so the number of the next batch
is the only state of a stream.
"""

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.limits import checked_seed, count_problems, whole
from jaxrl.core.sources import Sequence
from jaxrl.core.types import SequenceBatch, Trajectory, TransitionBatch
from jaxrl.data import views
from jaxrl.data.episodes import check_kind, kind_of
from jaxrl.data.items import Batches, Episodes, RowReader
from jaxrl.parallel import memory

HEADROOM = 0.9  # largest fraction of the free memory to use
_PREFETCHED = 2  # batches


def arrays(dataset: Episodes, *, extras: tuple[str, ...] = (), copies: int = 1) -> Trajectory:
    """Return all rows of a dataset in memory, one episode after another.

    Args:
      dataset: the dataset to read; it is read once, into preallocated arrays.
      extras: names of the extra fields of the steps to keep.
      copies: number of copies of the rows that must fit in memory.

    Returns:
      A `Trajectory` whose leaves have shape `[transitions + episodes, ...]`, without an environment axis.

    Raises:
      ConfigError: the dataset has no episodes, does not fit in memory (the message states the needed and the free
        memory), or has a field that is not numeric.
      DatasetError: an episode has another length than `dataset.lengths` states, other arrays than the first episode, or
        a number that float32 cannot represent.
    """
    lengths = dataset.lengths
    if not len(lengths):
        raise ConfigError("the dataset has no episodes to load; select(...) or where(...) may have removed all of them")
    count = int(lengths.sum()) + len(lengths)
    episodes = RowReader(dataset, extras).read(np.arange(len(lengths)))
    example = next(episodes)
    needed = copies * memory.size_of(example) * count // len(example.first)
    free = memory.free_on_host()
    if free is not None and needed > free * HEADROOM:
        raise ConfigError(
            f"the dataset's {count:,} rows need {needed / 2**30:.3g} GiB of memory, but {free / 2**30:.3g} GiB are "
            "free; stream them with dataset.loader(...) or topology=Offline(stream=True), or take fewer episodes with "
            "dataset.select(...) or where(...)"
        )
    everything = jax.tree.map(lambda x: np.empty((count, *x.shape[1:]), x.dtype), example)
    at = 0
    for rows in itertools.chain([example], episodes):
        stop = at + len(rows.first)
        for target, leaf in zip(jax.tree.leaves(everything), jax.tree.leaves(rows), strict=True):
            target[at:stop] = leaf
        at = stop
    plain = everything.replace(discount=None)
    return plain if np.array_equal(plain.discounts, everything.discount) else everything


class Loader:
    """An endless stream of shuffled batches of a dataset, in which each item appears once per epoch.

    An item is an n-step transition or a sequence. A batch is a `TransitionBatch` or a `SequenceBatch` of numpy arrays
    whose `sample_info` is None. The `carry` of a `SequenceBatch` is empty; the algorithm sets the initial carry.
    A batch may span the end of an epoch. `batch(k)` returns any batch by its number; `for batch in loader` and `take`
    return batches in order, prefetched by Grain.

    All items are shuffled together unless `window` is set. A record holds an episode, so reading one transition reads
    its whole episode unless the episode is cached: a dataset much larger than `cache_bytes` is read repeatedly. With a
    window, each episode is read once per epoch: the episodes are shuffled and split into groups, and items are shuffled
    within their group. Each worker needs at most about three times the memory of the cached episodes.

    Args:
      dataset: the dataset; its episode lengths are read first.
      batch_size: number of items per batch.
      n_step: number of rewards per transition.
      sequence: the shape of the sequences, if the items are sequences instead of transitions. With `end="continue"`, a
        sequence continues into the dataset's next episode.
      seed: the seed of the shuffling.
      window: number of episodes whose items are shuffled together; None for all; "fit" for all if they fit in
        `cache_bytes`, otherwise half as many as fit, estimated from the first episode and the lengths.
      workers: number of processes that read; with 0, a thread of this process reads.
      extras: names of the extra fields of the steps to return.
      cache_bytes: size of the cache of episodes, which always holds at least two windows.

    Attributes:
      items: the number of items per epoch.

    Raises:
      ConfigError: a setting is out of range, or every episode is too short for an item.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    @checked(batch_size={"low": 1}, n_step={"low": 1}, workers={"low": 0}, cache_bytes={"low": 0})
    def __init__(
        self,
        dataset: Episodes,
        batch_size: int,
        *,
        n_step: int = 1,
        sequence: Sequence | None = None,
        seed: int = 0,
        window: int | Literal["fit"] | None = None,
        workers: int = 0,
        extras: tuple[str, ...] = (),
        cache_bytes: int = 1 << 28,
    ):
        _grain()
        window = whole(window)
        if window != "fit" and (problems := count_problems(window=(window, 1))):
            raise ConfigError(problems)
        seed = checked_seed("seed", seed)
        if sequence is not None:
            views.check_sequence(sequence)
        if window == "fit":
            window = _fitting_window(dataset, extras, cache_bytes)
        self._batches = Batches(dataset, batch_size, n_step, sequence, seed, window, extras, cache_bytes)
        self._workers = workers
        self._stacks: Any = None  # Grain's iterator for `take`
        self._following: tuple[int, int] | None = None  # the arguments of `take` for its next item

    @property
    def items(self) -> int:
        return self._batches.items

    @checked(number={"low": 0})
    def batch(self, number: int) -> TransitionBatch | SequenceBatch:
        """Return batch `number`, counted from 0: leaves `[batch, ...]`, or `[length, batch, ...]` for sequences."""
        return self._batches(number)

    def __iter__(self) -> "BatchIterator":
        return BatchIterator(self)

    @checked(first_batch={"low": 0})
    def pipeline(self, first_batch: int = 0) -> Any:
        """Return a `grain.IterDataset` of the batches from batch `first_batch` on, for custom pipelines."""
        return self._prefetched(_grain().MapDataset.range(first_batch, sys.maxsize).map(self._batches), _PREFETCHED)

    def _prefetched(self, batches, count):
        grain = _grain()
        if not self._workers:
            return batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=count))
        from absl import flags

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads one of its own flags when it starts processes
        here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return batches.to_iter_dataset(here).mp_prefetch(grain.MultiprocessingOptions(num_workers=self._workers))

    @checked(first_batch={"low": 0}, count={"low": 1})
    def take(self, first_batch: int, count: int) -> TransitionBatch | SequenceBatch:
        """Return `count` consecutive batches, stacked into leaves `[count, batch, ...]`.

        Grain prepares the next `count` batches in the background, so that consecutive calls do not wait.

        Args:
          first_batch: the number of the first batch.
          count: the number of batches.

        Raises:
          ConfigError: an argument is out of range.
        """
        if self._following != (first_batch, count):
            self.close()
            firsts = _grain().MapDataset.range(first_batch, sys.maxsize, count)
            self._stacks = iter(self._prefetched(firsts.map(functools.partial(_stacked, self._batches, count)), 1))
        try:
            found = next(self._stacks)
        except BaseException:
            self.close()  # Grain has advanced past these batches, but the next call must return them
            raise
        self._following = (first_batch + count, count)
        return found

    def close(self) -> None:
        """Stop the thread and the worker processes of `take`, which starts them again; may be called repeatedly."""
        if self._stacks is not None:
            self._stacks.close()
        self._stacks = self._following = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchIterator(Iterator):
    """An iterator over a loader's batches in order; its state is the number of the next batch.

    Attributes:
      next_batch: the number of the next batch.
    """

    def __init__(self, loader: Loader):
        self._loader, self._batches, self.next_batch = loader, None, 0

    def __next__(self) -> TransitionBatch | SequenceBatch:
        if self._batches is None:
            self._batches = iter(self._loader.pipeline(self.next_batch))
        try:
            found = next(self._batches)
        except BaseException:
            self.close()  # Grain has advanced past this batch, but the next call must return it
            raise
        self.next_batch += 1
        return found

    def get_state(self) -> dict[str, int]:
        return {"next_batch": self.next_batch}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue from the state of an iterator with the same dataset, settings and seed; `workers` may differ."""
        self.close()
        self.next_batch = int(state["next_batch"])

    def close(self) -> None:
        """Stop prefetching."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()


def _stacked(batches, count, first):
    """Return batches `first` to `first + count - 1`, stacked."""
    found = kind = None
    for number in range(count):
        one = batches(first + number)
        kind = check_kind(kind_of(one), kind)
        if found is None:
            found = jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), one)
        for target, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(one), strict=True):
            target[number] = leaf
    return found


def _fitting_window(dataset, extras, cache_bytes):
    lengths = dataset.lengths
    if not len(lengths):
        return None
    (example,) = RowReader(dataset, extras).read(np.arange(1))
    episode = memory.size_of(example.replace(discount=None)) / len(example.first) * (lengths.mean() + 1)
    return None if len(lengths) * episode <= cache_bytes else max(1, int(cache_bytes / (2 * episode)))


def _grain():
    try:
        import grain
    except ImportError as error:
        raise MissingExtraError("streaming datasets", "data") from error
    return grain
