"""Datasets on disk, written by jaxrl or other programs, as episodes of arrays."""

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import numpy as np

from jaxrl.core import files
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.types import Trajectory
from jaxrl.data import episodes as rules
from jaxrl.data.batching import Loader, arrays
from jaxrl.data.dataset_report import Report, report
from jaxrl.data.dataset_statistics import Images, Statistics, statistics
from jaxrl.data.episodes import Episode
from jaxrl.data.minari_reader import MinariReader
from jaxrl.data.order import permuted, runs
from jaxrl.data.rlds import open_directory
from jaxrl.data.views import last_step_counts


class Reader(Protocol):
    """A reader of the episodes in one dataset directory, in their stored order.

    Attributes:
      path: the dataset's directory.
      name: the dataset's name.
      absent: names of the optional RLDS fields that the steps do not have.
    """

    path: Path
    name: str
    absent: tuple[str, ...]

    def __len__(self) -> int: ...
    def records(self, places: Iterable[int]) -> Iterator[Any]:
        """Yield the stored records of the episodes at `places`, in the given order."""
        ...

    def episode(self, record: Any, where: str) -> Episode:
        """Decode a record. A `DatasetError` begins with `where`, which names the episode."""
        ...

    def summary(self, record: Any, where: str) -> Mapping[str, Any]:
        """Return a record's `Episode.summary`, decoding only part of the record if possible."""
        ...


