"""Accelerators that this machine need not have: programs are compiled for them by their descriptions."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from jaxrl.core.errors import ConfigError

_DESCRIPTIONS = json.loads(Path(__file__).with_name("accelerators.json").read_text())
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core} threads_per_core_limit: {threads_per_core}
  core_count: {cores} fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_memory_per_block}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Accelerators to compile for.

    Attributes:
      name: as `get` takes it, such as "v5e:4x4" or "h100:8".
      devices: that describe the accelerators; nothing can run on them.
      memory: bytes of one device.
    """

    name: str
    devices: tuple[Any, ...]
    memory: int


def names() -> list[str]:
    """Return what can be compiled for, one form of name for each kind of accelerator."""
    slices = [f"{kind}:{entry['slice']}" for kind, entry in _DESCRIPTIONS["tpu"].items()]
    return [*slices, *(f"{card}[:COUNT]" for card in _DESCRIPTIONS["gpu"])]


@functools.lru_cache
def get(name: str) -> Target:
    """Return the accelerators of this name.

    Args:
      name: of TPUs their kind and the shape of the slice, "v5e:4x4" or "v5p:2x2x1"; of GPUs the card and, unless it is
        one, their number: "h100", "h100:8".

    Raises:
      ConfigError: an unknown name; the compiler for these accelerators is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind in _DESCRIPTIONS["tpu"] and re.fullmatch(r"\d+(x\d+)+", shape):
        return _tpu(name, kind)
    if kind in _DESCRIPTIONS["gpu"] and re.fullmatch(r"([1-9]\d*)?", shape):
        return _gpu(name, kind, int(shape or 1))
    raise ConfigError(f"target={name!r} is not a known accelerator; use one of {', '.join(names())}, such as v5e:4x4")


def _tpu(name, kind):
    if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise ConfigError(f"target={name!r} needs the compiler for TPUs: pip install 'jaxrl[tpu-target]'")
    # Without these it looks for the TPUs of this machine, and waits for a server that tells what they are.
    known = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    known |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # else one process at a time; none of them holds a TPU
    try:
        with _environment(known):
            devices = topologies.get_topology_desc(name, platform="tpu").devices
    except Exception as error:  # whatever the plugin raises
        raise ConfigError(f"target={name!r} is not a valid slice: {' '.join(str(error).split())}") from error
    return Target(name, tuple(devices), _DESCRIPTIONS["tpu"][kind]["memory"])


def _gpu(name, card, count):
    if not any(importlib.util.find_spec(plugin) for plugin in _GPU_PLUGINS):
        raise ConfigError(f"target={name!r} needs the compiler for NVIDIA's GPUs: pip install 'jaxrl[cuda13]'")
    description = _DESCRIPTIONS["gpu"][card]
    try:
        with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):  # else the plugin fails where there is no driver
            devices = topologies.get_topology_desc(
                card, platform="cuda", target_config=_GPU.format(**description), topology=f"1x1x{count}"
            ).devices
    except Exception as error:  # whatever the plugin raises
        raise ConfigError(
            f"target={name!r} cannot be compiled for: {' '.join(str(error).split())}; if this machine has no GPU, "
            "set JAX_PLATFORMS=cpu before JAX starts"
        ) from error
    return Target(name, tuple(devices), description["memory"])


@contextlib.contextmanager
def _environment(variables):
    """Set variables that are not set, and remove them afterwards: a device of this machine would start with them."""
    added = {variable: value for variable, value in variables.items() if variable not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
