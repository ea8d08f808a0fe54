"""Export of policies to files that run without jaxrl, or to folders to share."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from jaxrl.core import files, ownership
from jaxrl.core.arguments import checked
from jaxrl.core.config import encode
from jaxrl.core.errors import ConfigError, MissingExtraError, unknown
from jaxrl.core.interrupts import interruptible
from jaxrl.core.versions import own_version
from jaxrl.export import folder, numpy_file, onnx_file
from jaxrl.export.function import ActFunction
from jaxrl.run.directory.loading import chosen, load_run
from jaxrl.run.directory.sweep_directory import METRICS, best_run
from jaxrl.run.loggers import read_metrics
from jaxrl.run.policies.policy import Policy
from jaxrl.run.policies.policy_folder import is_policy_folder
from jaxrl.run.result import Result

FORMATS = ("stablehlo", "numpy", "safetensors", "onnx")
PLATFORMS = ("cpu", "cuda", "tpu")  # platforms of StableHLO programs
_SUFFIXES = {"stablehlo": ".stablehlo", "numpy": ".npz", "onnx": ".onnx"}  # suffix of each format's file


@interruptible
@checked(step={"low": 0})
def export_policy(
    source: Policy | Result | str | os.PathLike,
    path: str | os.PathLike,
    *,
    to: str = "stablehlo",
    sample: bool = False,
    step: int | None = None,
    best: bool = False,
) -> Path:
    """Write a policy as a file that runs without jaxrl, or as a folder to share.

        jaxrl.export_policy("runs/cartpole", "policy.stablehlo")

    Except for the folder, all formats contain one function of arrays for any batch size B, which includes the
    parameters, the normalization of observations and the bounds of actions:

        (observation [B, ...], carry, first [B], reward [B][, action_mask][, key]) -> (action [B, ...], carry)

    Args:
      source: a policy, a result of `jaxrl.train`, or the directory of a run, a sweep or an exported policy.
      path: the file, which ends in ".stablehlo", ".onnx" or ".npz"; an existing file is only replaced if it is an
        earlier export. For "safetensors", a folder that must not exist; a `Policy` without its run has no configuration
        and cannot be written as a folder.
      to: "stablehlo": needs only JAX, on CPU, GPU and TPU. "onnx": for onnxruntime. "numpy": an .npz file, and next to
        it a Python file that runs the policy with only numpy; for networks without convolutions. "safetensors": a
        folder that `jaxrl.load` reads, with configuration, scores and a model card.
      sample: sample actions as in training, with a key; only "stablehlo".
      step, best: the checkpoint, as in `jaxrl.load`; only for a run.

    Returns:
      The path.

    Raises:
      ConfigError: the policy cannot be written in this format; raised before anything is written.
      MissingExtraError: a package that the format needs is not installed.
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    if sample and to != "stablehlo":
        raise ConfigError(f"sample=True: to={to!r} supports greedy actions only; use to='stablehlo'")
    if not isinstance(source, str | os.PathLike) and (best or step is not None):
        raise ConfigError(f"{chosen(step, best)}: a policy has only one step; pass the run directory")
    where = files.expand(path)
    _check_path(where, to)
    origin = _origin(source, step, best)
    policy = origin.policy
    try:
        if to == "safetensors":
            if origin.config is None or origin.step is None:
                raise ConfigError("to='safetensors' needs the configuration: pass the run directory, or the result")
            folder.write(where, policy, origin.config, origin.step, origin.metrics)
        elif to == "numpy":
            numpy_file.write(where, ActFunction(policy), _about(origin))
        elif to == "onnx":
            onnx_file.write(where, ActFunction(policy))
        else:
            _write_stablehlo(where, ActFunction(policy, sample))
    except OSError as error:
        raise ConfigError(f"path={str(path)!r} cannot be written: {error}") from error
    return where


def _write_stablehlo(path, function):
    try:
        import flatbuffers  # noqa: F401  # JAX's own message does not name the extra
    except ImportError as error:
        raise MissingExtraError("to='stablehlo'", "export") from error
    program = exported(function).serialize()
    with files.replacing(path, "wb") as file:
        file.write(program)


def exported(function: ActFunction) -> jax.export.Exported:
    """Return a policy's StableHLO program for any batch and all platforms."""
    return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*function.arguments.values())


def _check_path(path, to):
    """Raise a ConfigError if the path cannot be written, or is a file that is not an export."""
    if not path.parent.is_dir():
        raise ConfigError(f"path={str(path)!r}: there is no folder {path.parent}")
    if to == "safetensors":
        return
    if path.suffix != _SUFFIXES[to]:
        raise ConfigError(f"path={str(path)!r} must end in {_SUFFIXES[to]}")
    ownership.check_output(path, to)
    if to == "numpy":
        ownership.check_output(path.with_suffix(".py"), "py")
        if path.stem in (*sys.stdlib_module_names, "numpy"):
            raise ConfigError(
                f"path={str(path)!r}: {path.stem}.py next to it would shadow the module {path.stem}; use another name"
            )


@dataclasses.dataclass(frozen=True)
class _Origin:
    """A policy with the configuration, environment steps and metrics of its training."""

    policy: Policy
    config: Mapping[str, Any] | None = None
    step: int | None = None
    metrics: Sequence[Mapping[str, Any]] = ()


def _origin(source, step, best) -> _Origin:
    if isinstance(source, Policy):
        return _Origin(source)
    if isinstance(source, Result):
        return _Origin(source.policy, source.config, source.total_steps, source.metrics)
    run = load_run(source, step=step, best=best)
    path = best_run(source)
    read = folder.read_scores if is_policy_folder(path) else lambda path: read_metrics(path / METRICS)
    return _Origin(run.policy, run.config, run.step, read(path))


def _about(origin) -> dict[str, Any]:
    """Return the description of a policy for its .npz file, as JSON values."""
    spec = origin.policy.spec
    return {
        "algorithm": type(origin.policy.algo).__name__,
        "environment": spec.name,
        "observation_space": encode(spec.observation_space),
        "action_space": encode(spec.action_space),
        "step": origin.step,
        "jaxrl": own_version(),
    }
