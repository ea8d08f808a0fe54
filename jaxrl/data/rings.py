"""Conversion of datasets to replay rings, so that code that samples from a replay buffer can sample from a dataset."""

import dataclasses
import warnings
import zlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.buffers.ring import Parts
from jaxrl.core import spaces
from jaxrl.core.errors import DatasetError
from jaxrl.core.sources import Replay
from jaxrl.core.types import EnvSpec, PyTree, Trajectory
from jaxrl.data.batching import HEADROOM, Loader, arrays
from jaxrl.data.dataset import Dataset
from jaxrl.data.dataset_report import Rewards
from jaxrl.data.episodes import Episode, cast, non_finite, refuse, zero_where
from jaxrl.parallel import memory

_OUTSIDE = 1e-3  # fraction of the range by which actions may exceed their bounds, because other programs round them


def rings(dataset: Dataset, sources: Mapping[str, Replay], spec: EnvSpec, *, columns: int) -> tuple[Rings, int]:
    """Convert a dataset to the rings of sources, as numpy arrays; return them with a checksum of the rows.

    Warnings report changed or unused data: actions clipped to their bounds, rewards at last steps, or a dataset
    without rewards.

    The rows of all episodes are concatenated and split into `columns` stretches with equal, possibly fractional,
    numbers of transitions (see `jaxrl.buffers.ring.Parts`). A stretch also holds the neighboring rows on both sides,
    for context.

    Args:
      dataset: the dataset to convert; it is read once, but for its lengths.
      sources: the sources that sample from the dataset, keyed by name; see `jaxrl.buffers.fixed.source_of`.
      spec: the spec of the environment that the dataset is from.
      columns: the number of columns.

    Raises:
      DatasetError: an array has another shape or kind than the environment's, or an action is not in the action space.
      ConfigError: the dataset has no episodes, or the rows do not fit in memory.
    """
    clipped, rewards = _Clipped(spec), Rewards()

    def as_of(episode):
        rewards.add(episode)
        return _as_of(episode, clipped)

    rows = arrays(dataset.map(as_of, same_length=True), copies=2)  # the rows and the rings
    if not rows.weight.any():
        raise DatasetError("the dataset has no transitions")
    for line in clipped.notes() + rewards.notes():
        warnings.warn(f"the dataset: {line}", stacklevel=3)
    place, blank, parts = _layout(np.asarray(rows.weight), columns, *fixed.margins(sources))
    size = len(rows.reward)
    picked = np.clip(place, 0, size - 1)
    begun = np.flatnonzero(rows.first)
    step = (np.arange(size) - begun[np.searchsorted(begun, np.arange(size), side="right") - 1]).astype(np.int32)

    def pick(x):
        laid = x[picked]
        laid[blank] = 0
        return laid

    laid = jax.tree.map(pick, rows)
    return fixed.rings(sources, laid.replace(first=laid.first | blank), pick(step), parts), _checksum(rows)


