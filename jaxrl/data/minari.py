"""A writer of Minari datasets (https://minari.farama.org), which TorchRL, d3rlpy and others read.

Minari has no mark for episodes whose continuation is unknown. Other readers see them as truncated, as where Minari's
own collector stops; jaxrl distinguishes the two by the episode's metadata.
"""

import os
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, DatasetError, unknown
from jaxrl.core.types import PyTree
from jaxrl.data.episodes import Episode, field_name, implied_discount
from jaxrl.data.metadata import DATA_FORMATS, DTYPES
from jaxrl.data.minari_reader import (
    DESCRIPTION,
    MinariReader,
    counted_from,
    directory_of,
    first_integers,
    package,
)
from jaxrl.data.staging import Staging, as_dataset_errors

_OWN = ("id", "total_steps")  # metadata of an episode that Minari itself writes
_AT_ONCE, _EPISODES_AT_ONCE = 1 << 22, 256  # bytes and number of episodes that are written together
_LONGEST = 131_071  # transitions; Minari would read a longer episode in an Arrow file as two


class MinariWriter:
    """A writer of a Minari dataset that appears when it is complete; use it as a context manager.

    Everything is written to a hidden directory next to it (`Staging`); `close` reads all of it again, and renames it.

    Args:
      dataset_id: `(namespace/)name-v0`.
      observation_space, action_space: the spaces of the episodes' arrays; a tuple is written as a dictionary.
      data_format: "hdf5", one file, which all readers of Minari support; "arrow" or "parquet", one directory per
        episode.
      data_dir: the directory that holds datasets; None: where Minari looks for them.
      env_spec: the id of the Gymnasium environment that `recover_environment` makes for readers. If its spaces count
        integers from a number other than 0, so does the dataset.
      algorithm: the algorithm's name.

    Raises:
      ConfigError: the id or the format is invalid, the dataset exists already, or another process writes to it.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    @as_dataset_errors
    def __init__(
        self,
        dataset_id: str,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        data_format: str = "hdf5",
        data_dir: str | os.PathLike | None = None,
        env_spec: str | None = None,
        algorithm: str | None = None,
    ):
        if data_format not in DATA_FORMATS:
            raise unknown("data format", data_format, DATA_FORMATS)
        minari = package(data_format)
        from minari.dataset.minari_dataset import DATASET_ID_RE
        from minari.dataset.minari_storage import MinariStorage

        match = DATASET_ID_RE.fullmatch(dataset_id)
        if match is None or match.group("version") is None:
            raise ConfigError(f"dataset_id={dataset_id!r} must be NAME-v0, or NAMESPACE/NAME-v0, with any number")
        self._spaces = {"observation": observation_space, "action": action_space}
        spec = None if env_spec is None else _find_spec(env_spec)
        self._first = dict.fromkeys(self._spaces, 0) if spec is None else _first_integers(spec, self._spaces)
        theirs = {
            f"{name}_space": _to_gymnasium(space, name, self._first[name]) for name, space in self._spaces.items()
        }
        self._longest = None if data_format == "hdf5" else _LONGEST
        self._names: tuple[Any, set[str]] | None = None  # the structure of the extras, and the names of metadata
        self._waiting: list[tuple[Any, dict[str, Any]]] = []
        self._bytes = self._checksum = self.episodes = 0
        self._namespace = match.group("namespace")
        self._staging = Staging(directory_of(dataset_id, data_dir))
        try:
            self._storage = MinariStorage.new(
                self._staging.partial / "data", env_spec=spec, data_format=data_format, jpeg_encoding=False, **theirs
            )
            # Minari would add up the sizes of all files after every episode.
            self._storage.get_size = lambda: 0.0
            about = {} if algorithm is None else {"algorithm_name": algorithm}
            about |= {"dataset_id": dataset_id, "minari_version": minari.__version__}
            self._storage.update_metadata(about | {"description": DESCRIPTION})
        except BaseException:
            self._staging.discard()
            raise

    @as_dataset_errors
    def write(self, episode: Episode, metadata: dict[str, Any] | None = None) -> None:
        """Add an episode, with its own metadata, `metadata`, and its return, length and number.

        Raises:
          ConfigError: an array would not be read back bit for bit, or differs in kind from those before.
          DatasetError: the disk is full, or cannot be written to.
        """
        from minari.data_collector import EpisodeBuffer

        own = {"episode_id": self.episodes, "return": episode.episode_return, "length": episode.length}
        metadata = {name: _plain(value) for name, value in {**episode.metadata, **(metadata or {}), **own}.items()}
        names = jax.tree.structure(dict(episode.extras)), set(metadata)
        if problems := self._problems(episode, metadata):
            raise ConfigError(problems)
        if self._names is None:
            self._names = names
        elif self._names != names:
            raise ConfigError(f"an episode has the fields {names}, but earlier ones have {self._names}")
        self._checksum = _checksum(episode, metadata, self._checksum)
        terminations, truncations = np.zeros((2, episode.length), np.bool_)
        terminations[-1] = episode.is_terminal[-1]
        truncations[-1] = not terminations[-1]
        buffer = EpisodeBuffer(
            seed=metadata.pop("seed", None),
            observations=counted_from(episode.observation, self._first["observation"], 1, "steps/observation"),
            actions=counted_from(
                jax.tree.map(lambda x: x[:-1], episode.action), self._first["action"], 1, "steps/action"
            ),
            rewards=episode.reward[:-1],  # ty: ignore[invalid-argument-type]  # an array does too
            terminations=terminations,  # ty: ignore[invalid-argument-type]  # an array does too
            truncations=truncations,  # ty: ignore[invalid-argument-type]  # an array does too
            infos=dict(episode.extras) or None,
        )
        self._waiting.append((buffer, metadata))
        self._bytes += sum(x.nbytes for x in jax.tree.leaves(episode.steps))
        self.episodes += 1
        if self._bytes >= _AT_ONCE or len(self._waiting) >= _EPISODES_AT_ONCE:
            self._flush()

    @as_dataset_errors
    def close(self) -> Path:
        """Complete the dataset, read it again, and move it to its place.

        Raises:
          ConfigError: there are no episodes, or something else appeared at the path meanwhile.
          DatasetError: the data read back differ from those written, or writing failed.
        """
        if not self.episodes:
            raise ConfigError("there are no episodes to write; a dataset has at least one")
        self._flush()
        del self._storage.get_size
        self._storage.update_metadata({"dataset_size": float(self._storage.get_size())})
        self._read_again()
        _write_namespaces(self._staging.path, self._namespace)
        return self._staging.publish()

    def __enter__(self) -> "MinariWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the written files, unless `close` has published them."""
        self._staging.discard()

    def _flush(self):
        buffers, metadata = zip(*self._waiting, strict=True) if self._waiting else ((), ())
        if buffers:
            self._storage.update_episodes(buffers)
            self._storage.update_episode_metadata(metadata, range(self.episodes - len(buffers), self.episodes))
        self._waiting, self._bytes = [], 0

    def _problems(self, episode, metadata):
        problems = []
        if episode.length < 1 or self._longest is not None and episode.length > self._longest:
            limit = "" if self._longest is None else f" and, except with data_format='hdf5', at most {self._longest:,}"
            problems.append(f"an episode has {episode.length:,} transitions; Minari needs at least 1{limit}")
        for name, space in self._spaces.items():
            problems += _unlike(getattr(episode, name), space, name)
        named = {"reward": episode.reward, **episode.extras}
        for name, x in episode.extras.items():
            if self._longest is not None or isinstance(x, Mapping) or "/" in name:
                problems.append(f"steps/{name}: Minari supports such fields only if flat, in HDF5 files")
        for path, x in jax.tree.leaves_with_path(named):
            name, dtype = field_name("steps", path), np.asarray(x).dtype
            if dtype.name not in DTYPES or not dtype.isnative:
                problems.append(_refused(name, dtype))
        if problems:
            return problems
        if episode.discount.tobytes() != implied_discount(episode.is_terminal).tobytes():
            problems.append(
                "steps/discount is not the float32 0 at a terminal end and 1 elsewhere; Minari does not store discounts"
            )
        for name, value in metadata.items():
            if not isinstance(value, str | int | float) or "/" in name or name in _OWN:
                problems.append(
                    f"the metadata field {name}={value!r} must be a number or a string, without / in its name"
                )
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                problems.append(f"the metadata field {name}={value} has more than 64 bits")
        return problems

    def _read_again(self):
        reader, checksum = MinariReader(self._staging.partial), 0
        if len(reader) != self.episodes:
            raise DatasetError(f"{reader.path} does not contain the {self.episodes} episodes that were written to it")
        for index, record in enumerate(reader.records(range(len(reader)))):
            episode = reader.episode(record, f"{reader.path}: episode {index}")
            checksum = _checksum(episode, episode.metadata, checksum)
        if checksum != self._checksum:
            raise DatasetError(f"{reader.path} does not contain the values that were written; check the disk")


