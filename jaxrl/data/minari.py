"""A writer of Minari datasets (https://minari.farama.org), a format that TorchRL, d3rlpy and others read.

Minari has no flag for episodes whose continuation is unknown ("cut off"). They are stored as truncated, like the
episode at which Minari's own collector stops; jaxrl distinguishes cut-off and truncated episodes by their metadata.
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
from jaxrl.core.errors import ConfigError
from jaxrl.core.trees import named_leaves
from jaxrl.data.episodes import differences, implied_discount, kind_of
from jaxrl.data.metadata import DTYPES
from jaxrl.data.minari_reader import (
    DESCRIPTION,
    MinariReader,
    counted_from,
    directory_of,
    first_integers,
    package,
)
from jaxrl.data.staging import Writer, as_dataset_errors

_OWN = ("id", "total_steps")  # metadata fields of an episode that Minari itself writes
_AT_ONCE, _EPISODES_AT_ONCE = 1 << 22, 256  # maximum bytes and number of episodes to write together


class MinariWriter(Writer):
    """A writer of a Minari dataset; use it as a context manager. The dataset is moved to its path when it is complete.

    Args:
      dataset_id: the dataset's id, `(namespace/)name-v0`.
      observation_space, action_space: the spaces of the episodes' arrays; a tuple is written as a dictionary.
      data_dir: the directory that contains datasets; None: Minari's default directory.
      env_spec: the id of the Gymnasium environment that readers obtain from `recover_environment`. If the integers in
        its spaces start at a number other than 0, so do those in the dataset.
      algorithm: the name of the algorithm that collected the data.

    Raises:
      ConfigError: the id is invalid, the dataset exists already, or another process writes to it.
      MissingExtraError: `jaxrl[data]` is not installed.
    """

    def __init__(
        self,
        dataset_id: str,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        data_dir: str | os.PathLike | None = None,
        env_spec: str | None = None,
        algorithm: str | None = None,
    ):
        minari = package()
        from minari.dataset.minari_dataset import DATASET_ID_RE
        from minari.dataset.minari_storage import MinariStorage

        match = DATASET_ID_RE.fullmatch(dataset_id)
        if match is None or match.group("version") is None:
            raise ConfigError(
                f"dataset_id={dataset_id!r} must be NAME-v0 or NAMESPACE/NAME-v0, with any version number"
            )
        ours = {"observation": observation_space, "action": action_space}
        self._expected = kind_of({"steps": {name: spaces.tree_map(lambda part: part, x) for name, x in ours.items()}})
        spec = None if env_spec is None else _find_spec(env_spec)
        first = {} if spec is None else _first_integers(spec)
        self._first = {name: _matching(first.get(name, 0), space) for name, space in ours.items()}
        theirs = {f"{name}_space": _to_gymnasium(space, name, self._first[name]) for name, space in ours.items()}
        self._waiting: list[tuple[Any, dict[str, Any]]] = []
        self._bytes = 0
        self._namespace = match.group("namespace")
        super().__init__(directory_of(dataset_id, data_dir))
        try:
            with as_dataset_errors(self._staging.path):
                self._storage = MinariStorage.new(self._partial / "data", env_spec=spec, jpeg_encoding=False, **theirs)
                # Minari would otherwise compute the total size of all files after every episode.
                self._storage.get_size = lambda: 0.0
                about = {} if algorithm is None else {"algorithm_name": algorithm}
                about |= {"dataset_id": dataset_id, "minari_version": minari.__version__}
                self._storage.update_metadata(about | {"description": DESCRIPTION})
        except BaseException:
            self._staging.discard()
            raise

    def _add(self, episode):
        from minari.data_collector import EpisodeBuffer

        if problems := self._problems(episode):
            raise ConfigError(problems)
        self._checksum = _checksum(episode, self._checksum)
        metadata = dict(episode.metadata)
        terminations, truncations = np.zeros((2, episode.length), np.bool_)
        terminations[-1] = episode.is_terminal[-1]
        truncations[-1] = not terminations[-1]
        buffer = EpisodeBuffer(
            seed=metadata.pop("seed", None),
            observations=counted_from(episode.observation, self._first["observation"], 1, "steps/observation"),
            actions=counted_from(
                jax.tree.map(lambda x: x[:-1], episode.action), self._first["action"], 1, "steps/action"
            ),
            rewards=episode.reward[:-1],
            terminations=terminations,
            truncations=truncations,
            infos=dict(episode.extras) or None,
        )
        self._waiting.append((buffer, metadata))
        self._bytes += sum(x.nbytes for x in jax.tree.leaves(episode.steps))
        if self._bytes >= _AT_ONCE or len(self._waiting) >= _EPISODES_AT_ONCE:
            self._flush()

    def _complete(self):
        self._flush()
        del self._storage.get_size
        self._storage.update_metadata({"dataset_size": float(self._storage.get_size())})
        _write_namespaces(self._staging.path, self._namespace)

    def _flush(self):
        buffers, metadata = zip(*self._waiting, strict=True) if self._waiting else ((), ())
        if buffers:
            self._storage.update_episodes(buffers)
            self._storage.update_episode_metadata(metadata, [one["episode_id"] for one in metadata])
        self._waiting, self._bytes = [], 0

    def _problems(self, episode):
        problems = []
        if episode.length < 1:
            problems.append("an episode has no transitions; Minari needs at least 1")
        found = kind_of({"steps": {name: getattr(episode, name) for name in ("observation", "action")}}, axes=1)
        problems += [f"{line} as in its space" for line in differences(found, self._expected)]
        for name, x in episode.extras.items():
            if isinstance(x, Mapping) or "/" in name:
                problems.append(f"steps/{name}: Minari supports extra fields only without nesting")
        for name, x in named_leaves({"steps": {"reward": episode.reward, **episode.extras}}).items():
            if x.dtype.name not in DTYPES or not x.dtype.isnative:
                problems.append(_refused(name, x.dtype))
        if problems:
            return problems
        if episode.discount.tobytes() != implied_discount(episode.is_terminal).tobytes():
            problems.append(
                "steps/discount must be float32, 0 at a termination and 1 elsewhere; Minari does not store discounts"
            )
        for name, value in episode.metadata.items():
            if not isinstance(value, str | int | float) or "/" in name or name in _OWN:
                problems.append(
                    f"the metadata field {name}={value!r} must be a number or a string, without / in its name"
                )
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                problems.append(
                    f"the metadata field {name}={value} does not fit into int64, which Minari's files require"
                )
        return problems

    def _stored(self):
        reader, checksum = MinariReader(self._partial), 0
        for index, record in enumerate(reader.records(range(len(reader)))):
            checksum = _checksum(reader.episode(record, f"{reader.path}: episode {index}"), checksum)
        return len(reader), checksum


def _checksum(episode, checksum):
    """Return `checksum` updated with every value, dtype and shape of an episode that must be read back unchanged."""
    steps = episode.steps | {name: jax.tree.map(lambda x: x[:-1], episode.steps[name]) for name in ("action", "reward")}
    for name, x in named_leaves(steps).items():
        octets = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(octets, zlib.crc32(f"{name} {x.dtype.str} {x.shape}".encode(), checksum))
    return zlib.crc32(repr(sorted(episode.metadata.items())).encode(), checksum)


def _to_gymnasium(space: spaces.Space, name: str, first: Any) -> Any:
    """Convert a space to a Gymnasium space, in which integers start at `first`.

    Raises:
      ConfigError: Minari could not restore elements of the space bit for bit; the message contains `name`.
    """
    import gymnasium

    theirs = gymnasium.spaces
    if isinstance(space, spaces.Composite):
        parts = {str(key): child for key, child in space.items}
        if wrong := [key for key in parts if "/" in key or key in ("", ".", "..")]:
            raise ConfigError(
                f"steps/{name}: Minari does not support the keys {wrong}: no key may be '', '.' or '..', or contain '/'"
            )
        return theirs.Dict({key: _to_gymnasium(child, f"{name}/{key}", first[key]) for key, child in parts.items()})
    if space.dtype.name not in DTYPES or not space.dtype.isnative:
        raise ConfigError(_refused(f"steps/{name}", space.dtype))
    if 0 in space.shape:
        raise ConfigError(f"steps/{name} has shape {space.shape}, which has no values; Minari cannot write it")
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


def _first_integers(spec: Any) -> dict[str, Any]:
    """Create the environment of a spec and return the `first_integers` of its spaces.

    If the environment cannot be created on this machine, warn and return an empty dictionary; integers are then
    assumed to start at 0.
    """
    import gymnasium

    try:
        env = gymnasium.make(spec)
    except Exception as error:  # the environment's constructor may raise any error
        warnings.warn(
            f"env_spec={spec.id!r} cannot be created ({error!r:.200}): its integers are assumed to start at 0",
            stacklevel=3,
        )
        return {}
    env.close()
    return {
        "observation": first_integers(env.observation_space, boxes=True),
        "action": first_integers(env.action_space, boxes=True),
    }


def _matching(first: Any, space: spaces.Space) -> Any:
    """Return the parts of `first_integers` whose shape matches the integers in `space`; 0 for all other arrays."""
    if isinstance(space, spaces.Composite):
        parts = first if isinstance(first, Mapping) else {}
        return {str(key): _matching(parts.get(str(key), 0), child) for key, child in space.items}
    counts = isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not isinstance(first, Mapping)
    return first if counts and np.shape(first) == space.shape else 0


def _write_namespaces(path: Path, namespace: str | None) -> None:
    """Write the empty metadata file by which Minari recognizes each namespace directory above a dataset."""
    for folder in path.parents[: len(namespace.split("/")) if namespace else 0]:
        about = folder / "namespace_metadata.json"
        if not about.exists():
            about.write_text("{}")
