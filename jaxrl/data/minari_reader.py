"""A reader of Minari datasets (https://minari.farama.org), which have N + 1 observations and N actions per episode.

Integers of spaces that start at a number other than 0 are shifted to start at 0, as in jaxrl's environments. Minari
does not store the following: the action and reward of the last step, which are returned as zeros; discounts, which are
computed from the endings; and whether the continuation of an episode is unknown ("cut off"), which only datasets
written by jaxrl have as metadata.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.core import files
from jaxrl.core.errors import DatasetError, MissingExtraError, NoDatasetError
from jaxrl.core.files import open_to_read
from jaxrl.core.types import PyTree
from jaxrl.data import bounds
from jaxrl.data.episodes import STEP_FIELDS, Episode, cast, implied_discount, marks_of
from jaxrl.data.metadata import check_files, read_minari

DESCRIPTION = "Written by jaxrl, images without loss."  # marks datasets whose arrays are elements of jaxrl's spaces
_AT_ONCE = 64  # number of episodes to read while a file is open
_PACKED = 1100  # maximum ratio of decompressed to stored size; 1032 for HDF5's compression
_MOST_ARRAYS = 100_000  # maximum number of arrays in the episodes that are read together
_DEEPEST = 20  # maximum depth of nested groups


def package() -> Any:
    """Import and return the package `minari`, which needs `h5py`.

    Raises:
      MissingExtraError: one of the packages is not installed.
    """
    try:
        import h5py  # noqa: F401
        import minari
    except ImportError as error:
        raise MissingExtraError("Minari", "data") from error
    return minari


def directory_of(dataset_id: str, data_dir: str | os.PathLike | None = None) -> Path:
    """Return the directory of a dataset, by default in `MINARI_DATASETS_PATH` or `~/.minari/datasets`."""
    root = data_dir or os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    return files.expand(root) / dataset_id


class MinariReader:
    """A reader of the episodes of one Minari dataset, in their stored order.

    Args:
      where: the dataset's id, or its directory, which contains `data`.

    Attributes:
      path: the dataset's directory.
      name: the dataset's id.
      absent: always empty, because the RLDS fields that Minari does not store are computed from the stored ones.

    Raises:
      DatasetError: there is no such dataset, its metadata would make Minari build an environment, or Minari cannot open
        the dataset.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def __init__(self, where: str | os.PathLike):
        here = files.expand(where)
        self.path = here if (here / "data").is_dir() else directory_of(os.fspath(here))
        about = self.path / "data" / "metadata.json"
        if not about.is_file():
            raise NoDatasetError(f"{self.path} is not a Minari dataset: it has no data/metadata.json")
        check_files(self.path)
        described = read_minari(about)
        minari = package()
        try:
            self._dataset = minari.MinariDataset(self.path / "data")
        except Exception as error:  # Minari passes on any error of its parsers
            raise DatasetError(f"{self.path} cannot be opened by Minari: {error!s:.500}") from error
        self.name = self._dataset.id
        self.absent: tuple[str, ...] = ()
        action_space, foreign = self._dataset.action_space, described.get("description") != DESCRIPTION
        self._first = first_integers(self._dataset.observation_space), first_integers(action_space, boxes=foreign)
        self._pictures = bool(described.get("jpeg_encoding", True))  # Minari's default

    def __len__(self) -> int:
        return self._dataset.total_episodes

    def records(self, places: Iterable[int]) -> Iterator[Any]:
        """Yield (data, metadata) of each episode at `places`, in the given order, or the error raised by Minari."""
        storage, places, done = self._dataset.storage, [int(place) for place in places], 0
        both = {"observations": self._dataset.observation_space, "actions": self._dataset.action_space}
        while done < len(places):
            together = places[done : done + _AT_ONCE]
            try:
                check_hdf5(self.path / "data" / "main_data.hdf5", together, both if self._pictures else {})
                for found in zip(storage.get_episodes(together), storage.get_episode_metadata(together), strict=True):
                    done += 1
                    yield found
            except Exception as error:  # Minari passes on any error of its file formats
                done += 1
                yield error

    def episode(self, record: Any, where: str) -> Episode:
        """Convert a record to an episode.

        Args:
          record: an item that `records` yielded.
          where: the name of the episode, for error messages.

        Raises:
          DatasetError: the episode cannot be read.
        """
        if isinstance(record, Exception):
            raise DatasetError(f"{where} cannot be read by Minari: {record!r:.500}") from record
        stored, metadata = record
        metadata = {name: x.item() if isinstance(x, np.generic) else x for name, x in metadata.items()}
        total = metadata.pop("total_steps", None)
        metadata.pop("id", None)
        if total is not None:
            metadata.setdefault("length", total)
        return _as_episode(stored, metadata, where, *self._first)

    def summary(self, record: Any, where: str) -> dict[str, Any]:
        """Return a record's `Episode.summary`; Minari always reads a whole episode."""
        return self.episode(record, where).summary


