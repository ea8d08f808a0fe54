"""Datasets of other programs, or our own, read back: episodes as arrays, and what there is in them."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.data import episodes as rules
from jaxrl.data import features
from jaxrl.data.episodes import Episode
from jaxrl.errors import ConfigError, DatasetError

_READABLE = ("array_record",)
_BARS, _WIDTH = 12, 40  # of the histogram


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
    return Dataset(where, split=split)


class Dataset:
    """Episodes on disk, in order: `len(dataset)`, `dataset[3]`, `for episode in dataset`.

    An episode that breaks the rules of RLDS raises a `DatasetError` that names it and the field when it is read;
    `report` finds all of them.

    Attributes:
      path: its directory.
      name: TFDS's name of it.
    """

    def __init__(self, path: str | os.PathLike, *, split: str = "train"):
        tfds = features.tfds()
        self.path = Path(path)
        missing = [name for name in ("dataset_info.json", "features.json") if not (self.path / name).is_file()]
        if missing:
            raise DatasetError(f"{path} is no dataset of TFDS: it has no {' and no '.join(missing)}")
        try:
            builder = tfds.builder_from_directory(os.fspath(self.path))
            info = builder.info
            splits, file_format = dict(info.splits), info.file_format
        except Exception as error:  # TFDS raises whatever its parsers do
            raise DatasetError(f"{path} cannot be opened by TFDS: {error}") from error
        if file_format is not None and file_format.value not in _READABLE:
            raise ConfigError(
                f"{path} lies in {file_format.value} files, which are not read here; convert it with TFDS to "
                + " or ".join(_READABLE)
            )
        if split not in splits:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(sorted(splits))}")
        self.name = builder.name
        self._fields = features.read_fields(info.features)
        names = {field.name.split("/")[1] for field in self._fields if field.of_steps}
        lacking = [name for name in rules.STEP_FIELDS if name not in names]
        if lacking:
            raise DatasetError(f"{path}: the steps have no {', no '.join(lacking)}; RLDS needs them")
        self._files = [os.fspath(file) for file in splits[split].filepaths]
        self._starts = np.concatenate([[0], np.cumsum(splits[split].shard_lengths)]).astype(np.int64)
        if gone := [file for file in self._files if not os.path.isfile(file)]:
            raise DatasetError(f"{path} is incomplete: {gone[0]} is missing")

    def __repr__(self) -> str:
        return f"Dataset({self.name}, {len(self):,} episodes in {self.path})"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Episode:
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        place = index - int(self._starts[shard])
        with features.records(self._files[shard]) as read:
            return self._sound(index, read(place, place + 1)[0])

    def __iter__(self) -> Iterator[Episode]:
        for index, record in self._records():
            yield self._sound(index, record)

    def report(self) -> "Report":
        """Reads everything once and tells what there is, and every fault; a few numbers an episode are kept."""
        tally = _Tally()
        for index, record in self._records():
            try:
                episode = self._episode(index, record)
            except DatasetError as error:
                tally.faults.append(str(error).removeprefix(f"{self.path}: "))
                continue
            faults = rules.broken_rules(episode)
            tally.faults += [f"episode {index}: {field} {what}" for field, what in faults]
            if not faults:
                tally.add(index, episode)
        return tally.report(str(self.path), len(self))

    def _records(self):
        for file, start, stop in zip(self._files, self._starts[:-1], self._starts[1:], strict=True):
            at_once = max(1, int((stop - start) * (1 << 24) // max(os.path.getsize(file), 1)))
            with features.records(file) as read:
                for first in range(0, int(stop - start), at_once):
                    records = read(first, min(first + at_once, int(stop - start)))
                    yield from enumerate(records, int(start) + first)

    def _episode(self, index, record):
        where = f"{self.path}: episode {index}"
        return features.as_episode(features.read_example(record, self._fields, where))

    def _sound(self, index, record):
        episode = self._episode(index, record)
        if faults := rules.broken_rules(episode):
            field, what = faults[0]
            raise DatasetError(f"{self.path}: episode {index}: {field} {what}")
        return episode


@dataclasses.dataclass(frozen=True)
class Shown:
    """One array of the steps, over all episodes; the last steps' actions, rewards and discounts are left out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What a dataset holds; `print` shows it.

    Attributes:
      returns, lengths: one entry an episode that is sound.
      endings: how many episodes were terminated, truncated, cut off; datasets of others do not tell the last two apart.
      fields: the arrays of the steps.
      faults: what is wrong, one line each.
    """

    path: str
    episodes: int
    returns: np.ndarray
    lengths: np.ndarray
    endings: dict[str, int]
    fields: list[Shown]
    faults: list[str]

    @property
    def transitions(self) -> int:
        return int(self.lengths.sum())

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.episodes:,} episodes, {self.transitions:,} transitions"]
        if self.returns.size:
            lines += [
                ", ".join(f"{count:,} {name}" for name, count in sorted(self.endings.items())),
                _spread("return", self.returns),
                *_histogram(self.returns),
                _spread("length", self.lengths),
                "",
            ]
        width = max((len(field.name) for field in self.fields), default=0)
        for field in self.fields:
            span = f"{field.low:.6g} to {field.high:.6g}" if np.isfinite([field.low, field.high]).all() else ""
            lines.append(f"{field.name.ljust(width)}  {field.dtype} {field.shape}  {span}".rstrip())
        lines += ["", *(f"fault: {fault}" for fault in self.faults)] if self.faults else ["", "no faults found"]
        return "\n".join(lines)


def _spread(name, x):
    return f"{name}: mean {x.mean():.6g}, deviation {x.std():.6g}, from {x.min():.6g} to {x.max():.6g}"


def _histogram(x):
    """Bars of text, one a bin."""
    x = x[np.isfinite(x)]
    if not x.size or x.min() == x.max():
        return []
    counts, edges = np.histogram(x, bins=_BARS)
    return [
        f"  {low:>12.6g}  {'█' * round(_WIDTH * count / counts.max())} {count}"
        for low, count in zip(edges[:-1], counts, strict=True)
    ]


class _Tally:
    """The report as it grows."""

    def __init__(self):
        self.faults: list[str] = []
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._endings: Counter[str] = Counter()
        self._seen: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def add(self, index: int, episode: Episode) -> None:
        self.faults += [f"episode {index}: {field} {what}" for field, what in rules.non_finite(episode)]
        self._returns.append(episode.episode_return)
        self._lengths.append(episode.length)
        told = rules.TERMINATED if episode.is_terminal[-1] else "not terminated"
        self._endings[str(episode.metadata.get("ending", told))] += 1
        for path, x in jax.tree.leaves_with_path(rules.meaningful(episode)):
            name = rules.field_name("", path)
            self._seen.setdefault(name, (x.dtype, x.shape[1:]))
            if x.dtype.kind not in "SUO" and x.size:
                low, high = self._ranges.get(name, (np.inf, -np.inf))
                self._ranges[name] = min(low, float(x.min())), max(high, float(x.max()))

    def report(self, path: str, episodes: int) -> Report:
        nowhere = (np.nan, np.nan)
        fields = [
            Shown(name, str(dtype), shape, *self._ranges.get(name, nowhere))
            for name, (dtype, shape) in self._seen.items()
        ]
        returns, lengths = np.asarray(self._returns, np.float64), np.asarray(self._lengths, np.int64)
        return Report(path, episodes, returns, lengths, dict(self._endings), fields, self.faults)
