"""Manifest of a checkpoint: versions, configuration, and the shape, dtype and checksum of every leaf."""

import dataclasses
import datetime
import json
import platform
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import files, keys, trees
from jaxrl.core.config import build
from jaxrl.core.errors import CheckpointError, ConfigError
from jaxrl.core.types import PyTree
from jaxrl.core.versions import own_version

FILE = "manifest.json"
FORMAT = 1
_MOST_NAMED = 8  # maximum number of differences in a message


class Damaged(Exception):
    """An error for a checkpoint or manifest whose contents differ from those that were written."""


@dataclasses.dataclass
class Leaf:
    """A saved array: its dtype and shape in the state and, as `data_*`, on disk (typed keys are stored as integers)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data_dtype: str
    data_shape: tuple[int, ...]
    key_impl: str | None = None  # PRNG implementation of typed keys
    crc32: int | None = None  # None: the array was distributed over several processes


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
    """Return whether `leaf` consists of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves, keyed by paths such as `learner/params/policy/kernel`."""
    return trees.named_leaves(tree, root="value")


def leaf_entry(name: str, leaf: Any) -> Leaf:
    """Return the manifest entry of a leaf of the state, without the checksum."""
    (shape, dtype), stored = _signature(leaf), stored_as(leaf)
    return Leaf(name, dtype, shape, str(stored.dtype), stored.shape, keys.algorithm(leaf) if is_key(leaf) else None)


def stored_as(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype in which a leaf is stored on disk."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    data = np.asarray(data) if _is_number(data) else data
    return jax.ShapeDtypeStruct(data.shape, data.dtype)


def checksum(array: Any) -> int | None:
    """Return the CRC-32 of an array's bytes, or None if this process has only a part of the array."""
    if not isinstance(array, np.ndarray):
        return None
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def differences(
    expected: Mapping[str, Any], found: Mapping[str, tuple[tuple[int, ...], str]], *, partial: bool = False
) -> list[str]:
    """Return one line for each difference between stored and expected leaves.

    Args:
      expected: expected leaves by name.
      found: shapes and dtypes of the stored leaves by name.
      partial: whether additional stored leaves are allowed.
    """
    signatures = {name: _signature(leaf) for name, leaf in expected.items()}
    lines = [f"leaf {name} is missing" for name in expected if name not in found]
    lines += [f"leaf {name:.80} is stored but not expected" for name in found if name not in expected and not partial]
    lines += [
        f"leaf {name} is stored as {found[name][1]}{list(found[name][0])}, expected {dtype}{list(shape)}"
        for name, (shape, dtype) in signatures.items()
        if found.get(name, (shape, dtype)) != (shape, dtype)
    ]
    return lines if len(lines) <= _MOST_NAMED else [*lines[:_MOST_NAMED], f"and {len(lines) - _MOST_NAMED} more"]


def take(name: str, leaf: Any) -> Any:
    """Copy a leaf to host memory, because on a CPU, a numpy view of a donated array would change during the save.

    An array that is distributed over several processes is copied on its devices instead, and Orbax gathers it.

    Args:
      name: name of the leaf, for the error.
      leaf: an array, typed keys (copied as integers), or a Python number.

    Raises:
      CheckpointError: `leaf` has another type.
    """
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return jax.numpy.copy(leaf)
            leaf = leaf.addressable_data(0)
        with jax.transfer_guard_device_to_host("allow"):
            return np.array(leaf, copy=True)
    if isinstance(leaf, bool | int | float | np.ndarray | np.generic):
        return np.array(leaf, copy=True)
    raise CheckpointError(f"leaf {name} of the state is a {type(leaf).__name__}; only arrays and numbers can be saved")


def put(value: np.ndarray, like: Any) -> Any:
    """Return `value` in the form of the template `like`: typed keys, an array with its sharding, or a plain number."""
    if isinstance(like, bool | int | float):
        return type(like)(value)
    if isinstance(like, np.ndarray | np.generic):
        return value
    sharding = like.sharding
    if isinstance(like, jax.Array) and not like.committed:
        sharding = None
    if sharding is not None and not sharding.is_fully_addressable:
        if not is_key(like):
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        return jax.jit(partial(jax.random.wrap_key_data, impl=keys.kind(like)), out_shardings=sharding)(value)
    if is_key(like):
        wrapped = jax.random.wrap_key_data(jax.device_put(value), impl=keys.kind(like))
        return wrapped if sharding is None else jax.device_put(wrapped, sharding)
    return jax.device_put(value, sharding, may_alias=False)


def write(path: Path, record: Manifest) -> None:
    """Write a manifest atomically."""
    body = files.as_read_back(dataclasses.asdict(record))
    body["crc32"] = _body_checksum(body)
    files.write_json(path, body)


def read(path: Path) -> Manifest:
    """Read and verify a manifest.

    Raises:
      Damaged: the manifest is missing, truncated or altered.
      CheckpointError: a newer jaxrl wrote it in an unknown format.
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
            f"{path} has format {newer}, written by jaxrl {body.get('jaxrl_version', '?')!s:.40}, but this jaxrl "
            f"{own_version()} reads formats up to {FORMAT}; install that newer version"
        )
    try:
        return build(Manifest, body | {"leaves": [_leaf(entry) for entry in body.get("leaves", ())]})
    except (ConfigError, TypeError) as error:
        raise Damaged(f"the manifest has invalid contents: {error}") from error


def _leaf(entry):
    shapes = {name: tuple(entry[name]) for name in ("shape", "data_shape") if name in entry}
    return build(Leaf, entry | shapes)


def _body_checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())  # not `to_json`: older manifests may contain NaN


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float)


def _signature(leaf: Any) -> tuple[tuple[int, ...], str]:
    if _is_number(leaf):
        return (), type(leaf).__name__
    return tuple(leaf.shape), str(leaf.dtype)