def check_hdf5(path: Path, episodes: Iterable[int], spaces: Mapping[str, Any] | None = None) -> None:
    """Check that episodes are stored in the file itself, and that their size is possible for a file of this size.

    Args:
      path: the path of the HDF5 file.
      episodes: the numbers of the episodes to check.
      spaces: the Gymnasium spaces of the parts of an episode ("observations", "actions") in which images are decoded.

    Raises:
      ValueError: part of an episode is a link, is in another file, is nested too deeply or is too large; there are too
        many arrays; or an image is invalid.
    """
    import h5py

    with open_to_read(path), h5py.File(path, "r") as file:
        most, seen = _PACKED * path.stat().st_size + (1 << 20), itertools.count()

        def visit(group, name, depth):
            nonlocal most
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink) or depth > _DEEPEST or next(seen) > _MOST_ARRAYS:
                raise ValueError(
                    f"{name!r:.80} is a link, is nested more than {_DEEPEST} deep, or is one of more than "
                    f"{_MOST_ARRAYS:,} arrays"
                )
            found = group[name]
            if isinstance(found, h5py.Group):
                for child in found:
                    visit(found, child, depth + 1)
                return
            if found.external or found.is_virtual:
                raise ValueError(f"{name!r:.80} is in another file")
            most -= found.nbytes  # checked first: unwritten data takes no space in the file, but days to read
            if most < 0:
                raise ValueError(f"{name!r:.80} has {found.nbytes:,} bytes, more than the file can contain")
            if found.dtype.kind == "O":  # of variable length: many items may share the same bytes of the file
                needed = 0
                for item in found if found.shape else [found[()]]:
                    needed += len(item)
                    bounds.check_memory(needed, f"{name!r:.80}")

        for episode in episodes:
            if f"episode_{episode}" in file:  # Minari reports a missing episode
                visit(file, f"episode_{episode}", 0)
                for name, space in (spaces or {}).items():
                    for found in _pictures(file[f"episode_{episode}"].get(name), space):
                        # Pillow would also decode bytes of other dtypes, in every format that it knows.
                        if np.uint8 not in (found.dtype, h5py.check_vlen_dtype(found.dtype)):
                            raise ValueError(f"{name!r:.80} has images as {found.dtype}, not in Minari's format")
                        bounds.check_pictures(bytes(item) for item in found)


def _pictures(found: Any, space: Any) -> Iterator[Any]:
    """Yield the arrays of an HDF5 group that Minari would decode as images, according to their space."""
    import h5py
    from gymnasium.spaces import Dict, Tuple
    from minari.dataset.minari_storage import is_image_space

    if isinstance(found, h5py.Dataset):
        yield from (found,) if is_image_space(space) else ()
    elif isinstance(found, h5py.Group) and isinstance(space, Dict | Tuple):
        for name, child in _parts(space.spaces):
            yield from _pictures(found.get(name if isinstance(space, Dict) else f"_index_{name}"), child)