def _checksum(episode, metadata, checksum):
    """Return a checksum of every bit, type and shape that must be read back."""
    steps = episode.steps | {name: jax.tree.map(lambda x: x[:-1], episode.steps[name]) for name in ("action", "reward")}
    for path, x in jax.tree.leaves_with_path(steps):
        about = f"{field_name('', path)} {x.dtype.str} {x.shape}"
        octets = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(octets, zlib.crc32(about.encode(), checksum))
    return zlib.crc32(repr(sorted(metadata.items())).encode(), checksum)


def _unlike(x: PyTree, space: spaces.Space, name: str) -> list[str]:
    """Return how arrays differ from a space in keys, dtype or shape, one line each; bounds are not checked."""
    if isinstance(space, spaces.Composite):
        names = sorted(str(key) for key, _ in space.items)
        if not isinstance(x, Mapping) or sorted(x) != names:
            return [f"steps/{name} does not have the fields of its space, {names}"]
        return [line for key, child in space.items for line in _unlike(x[str(key)], child, f"{name}/{key}")]
    if isinstance(x, Mapping) or x.dtype != space.dtype or x.shape[1:] != space.shape:
        found = "a dictionary" if isinstance(x, Mapping) else f"{x.dtype} {x.shape[1:]}"
        return [f"steps/{name} is {found}, its space has {space.dtype} {space.shape}"]
    return []


