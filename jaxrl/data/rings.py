"""Episodes as rows: a dataset laid out as a replay's, so that whatever draws from a replay can draw from it."""

import dataclasses
import zlib
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from jaxrl.buffers import fixed
from jaxrl.buffers.fixed import Rings
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, DatasetError
from jaxrl.core.sources import Replay
from jaxrl.core.types import EnvSpec, PyTree, Trajectory
from jaxrl.data.dataset import Dataset
from jaxrl.data.episodes import Episode, field_name, non_finite
from jaxrl.data.loading import Loader
from jaxrl.data.rows import rows_from_episode
from jaxrl.parallel import memory

_HEADROOM = 0.9  # of what is free
_OUTSIDE = 1e-3  # how far beyond its bounds an action may lie, in ranges: others round


def rings(
    episodes: Iterable[Episode], sources: Mapping[str, Replay], spec: EnvSpec, *, columns: int
) -> tuple[Rings, int]:
    """The rings of sources that draw from a dataset, as numpy, and a checksum of what is in them.

    All rows, one episode after another, are cut into `columns` stretches of the same length. A stretch that begins or
    ends within an episode has the neighboring rows beside it, to look at and not to begin at.

    Args:
      episodes: those of the dataset.
      sources: by name, see `jaxrl.buffers.fixed.source_of`.
      spec: of the environment that the data is about.
      columns: how many.

    Raises:
      DatasetError: an array is of another shape or kind than the environment's, or an action not one of its own.
      ConfigError: the rows do not fit in memory.
    """
    rows = _joined(
        [rows_from_episode(_as_of(number, episode, spec)) for number, episode in enumerate(_fitting(episodes))]
    )
    size = len(rows.reward)
    if not rows.weight.any():
        raise DatasetError("the dataset has no transition to learn from")
    before, after = fixed.margins(sources)
    each = -(-size // columns)
    place = np.arange(columns)[:, None] * each + np.arange(-before, each + after)[None]
    blank = (place < 0) | (place >= size)
    body = np.zeros_like(blank)
    body[:, before : before + each] = True
    picked = np.clip(place, 0, size - 1)
    begun = np.flatnonzero(rows.first)
    step = (np.arange(size) - begun[np.searchsorted(begun, np.arange(size), side="right") - 1]).astype(np.int32)

    def pick(x):
        laid = x[picked]
        laid[blank] = 0
        return laid

    laid = jax.tree.map(pick, rows)
    laid = laid.replace(weight=laid.weight & body, first=laid.first | blank)
    return fixed.rings(sources, laid, pick(step)), _checksum(rows)


def fit(dataset: Dataset, spec: EnvSpec, devices: list[jax.Device]) -> bool:
    """Whether the rows fit in memory: what is read, and what is laid out, which the devices share."""
    example = jax.eval_shape(lambda: (spaces.zeros(spec.observation_space), spaces.zeros(spec.action_space)))
    needed = (int(dataset.lengths.sum()) + len(dataset)) * (memory.size_of(example) + 16)
    on_cpu, host, device = devices[0].platform == "cpu", memory.free_on_host(), memory.free_on_device(devices[0])
    # On a machine without other memory: what was read, in rows, and those laid out.
    fits = host is None or (3 if on_cpu else 2) * needed <= _HEADROOM * host
    return fits and (device is None or needed / len(devices) <= _HEADROOM * device)


def stream(dataset: Dataset, source: Replay, spec: EnvSpec, *, seed: int) -> Loader:
    """Batches of the dataset as of an environment; an episode that does not fit it is refused by name when it is read.

    Args:
      dataset: of which.
      source: what the items are, see `jaxrl.buffers.fixed.source_of`.
      spec: of the environment that the data is about.
      seed: of the order.
    """

    def as_of(episode):
        return _as_of(episode.metadata.get("episode_id", "of the stream"), episode, spec)

    items = {"n_step": source.n_step, "sequence": source.sequence}
    return dataset.map(as_of, same_length=True).loader(source.batch_size, seed=seed, window="fit", **items)


def _fitting(episodes):
    """The episodes, unless they take so much that the rows would not fit beside them."""
    free, taken = memory.free_on_host(), 0
    for episode in episodes:
        taken += sum(x.nbytes for x in jax.tree.leaves(episode.steps))
        # What was read, in rows, and those laid out.
        if free is not None and 3 * taken > _HEADROOM * free:
            raise ConfigError(
                f"the dataset takes more than {taken / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free for it and "
                "two copies; use a part of it, or more memory"
            )
        yield episode


def _as_of(number: int, episode: Episode, spec: EnvSpec) -> Episode:
    """The episode with the arrays of the environment's spaces, and without extras; `number` names it in errors."""
    for field, what in non_finite(episode):
        raise DatasetError(f"episode {number}: {field} {what}")
    action = _as_space(episode.action, spec.action_space, f"episode {number}: action")
    return dataclasses.replace(
        episode,
        observation=_as_space(episode.observation, spec.observation_space, f"episode {number}: observation"),
        action=_allowed(action, ~episode.is_last, spec.action_space, number),
        extras={},
    )


def _as_space(value: PyTree, space: spaces.Space, where: str) -> PyTree:
    """Arrays `[steps, ...]` with the dtypes of a space."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            has = sorted(value) if isinstance(value, Mapping) else f"an array of shape {np.shape(value)[1:]}"
            raise DatasetError(f"{where} has {has}; the environment's has {sorted(space.spaces)}")
        return {name: _as_space(value[name], child, f"{where}/{name}") for name, child in space.items}
    if isinstance(value, Mapping):
        raise DatasetError(f"{where} has {sorted(value)}; the environment's is {space!r}")
    x = np.asarray(value)
    if x.shape[1:] != space.shape or not np.can_cast(x.dtype, space.dtype, "same_kind"):
        raise DatasetError(f"{where} is {x.dtype} {x.shape[1:]}; the environment's is {space!r}")
    return x.astype(space.dtype, copy=False)


def _allowed(action: PyTree, weight: np.ndarray, space: spaces.Space, number: int) -> PyTree:
    """The actions, those of a box within its bounds; they mean nothing where the weight is False."""
    if isinstance(space, spaces.Dict):
        return {name: _allowed(action[name], weight, child, number) for name, child in space.items}
    if isinstance(space, spaces.Box):
        slack = _OUTSIDE * np.maximum(np.where(np.isfinite(space.high - space.low), space.high - space.low, 1.0), 1e-6)
        fine = (action >= space.low - slack) & (action <= space.high + slack)
        clipped = np.clip(action, space.low, space.high)
    else:
        most = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        fine, clipped = (action >= 0) & (action < most), np.clip(action, 0, most - 1).astype(action.dtype)
    wrong = ~fine.reshape(len(weight), -1).all(axis=1) & weight
    if wrong.any():
        step = int(np.argmax(wrong))
        raise DatasetError(
            f"episode {number}: action is {action[step]} at step {step}; the environment's are {space!r}"
        )
    return clipped


def _joined(parts):
    if not parts:
        raise DatasetError("the dataset has no episodes")
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _checksum(rows: Trajectory) -> int:
    found = 0
    for path, x in jax.tree.leaves_with_path(rows):
        found = zlib.crc32(np.ascontiguousarray(x).data.cast("B"), zlib.crc32(field_name("", path).encode(), found))
    return found
