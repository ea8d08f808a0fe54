"""Policies as StableHLO, by `jax.export`, which need only JAX, on CPUs, GPUs and TPUs."""

from pathlib import Path

import jax
import jax.export

from jaxrl.core import files
from jaxrl.core.errors import MissingExtraError
from jaxrl.export.function import ActFunction

PLATFORMS = ("cpu", "cuda", "tpu")


def write(path: Path, function: ActFunction) -> None:
    """Write a policy for any batch.

    Raises:
      MissingExtraError: flatbuffers is not installed.
      OSError: it cannot be written.
    """
    try:
        import flatbuffers  # noqa: F401  # JAX's own message does not name the extra
    except ImportError as error:
        raise MissingExtraError("to='stablehlo'", "export") from error
    program = exported(function).serialize()
    with files.replacing(path, "wb") as file:
        file.write(program)


def exported(function: ActFunction) -> jax.export.Exported:
    """Return a policy's program for any batch and all platforms."""
    return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*function.arguments.values())
