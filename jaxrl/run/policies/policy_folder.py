"""Exported policies: folders to copy and share, which `jaxrl.load` reads.

model.safetensors   named parameters and statistics for acting; the metadata contains the training step
config.json         the run's configuration, as in a run directory
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl.core import files
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import ActorState, PyTree
from jaxrl.run.directory import manifest
from jaxrl.run.directory.run_directory import FORMAT

MODEL = "model.safetensors"
_KIND = "jaxrl policy 1"  # name of the file format, stored in the metadata
_MOST_NAMED = 5  # maximum number of problems in a message
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool"} | {
    f"{sign[0].upper()}{bits}": f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)
}  # fmt: skip


def is_policy_folder(path: str | os.PathLike) -> bool:
    """Return whether a folder contains an exported policy instead of a run."""
    folder = files.expand(path)
    return (folder / MODEL).is_file() and not (folder / "checkpoints").exists()


def write(folder: str | os.PathLike, actor: ActorState, config: Mapping[str, Any], step: int) -> None:
    """Write a policy to an existing folder.

    Args:
      folder: the folder to write to.
      actor: the actor state.
      config: contents of the run's `config.json`.
      step: number of environment steps that the policy was trained for.

    Raises:
      ConfigError: a value is not finite, or has a dtype that the format does not support.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in manifest.named_leaves(actor).items()}
    if problems := [f"{name} is {x.dtype}" for name, x in arrays.items() if str(x.dtype) not in _DTYPES.values()]:
        raise ConfigError(f"safetensors cannot store the policy: {', '.join(problems[:_MOST_NAMED])}")
    _check_finite("the policy", arrays)
    path = files.expand(folder)
    arrays = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()}
    with files.replacing(path / MODEL, "wb") as file:
        file.write(safetensors.numpy.save(arrays, metadata={"format": _KIND, "step": str(step)}))
    files.write_json(path / "config.json", {"format": FORMAT} | dict(config))


def read(folder: str | os.PathLike, template: PyTree) -> tuple[PyTree, int]:
    """Read an actor state and its step, without running code from the file. Shapes are checked before arrays are read.

    Args:
      folder: the folder to read.
      template: actor state with the shapes and dtypes that follow from config.json.

    Raises:
      ConfigError: the file is damaged, or does not match config.json.
    """
    path = files.expand(folder) / MODEL
    expected = manifest.named_leaves(template)
    try:
        files.open_to_read(path).close()
        with safetensors.safe_open(path, framework="np") as file:
            metadata, slices = file.metadata() or {}, {name: file.get_slice(name) for name in file.keys()}
            found = {name: (tuple(x.get_shape()), _DTYPES.get(x.get_dtype(), "?")) for name, x in slices.items()}
            if metadata.get("format") != _KIND:
                raise ConfigError(
                    f"{path} is not a jaxrl policy: its metadata has format={metadata.get('format')!r:.40}"
                )
            if problems := manifest.differences(expected, found):
                raise ConfigError(f"{path} does not match its config.json: {'; '.join(problems)}")
            arrays = {name: file.get_tensor(name) for name in expected}
    except ConfigError:
        raise
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error!s:.200}".replace("\n", " ")) from error
    _check_finite(str(path), arrays)
    step = metadata.get("step", "")
    if not (step.isascii() and step.isdecimal() and len(step) < 19):
        raise ConfigError(f"the metadata of {path} has step={step!r:.40}; it must be a number of steps")
    leaves = [jax.numpy.asarray(arrays[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), int(step)


def _check_finite(what, arrays):
    if spoiled := [name for name, x in arrays.items() if x.dtype.kind == "f" and not np.isfinite(x).all()]:
        more = f" and {len(spoiled) - 1} more" if len(spoiled) > 1 else ""
        raise ConfigError(f"{what} cannot act, because {spoiled[0]}{more} contains NaN or infinity")