def _to_gymnasium(space: spaces.Space, name: str, first: Any = 0) -> Any:
    """Return the same space as a Gymnasium space, its integers counted from `first`.

    Raises:
      ConfigError: Minari could not return its elements bit for bit; the message names it.
    """
    import gymnasium

    theirs = gymnasium.spaces
    if isinstance(space, spaces.Composite):
        parts = {str(key): child for key, child in space.items}
        if wrong := [key for key in parts if "/" in key or key in ("", ".", "..")]:
            raise ConfigError(f"steps/{name}/{wrong[0]}: Minari does not support this name; rename it")
        inner = {key: first.get(key, 0) if isinstance(first, Mapping) else 0 for key in parts}
        return theirs.Dict({key: _to_gymnasium(child, f"{name}/{key}", inner[key]) for key, child in parts.items()})
    if space.dtype.name not in DTYPES or not space.dtype.isnative:
        raise ConfigError(_refused(f"steps/{name}", space.dtype))
    if 0 in space.shape:
        raise ConfigError(f"steps/{name} has shape {space.shape}: without values, which Minari cannot write")
    if isinstance(space, spaces.Discrete):
        return theirs.Discrete(space.n, start=int(first), dtype=space.dtype.type)
    if isinstance(space, spaces.MultiDiscrete):
        start = np.broadcast_to(np.asarray(first, space.dtype), space.shape)
        return theirs.MultiDiscrete(list(space.nvec), start=start, dtype=space.dtype.type)
    return theirs.Box(space.low, space.high, space.shape, space.dtype.type)


def _refused(name, dtype):
    return f"{name} has dtype {dtype}, which Minari cannot restore bit for bit; supported: {', '.join(sorted(DTYPES))}"


def _find_spec(name):
    import gymnasium

    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ConfigError(f"env_spec={name!r} is not a Gymnasium environment: {error}") from error


def _first_integers(spec: Any, ours: Mapping[str, spaces.Space]) -> dict[str, Any]:
    """Return the first integers in the spaces of a spec's environment, which our spaces count from 0.

    The environment is made to read its spaces. If it cannot be made here, 0 is assumed, with a warning.
    """
    import gymnasium

    try:
        env = gymnasium.make(spec)
    except Exception as error:  # its constructor may raise anything
        warnings.warn(
            f"env_spec={spec.id!r} cannot be created ({error!r:.200}): its integers are assumed to count from 0",
            stacklevel=3,
        )
        return dict.fromkeys(ours, 0)
    theirs = {"observation": env.observation_space, "action": env.action_space}
    env.close()
    return {name: _matching(space, theirs[name]) for name, space in ours.items()}


def _matching(space: spaces.Space, theirs: Any) -> Any:
    """Return `first_integers` of the parts of `theirs` that are `Discrete` or `MultiDiscrete` in our space."""
    import gymnasium

    if isinstance(space, spaces.Composite):
        kind = gymnasium.spaces.Dict if isinstance(space, spaces.Dict) else gymnasium.spaces.Tuple
        if not isinstance(theirs, kind):
            return 0
        parts: Any = theirs.spaces if isinstance(theirs, gymnasium.spaces.Dict) else dict(enumerate(theirs.spaces))
        return {str(key): _matching(child, parts[key]) for key, child in space.items if key in parts}
    if isinstance(space, spaces.Discrete) and isinstance(theirs, gymnasium.spaces.Discrete):
        return first_integers(theirs) if theirs.n == space.n else 0
    if not isinstance(space, spaces.MultiDiscrete) or theirs.shape != space.shape:
        return 0
    if isinstance(theirs, gymnasium.spaces.MultiDiscrete):
        return first_integers(theirs)
    # `jaxrl.envs` represents a box of integers as `MultiDiscrete`.
    return theirs.low if isinstance(theirs, gymnasium.spaces.Box) and theirs.dtype.kind in "iu" else 0


def _write_namespaces(path: Path, namespace: str | None) -> None:
    """Write the empty descriptions by which Minari recognizes the directories above a dataset."""
    for folder in path.parents[: len(namespace.split("/")) if namespace else 0]:
        about = folder / "namespace_metadata.json"
        if not about.exists():
            about.write_text("{}")


def _plain(value):
    """Convert a NumPy scalar to a Python number."""
    return value.item() if isinstance(value, np.generic) else value