def _parts(x):
    """Return pairs (key or position, child) of a dictionary or a tuple."""
    return x.items() if isinstance(x, Mapping) else enumerate(x)


def _as_episode(stored, metadata, where, first_observation, first_action):
    reward = np.asarray(stored["rewards"])
    flags = {name: np.asarray(stored[name]).astype(np.bool_) for name in ("terminations", "truncations")}
    for name, x in flags.items():
        if len(x) != len(reward):
            raise DatasetError(f"{where}: {name} has {len(x)} entries, but rewards has {len(reward)}")
        if x[:-1].any():
            at = int(np.argmax(x))
            raise DatasetError(f"{where}: {name} is true at step {at} of {len(reward)}; only the last step can be")
    marks, ending = marks_of(**flags)
    # In some older datasets, infos have one entry per transition instead of per step.
    infos = jax.tree.map(lambda x: _with_last(x) if len(x) == len(reward) else x, _arrays(stored["infos"] or {}))
    return Episode(
        observation=counted_from(_arrays(stored["observations"]), first_observation, -1, f"{where}: observation"),
        action=jax.tree.map(_with_last, counted_from(_arrays(stored["actions"]), first_action, -1, f"{where}: action")),
        reward=_with_last(reward),
        discount=implied_discount(marks["is_terminal"]),
        **marks,
        metadata={"ending": ending} | metadata,
        extras={f"info_{name}" if name in STEP_FIELDS else name: x for name, x in infos.items()},
    )


def _arrays(x: Any) -> PyTree:
    """Convert Minari's data to nested dictionaries of arrays; tuples become dictionaries with positions as keys."""
    if isinstance(x, Mapping | tuple):
        return {str(name): _arrays(child) for name, child in _parts(x)}
    x = np.asarray(x)
    if x.dtype == object:
        x = np.asarray([text.decode() if isinstance(text, bytes) else str(text) for text in x.ravel()]).reshape(x.shape)
    return x


def first_integers(space: Any, *, boxes: bool = False) -> Any:
    """Return the smallest values ("start") of the integers of a Gymnasium space; 0 for other arrays.

    In jaxrl, all integers start at 0. For a `Dict` or `Tuple` space, the result is a dictionary with an entry for each
    part, keyed by name or position.

    Args:
      space: a Gymnasium space.
      boxes: whether to include boxes of integers, which `jaxrl.envs` represents in action spaces as `Discrete` and
        `MultiDiscrete`.
    """
    from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

    if isinstance(space, Dict | Tuple):
        return {str(name): first_integers(child, boxes=boxes) for name, child in _parts(space.spaces)}
    if isinstance(space, Discrete | MultiDiscrete):
        return np.asarray(space.start)
    return space.low if boxes and isinstance(space, Box) and space.dtype.kind in "iu" and space.low.ndim < 2 else 0


def counted_from(x: PyTree, first: Any, sign: int, name: str) -> PyTree:
    """Return `x` with its integers shifted by `sign * first`; dtypes do not change.

    Args:
      x: arrays `[steps, ...]`, or nested dictionaries of them.
      first: the result of `first_integers` for the space of `x`.
      sign: 1 to shift integers that start at 0 so that they start at `first`; -1 to shift them back.
      name: the name of the field, for error messages.

    Raises:
      DatasetError: a shifted integer does not fit into its dtype.
    """
    if isinstance(x, Mapping) and isinstance(first, Mapping):
        return {key: counted_from(child, first.get(key, 0), sign, f"{name}/{key}") for key, child in x.items()}
    if isinstance(x, Mapping) or isinstance(first, Mapping) or not np.any(first):
        return x
    shifted = x.astype(np.int64) + sign * np.asarray(first, np.int64)
    return cast(
        shifted, x.dtype, f"{name}, counted from {'its first integer' if sign > 0 else 0},", np.ones(len(x), bool)
    )


def _with_last(x):
    """Append a zero entry for the last step, which is unused."""
    return np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)])