@interruptible
@checked()
def load_dataset(
    source: str | os.PathLike, *, split: str = "train", last_step: Literal["observation", "transition"] = "observation"
) -> "Dataset":
    """Open a dataset; its episodes are read when they are accessed.

    Args:
      source: "rlds:DIR" or "minari:ID". DIR is the directory of an RLDS dataset in TFDS's layout (the directory that
        contains `dataset_info.json`), or a directory of several such datasets, which are read as one dataset, in the
        order of their names. ID is the id or the directory of a local Minari dataset. Nothing is downloaded.
      split: the split to read; Minari has only "train".
      last_step: the content of the last step of an RLDS episode. "observation": only the last observation, as RLDS
        defines it; the action and reward of the step are ignored. "transition": an action that was taken, and its
        reward, as in the Open X-Embodiment datasets, whose only reward is at the last step; see
        `jaxrl.data.views.last_step_counts`.

    Raises:
      ConfigError: the kind of source is unknown, or jaxrl does not read its file format.
      DatasetError: the directory is not such a dataset, its steps lack a field, or its subdirectories have different
        fields; the message names the problem.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    kind, _, where = os.fspath(source).partition(":")
    if kind not in ("rlds", "minari") or not where:
        raise ConfigError(f"dataset {source!r}: names of datasets have the form 'rlds:DIR' or 'minari:ID'")
    if kind == "rlds":
        found = Dataset(where, open_directory(where, split=split))
        return found if last_step == "observation" else found.map(last_step_counts)
    if last_step != "observation":
        raise ConfigError(f"last_step={last_step!r}: in Minari, the last step has no action or reward; leave it out")
    if split != "train":
        raise ConfigError(f"split={split!r}: Minari datasets have no splits; leave it out")
    reader = MinariReader(where)
    return Dataset(reader.path, [reader])


class Dataset:
    """A sequence of episodes on disk: `len(dataset)`, `dataset[3]`, `for episode in dataset`.

    `select`, `where`, `split` and `map` return datasets that read from the same files; episodes are read when they are
    accessed. Reading an episode that breaks the rules of RLDS raises a `DatasetError` that names the episode and the
    field; `report` finds all such episodes.

    Args:
      path: the dataset's directory.
      parts: readers of the dataset's files; their episodes are concatenated.

    Attributes:
      path: the dataset's directory.
      name: the dataset's name.
    """

    def __init__(self, path: str | Path, parts: Sequence[Reader]):
        self.path = files.expand(path)
        self.name = parts[0].name
        self._parts = tuple(parts)
        self._starts = np.append(0, np.cumsum([len(part) for part in parts])).astype(np.int64)

        self._choose: Callable[[], np.ndarray] = lambda: np.arange(self._starts[-1])
        self._changes: tuple[tuple[Callable[[Episode], Episode], bool], ...] = ()  # (change, same_length)
        self._measure: Callable[[], np.ndarray] = self._measured

    def __repr__(self) -> str:
        return f"Dataset({self.name}, {len(self):,} episodes in {self.path})"

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> "Dataset": ...
    def __getitem__(self, index: int | slice) -> "Episode | Dataset":
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} is out of range; there are {len(self):,} episodes")
        return next(self.read([index]))

    def __iter__(self) -> Iterator[Episode]:
        return self._read(self._chosen)

    def read(self, indices: Iterable[int]) -> Iterator[Episode]:
        """Yield the episodes at these indices, in the given order; consecutive episodes are read together."""
        return iter(self.select(indices))

    def summaries(self) -> Iterator[Mapping[str, Any]]:
        """Yield the metadata, return and length of every episode, without decoding its arrays."""
        if self._changes:
            yield from (episode.summary for episode in self)
            return
        for part, _, record, where in self._records(self._chosen):
            yield part.summary(record, where)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of transitions of each episode, int64; the first access reads the whole dataset."""
        return self._measure()

    # --- subsets and transformations ---------------------------------------------------------------------------------

    def select(self, indices: Iterable[int]) -> "Dataset":
        """Return a dataset of only the episodes at these indices, in the given order.

        Raises:
          ConfigError: an index is out of range, or not an integer.
        """
        chosen = np.asarray([*indices])
        if chosen.ndim != 1 or chosen.size and chosen.dtype.kind not in "iu":
            raise ConfigError(
                f"select takes indices of episodes, not {chosen.dtype} {chosen.shape[1:]}; use np.flatnonzero on "
                "a mask, or where(...)"
            )
        indices = chosen.astype(np.int64)
        if wrong := indices[(indices < -len(self)) | (indices >= len(self))].tolist():
            raise ConfigError(f"episode {wrong[0]} is out of range; there are {len(self):,} episodes")
        return self._derived(lambda: self._chosen[indices])

    def where(self, predicate: Callable[[Mapping[str, Any]], bool]) -> "Dataset":
        """Return a dataset of the episodes for which a predicate is true.

        The predicate is called with an entry of `summaries`, as in `lambda episode: episode["return"] > 100`. It is
        evaluated when the returned dataset is first used.
        """
        return self._derived(
            lambda: self._chosen[np.fromiter(map(predicate, self.summaries()), np.bool_, len(self._chosen))]
        )

    @checked(fraction={"above": 0, "below": 1})
    def split(self, fraction: float, *, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Split the episodes at random into a training and a validation dataset.

        The choice depends only on the number of episodes and the seed. Each dataset keeps the order of its episodes.

        Args:
          fraction: the fraction of the episodes for validation; the number of episodes is rounded, and each dataset has
            at least one.
          seed: the seed of the choice.

        Returns:
          The training dataset and the validation dataset.

        Raises:
          ConfigError: the fraction is not between 0 and 1, the seed is out of range, or there are fewer than two
            episodes.
        """
        seed = checked_seed("seed", seed)

        def halves():
            count = len(self)
            if count < 2:
                raise ConfigError(f"{count} episodes cannot be split into two parts; at least two are needed")
            shuffled = permuted(np.arange(count), count, seed)
            rest = min(max(round(fraction * count), 1), count - 1)
            return self._chosen[np.sort(shuffled[rest:])], self._chosen[np.sort(shuffled[:rest])]

        return self._derived(lambda: halves()[0]), self._derived(lambda: halves()[1])

    def map(self, change: Callable[[Episode], Episode], *, same_length: bool = False) -> "Dataset":
        """Return a dataset that applies a function to every episode when it is read.

        Args:
          change: a function `change(episode) -> episode`. If the returned episode breaks the rules of RLDS, reading it
            raises a `DatasetError`.
          same_length: whether `change` keeps the length of every episode, so that lengths are known without calling it.
            If it is True and `change` returns another length, reading raises a `DatasetError`.
        """
        found = self._derived(lambda: self._chosen, (change, same_length))
        if same_length:
            found._measure = lambda: self.lengths
        return found

    # --- the whole dataset -------------------------------------------------------------------------------------------

    def statistics(self, *, images: Images = "channel") -> Statistics:
        """Compute the mean, deviation and range of every array in one pass; see `jaxrl.data.dataset_statistics`."""
        return statistics(self, images=images)

    def arrays(self, *, extras: tuple[str, ...] = ()) -> Trajectory:
        """Read all rows into memory; raise an error if they do not fit; see `jaxrl.data.batching.arrays`."""
        return arrays(self, extras=extras)

    def loader(self, batch_size: int, **settings: Any) -> Loader:
        """Return an endless stream of shuffled batches; `settings` are those of `jaxrl.data.batching.Loader`."""
        return Loader(self, batch_size, **settings)

    def report(self) -> Report:
        """Read the dataset once and report its contents and every fault; keep only a few numbers per episode."""
        absent = tuple(dict.fromkeys(name for part in self._parts for name in part.absent))
        return report(str(self.path), self._with_faults(), absent)

    @functools.cached_property
    def _chosen(self):
        """The indices of this dataset's episodes among all episodes on disk."""
        return self._choose()

    def _measured(self):
        return np.fromiter((summary["length"] for summary in self.summaries()), np.int64, len(self))

    def _derived(self, choose, *changes):
        found = Dataset(self.path, self._parts)
        found._choose, found._changes = choose, self._changes + changes
        return found

    def _read(self, numbers):
        for part, _, record, where in self._records(numbers):
            episode = part.episode(record, where)
            _check(where, rules.broken_rules(episode))
            yield self._changed(episode, where)

    def _with_faults(self):
        """Yield (index, episode, faults) for each episode; `episode` is None if there are faults."""
        for part, index, record, where in self._records(self._chosen):
            try:
                episode = part.episode(record, where)
                faults = [f"episode {index}: {field} {what}" for field, what in rules.broken_rules(episode)]
                yield index, None if faults else self._changed(episode, where), faults
            except DatasetError as error:
                yield index, None, [str(error).removeprefix(f"{self.path}: ")]

    def _changed(self, episode, where):
        for change, same_length in self._changes:
            before = episode.length
            try:
                episode = change(episode)
            except DatasetError as error:
                raise DatasetError(f"{where}: {error}") from error
            if not isinstance(episode, Episode):
                raise DatasetError(f"{where}: map's function must return an Episode, not {type(episode).__name__}")
            _check(f"{where}: after map", rules.broken_steps(episode))
            if same_length and episode.length != before:
                raise DatasetError(
                    f"{where}: after map with same_length=True it has {episode.length:,} transitions, not {before:,}; "
                    "use same_length=False"
                )
        return episode

    def _records(self, numbers):
        """Yield (part, number, record, where) for each episode; `where` names the episode in errors."""
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        for begin, end in runs(which):
            part, here = self._parts[which[begin]], numbers[begin:end]
            places = here - self._starts[which[begin]]
            for place, number, record in zip(places.tolist(), here.tolist(), part.records(places), strict=True):
                within = "" if len(self._parts) == 1 else f" (number {place} of {part.path.name})"
                yield part, number, record, f"{self.path}: episode {number}{within}"


def _check(where, faults):
    if faults:
        field, what = faults[0]
        raise DatasetError(f"{where}: {field} {what}")