def _layout(weight: np.ndarray, columns: int, before: int, after: int) -> tuple[np.ndarray, np.ndarray, Parts]:
    """Assign rows to the slots of columns.

    Args:
      weight: bool [rows], True where a transition begins.
      columns: the number of columns.
      before, after: the numbers of neighboring rows to store before and after a column's rows.

    Returns:
      The row number of each slot, int [columns, slots]; True for slots that are blank, bool [columns, slots]; and the
      `Parts` of the columns.
    """
    row = np.flatnonzero(weight)
    total, column = len(row), np.arange(columns)
    first, last = column * total // columns, ((column + 1) * total - 1) // columns  # transitions, possibly split
    whole = np.append(row, len(weight))[
        -(-np.arange(columns + 1) * total // columns)
    ]  # first row of each column, without neighboring rows
    whole[0] = 0
    start, stop = np.minimum(row[first], whole[:-1]), np.maximum(row[last] + 1, whole[1:])
    slots = before + int((stop - start).max()) + after
    place = start[:, None] - before + np.arange(slots)[None]
    blank = (place < 0) | (place >= len(weight)) | (place >= (stop + after)[:, None])
    at = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
    parts: PyTree = (  # numpy until their devices are known
        (row[at] - start[:, None] + before).astype(np.int32),
        (column * total % columns).astype(np.int32),
        (np.stack([whole[:-1], whole[1:]], axis=1) - start[:, None] + before).astype(np.int32),
        np.int32(total),
    )
    return place, blank, Parts(*parts)


def fit(dataset: Dataset, spec: EnvSpec, devices: list[jax.Device]) -> bool:
    """Return whether a dataset fits in memory as episodes and as rings, which are sharded over the devices."""
    example = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    needed = (int(dataset.lengths.sum()) + len(dataset)) * (memory.size_of(example) + 16)
    on_cpu, host, device = devices[0].platform == "cpu", memory.free_on_host(), memory.free_on_device(devices[0])
    # The host holds the rows and the rings, and without separate device memory, those on the device.
    fits = host is None or (3 if on_cpu else 2) * needed <= HEADROOM * host
    return fits and (device is None or needed / len(devices) <= HEADROOM * device)


def stream(dataset: Dataset, source: Replay, spec: EnvSpec, *, seed: int) -> Loader:
    """Return a loader that converts the dataset's arrays to the environment's spaces.

    Reading an episode whose arrays do not fit the spaces raises a DatasetError. A single warning names the first
    episode whose actions are clipped.

    Args:
      dataset: the dataset to load.
      source: the source that samples from the dataset and determines the items; see `jaxrl.buffers.fixed.source_of`.
      spec: the spec of the environment that the dataset is from.
      seed: the seed of the shuffling.
    """
    warned = False

    def as_of(episode):
        nonlocal warned
        number, clipped = episode.metadata.get("episode_id", "of the stream"), _Clipped(spec)
        found = _as_of(episode, clipped)
        if clipped.clipped and not warned:
            warned = True
            warnings.warn(f"episode {number}: {clipped.notes()[0]}; this is reported only once", stacklevel=2)
        return found

    items = {"n_step": source.n_step, "sequence": source.sequence}
    return dataset.map(as_of, same_length=True).loader(source.batch_size, seed=seed, window="fit", **items)


@dataclasses.dataclass
class _Clipped:
    """A count of actions outside the bounds of a spec's action space, and their largest distance from the bounds."""

    spec: EnvSpec
    actions: int = 0
    clipped: int = 0
    farthest: float = 0.0

    def notes(self) -> list[str]:
        if not self.clipped:
            return []
        return [
            f"{self.clipped:,} of {self.actions:,} actions ({self.clipped / self.actions:.1%}) are outside the bounds "
            f"of {self.spec.action_space!r}, by up to {self.farthest:.4g}, and are clipped to them"
        ]

    def clip(self, action: np.ndarray, space: spaces.Box, acting: np.ndarray) -> np.ndarray:
        """Return the actions clipped to the bounds, as the environment would have executed them."""
        clipped = np.clip(action, space.low, space.high)
        if space.dtype.kind == "f":
            span = np.where(np.isfinite(space.high - space.low), space.high - space.low, 1.0)
            beyond = zero_where(~acting, np.abs(action - clipped))
            far = (beyond > _OUTSIDE * np.maximum(span, 1e-6)).reshape(len(acting), -1).any(axis=1)
            self.clipped += int(far.sum())
            self.farthest = max(self.farthest, float(beyond.max(initial=0.0)))
        return clipped


def _as_of(episode: Episode, clipped: _Clipped) -> Episode:
    """Convert an episode's arrays to the environment's spaces and drop its extras."""
    for field, what in non_finite(episode):
        raise DatasetError(f"{field} {what}")
    spec, acting = clipped.spec, ~episode.is_last
    always = np.ones_like(acting)
    clipped.actions += episode.length
    return dataclasses.replace(
        episode,
        observation=_as_space(episode.observation, spec.observation_space, "observation", always),
        action=_as_space(episode.action, spec.action_space, "action", acting, clipped),
        reward=cast(episode.reward, np.float32, "reward", acting),
        extras={},
    )


def _as_space(
    value: PyTree, space: spaces.Space, where: str, counts: np.ndarray, clipped: _Clipped | None = None
) -> PyTree:
    """Convert arrays `[steps, ...]` to the dtypes of a space, without checking steps at which `counts` is False.

    If `clipped` is passed, it clips numbers outside the bounds of boxes, and counts them.
    """
    if isinstance(space, spaces.Composite):  # the keys of a tuple's parts are their positions
        names = sorted(str(key) for key, _ in space.items)
        if not isinstance(value, Mapping) or sorted(value) != names:
            has = sorted(value) if isinstance(value, Mapping) else f"an array of shape {np.shape(value)[1:]}"
            raise DatasetError(f"{where} must have the keys {names} of the environment's space; found {has}")
        found = {
            key: _as_space(value[str(key)], child, f"{where}/{key}", counts, clipped) for key, child in space.items
        }
        return found if isinstance(space, spaces.Dict) else tuple(found.values())
    if isinstance(value, Mapping):
        raise DatasetError(f"{where} has the keys {sorted(value)}; the environment's space is {space!r}")
    x = np.asarray(value)
    if x.shape[1:] != space.shape or not np.can_cast(x.dtype, space.dtype, "same_kind"):
        raise DatasetError(f"{where} is {x.dtype} {x.shape[1:]}; the environment's space is {space!r}")
    if not isinstance(space, spaces.Box):
        most = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        refuse(where, x, (x < 0) | (x >= most), counts, f"the environment's space is {space!r}")
        return np.clip(x, 0, most - 1).astype(space.dtype)
    if x.dtype.kind in "iub" and space.dtype.kind == "f":  # such as pixels from 0 to 255 for a space from 0 to 1
        outside = (x < space.low) | (x > space.high)
        refuse(where, x, outside, counts, f"the environment's space is {space!r}: scale it with dataset.map")
    x = cast(x, space.dtype, where, counts)
    return x if clipped is None else clipped.clip(x, space, counts)


def _checksum(rows: Trajectory) -> int:
    """Return the checksum of the rows, which `config.json` stores, with the array names of older versions."""
    found = 0
    for path, x in jax.tree.leaves_with_path(rows):
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        found = zlib.crc32(np.ascontiguousarray(x).data.cast("B"), zlib.crc32(name.encode(), found))
    return found
