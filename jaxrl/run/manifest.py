"""The manifest of a checkpoint: versions, configuration, and a checksum for every leaf."""

import dataclasses
import datetime
import json
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import files, keys, paths
from jaxrl.core.config import build
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.types import PyTree
from jaxrl.core.versions import installed_version

FILE = "manifest.json"
FORMAT = 1


class Damaged(Exception):
    """An error of a checkpoint or manifest that differs from what was written; the message says how."""


@dataclasses.dataclass
class Leaf:
    """One saved array: `shape` and `dtype` in the state, `data_*` on disk (typed keys are stored as words)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data_dtype: str
    data_shape: tuple[int, ...]
    key_impl: str | None = None  # of typed keys
    crc32: int | None = None  # None: spread over processes, so no single one could compute it


def own_version() -> str:
    """Return the version of jaxrl that is running."""
    return installed_version("jaxrl") or "unknown"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclasses.dataclass
class Manifest:
    """A description of a checkpoint's contents and of the versions that wrote it."""

    step: int
    config: dict[str, Any]
    leaves: list[Leaf]
    score: float | None = None
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)  # state of the callbacks
    time: str = dataclasses.field(default_factory=_now)
    jaxrl_version: str = dataclasses.field(default_factory=own_version)
    jax_version: str = jax.__version__
    python_version: str = platform.python_version()
    format: int = FORMAT


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` holds typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by their path: `learner/params/policy/kernel`."""
    return paths.named_leaves(tree, root="value")


def leaf_entry(name: str, leaf: Any) -> Leaf:
    """Return the entry of a leaf of the state, without its checksum."""
    shape, dtype = _signature(leaf)
    return Leaf(name, dtype, shape, *stored_as(leaf), keys.algorithm(leaf) if is_key(leaf) else None)


def stored_as(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape in which a leaf is stored on disk."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    data = np.asarray(data) if _is_number(data) else data
    return str(data.dtype), tuple(data.shape)


def checksum(array: Any) -> int | None:
    """Return the CRC-32 of an array's bytes, or None if this process does not hold all of it."""
    if not isinstance(array, np.ndarray):
        return None
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def differences(record: Manifest, template: Mapping[str, Any], partial: bool) -> list[str]:
    """Return how the leaves of a template differ from those saved, one line each.

    `partial` allows the template to leave some out.
    """
    saved = {entry.name: (tuple(entry.shape), entry.dtype) for entry in record.leaves}
    lines = []
    for name, leaf in template.items():
        shape, dtype = _signature(leaf)
        if name not in saved:
            lines.append(f"leaf {name} was not saved")
        elif saved[name] != (shape, dtype):
            lines.append(
                f"leaf {name} was saved as {saved[name][1]}{list(saved[name][0])}, here it is {dtype}{list(shape)}"
            )
    if not partial:
        lines += [f"leaf {name} was saved, here there is none" for name in saved if name not in template]
    return lines if len(lines) <= 20 else [*lines[:20], f"and {len(lines) - 20} more"]


def write(path: Path, record: Manifest) -> None:
    """Write a manifest atomically."""
    body = files.as_read_back(dataclasses.asdict(record))
    body["crc32"] = _body_checksum(body)
    files.write_json(path, body)


def read(path: Path) -> Manifest:
    """Read and verify a manifest.

    Raises:
      Damaged: it is missing, cut short or altered.
      CheckpointError: a newer jaxrl wrote it, in a format unknown here.
    """
    try:
        body = files.read_json(path)
    except FileNotFoundError:
        raise Damaged("the manifest is missing, so the save was not completed") from None
    except (ValueError, OSError) as error:
        raise Damaged(f"the manifest cannot be read: {error}") from error
    expected = body.pop("crc32", None) if isinstance(body, dict) else None
    if expected is None or expected != _body_checksum(body):
        raise Damaged("the manifest does not match its checksum")
    if isinstance(newer := body.get("format"), int) and newer > FORMAT:
        raise CheckpointError(
            f"{path} has format {newer}, written by jaxrl {body.get('jaxrl_version', '?')!s:.40}; this jaxrl "
            f"{own_version()} reads up to {FORMAT}: install that version"
        )
    try:
        return build(Manifest, body | {"leaves": [_leaf(entry) for entry in body.get("leaves", ())]})
    except (ConfigError, TypeError) as error:
        raise Damaged(f"the manifest is none: {error}") from error


def _leaf(entry):
    shapes = {name: tuple(entry[name]) for name in ("shape", "data_shape") if name in entry}
    return build(Leaf, entry | shapes)


def _body_checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())  # not `to_json`: older manifests may hold NaN


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float)


def _signature(leaf: Any) -> tuple[tuple[int, ...], str]:
    if _is_number(leaf):
        return (), type(leaf).__name__
    return tuple(leaf.shape), str(leaf.dtype)
