"""Datasets of other programs, or our own, read back: episodes as arrays."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl.data import episodes as rules
from jaxrl.data.episodes import Episode
from jaxrl.data.report import Report, Tally
from jaxrl.data.rlds import RldsReader
from jaxrl.errors import ConfigError, DatasetError


class Reader(Protocol):
    """The episodes of one place, in order.

    Attributes:
      path: where they lie.
      name: of the dataset.
    """

    path: Path
    name: str

    def __len__(self) -> int: ...
    def records(self, start: int, stop: int) -> Iterator[Any]:
        """What is stored of the episodes from `start` up to `stop`, without it."""
        ...

    def episode(self, record: Any, where: str) -> Episode:
        """What a record holds; a `DatasetError` begins with `where`, which names the episode."""
        ...


def load_dataset(source: str, *, split: str = "train") -> "Dataset":
    """Opens a dataset; its episodes are read when they are asked for.

    Args:
      source: "rlds:DIR", the directory of an RLDS dataset in TFDS's layout (the one with `dataset_info.json`).
      split: which of its splits.

    Raises:
      ConfigError: the source is none that jaxrl reads, or lies in files that need TensorFlow.
      DatasetError: it is no such dataset, or its steps lack a field; says which.
      MissingExtraError: `jaxrl[data]` is not installed.
    """
    kind, separator, where = source.partition(":")
    if kind != "rlds" or not separator or not where:
        raise ConfigError(f"dataset {source!r}: datasets are named 'rlds:DIR'")
    return Dataset(where, [RldsReader(where, split=split)])


class Dataset:
    """Episodes on disk, in order: `len(dataset)`, `dataset[3]`, `for episode in dataset`.

    An episode that breaks the rules of RLDS raises a `DatasetError` that names it and the field when it is read;
    `report` finds all of them.

    Args:
      path: its directory.
      parts: where its episodes lie, one after the other.

    Attributes:
      path: its directory.
      name: its name.
    """

    def __init__(self, path: str | Path, parts: Sequence[Reader]):
        self.path = Path(path)
        self.name = parts[0].name
        self._parts = tuple(parts)
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)

    def __repr__(self) -> str:
        return f"Dataset({self.name}, {len(self):,} episodes in {self.path})"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Episode:
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        place = index - int(self._starts[number])
        (record,) = self._parts[number].records(place, place + 1)
        return self._sound(self._parts[number], place, index, record)

    def __iter__(self) -> Iterator[Episode]:
        for stored in self._records():
            yield self._sound(*stored)

    def report(self) -> Report:
        """Reads everything once and tells what there is, and every fault; a few numbers an episode are kept."""
        tally = Tally()
        for part, place, index, record in self._records():
            where = self._where(part, place, index)
            try:
                episode = part.episode(record, where)
            except DatasetError as error:
                tally.faults.append(str(error).removeprefix(f"{self.path}: "))
                continue
            faults = rules.broken_rules(episode)
            tally.faults += [f"episode {index}: {field} {what}" for field, what in faults]
            if not faults:
                tally.add(index, episode)
        return tally.report(str(self.path), len(self))

    def _records(self):
        for part, start in zip(self._parts, self._starts.tolist(), strict=False):
            for place, record in enumerate(part.records(0, len(part))):
                yield part, place, start + place, record

    def _where(self, part, place, index):
        within = "" if len(self._parts) == 1 else f" (number {place} of {part.path.name})"
        return f"{self.path}: episode {index}{within}"

    def _sound(self, part, place, index, record):
        where = self._where(part, place, index)
        episode = part.episode(record, where)
        if faults := rules.broken_rules(episode):
            field, what = faults[0]
            raise DatasetError(f"{where}: {field} {what}")
        return episode
