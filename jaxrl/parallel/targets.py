"""Descriptions of accelerators, for compiling programs on machines without these accelerators."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import _jax
from jax.experimental import topologies

from jaxrl.core import files
from jaxrl.core.errors import ConfigError

_DESCRIPTIONS = json.loads(Path(__file__).with_name("accelerators.json").read_text())
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Without these variables, libtpu looks for TPUs on this machine, and waits for a server that describes them. Without
# the last one, only one process at a time may load libtpu.
_TPU_VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GPU_VARIABLES = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # otherwise the plugin fails without a driver
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core} threads_per_core_limit: {threads_per_core}
  core_count: {cores} fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_memory_per_block}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
# Pairs of XLA's name and jaxrl's name of a number, or XLA's name and the value if all supported cards have this value.
_NUMBERS = re.findall(r"(\w+): \{?(\w+)\}?", _GPU.partition("cuda_compute_capability")[0])
_FILE = re.compile(r"(?P<path>.+\.json)(:(?P<shape>[^/]*))?")  # in place of the name of an accelerator


@dataclasses.dataclass(frozen=True)
class Target:
    """Accelerators to compile for.

    Attributes:
      name: the argument of `get`, such as "v5e:4x4", "h100:8" or "card.json:8".
      devices: descriptions of the accelerators, on which programs cannot run.
      memory: bytes of memory of one device.
    """

    name: str
    devices: tuple[Any, ...]
    memory: int


def names() -> list[str]:
    """Return the pattern of target names for each kind of accelerator."""
    slices = [f"{kind}:{entry['slice']}" for kind, entry in _DESCRIPTIONS["tpu"].items()]
    return [*slices, *(f"{card}[:COUNT]" for card in (*_DESCRIPTIONS["gpu"], "FILE.json"))]


@functools.lru_cache
def get(name: str) -> Target:
    """Return the target with this name.

    Args:
      name: for TPUs, the kind and the shape of the slice, "v5e:4x4" or "v5p:2x2x1"; for GPUs, the card and, if not 1,
        the number of cards: "h100", "h100:8". The path of a file with a result of `describe` may replace the kind or
        the card: "card.json", "card.json:8".

    Raises:
      ConfigError: the name is unknown, the file is not a description, or the compiler is not installed.
    """
    if (file := _FILE.fullmatch(name)) is not None:
        (platform, kind, description), shape = _read(name, file["path"]), file["shape"] or ""
    else:
        kind, _, shape = name.partition(":")
        platform = next((platform for platform, kinds in _DESCRIPTIONS.items() if kind in kinds), "")
        description = _DESCRIPTIONS.get(platform, {}).get(kind)
    if platform == "tpu" and re.fullmatch(r"\d+(x\d+)+", shape):
        if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
            raise ConfigError(f"target={name!r} needs the compiler for TPUs: pip install 'jaxrl[tpu-target]'")
        hint = "use a slice that Google Cloud offers"
        return _compiled_for(name, description, hint, _TPU_VARIABLES, f"{kind}:{shape}", platform="tpu")
    if platform == "gpu" and re.fullmatch(r"([1-9]\d*)?", shape):
        if not any(importlib.util.find_spec(plugin) for plugin in _GPU_PLUGINS):
            raise ConfigError(f"target={name!r} needs the compiler for NVIDIA GPUs: pip install 'jaxrl[cuda13]'")
        hint = "if this machine has no GPU, set JAX_PLATFORMS=cpu before JAX starts"
        config = {"target_config": _GPU.format(**description), "topology": f"1x1x{shape or 1}"}
        return _compiled_for(name, description, hint, _GPU_VARIABLES, kind, platform="cuda", **config)
    raise ConfigError(f"target={name!r} is not a known accelerator; use one of {', '.join(names())}, such as v5e:4x4")


def describe(device: Any) -> dict[str, dict[str, Any]]:
    """Return the description of an accelerator of this machine, in the format of `accelerators.json`.

    For a GPU, the name comes from JAX, and XLA reads the other fields on the card. For a TPU, the memory is the part
    that JAX may use; the compiler knows all other properties.

    Args:
      device: one of `jax.local_devices()`.

    Raises:
      ConfigError: the device is a CPU, jaxrl cannot compile for its kind, or JAX does not report all fields.
    """
    kind = device.device_kind
    if device.platform == "gpu":
        card = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        return {"gpu": {card: {"source": _source("by XLA"), "name": kind} | _read_on_the_card(device)}}
    if device.platform == "tpu":
        name = next((name for name, entry in _DESCRIPTIONS["tpu"].items() if kind in entry["device_kinds"]), None)
        memory = (device.memory_stats() or {}).get("bytes_limit")
        if name is None or memory is None:
            known = ", ".join(names())
            raise ConfigError(f"{kind} cannot be described: its type or its memory is unknown; use one of {known}")
        return {"tpu": {name: _DESCRIPTIONS["tpu"][name] | {"memory": memory, "source": _source("by JAX")}}}
    raise ConfigError(f"there is no accelerator to describe: JAX has only CPUs here ({kind})")


def _source(reader):
    return f"read on the device {reader} (jaxrl doctor --describe-device, JAX {jax.__version__})"


def _read_on_the_card(device):
    """Return the fields of a GPU's description that XLA reads on the card."""
    cannot = f"{device.device_kind} cannot be described"
    try:
        text = str(_jax.get_topology_for_devices([device]).target_config)
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"{cannot}: JAX does not report what XLA read on it") from error
    found, values = {}, dict(re.findall(r"(\w+): (\S+)", text))
    for field, ours in _NUMBERS:
        if field not in values:
            raise ConfigError(f"{cannot}: XLA does not report its {field}")
        if not ours.isdigit():
            found[ours] = json.loads(values[field])
        elif values[field] != ours:
            raise ConfigError(f"{cannot}: its {field} is {values[field]}; jaxrl only compiles for cards with {ours}")
    capability = re.search(r"cuda_compute_capability\s*\{\s*major: (\d+)(?:\s+minor: (\d+))?", text)
    if capability is None:
        raise ConfigError(f"{cannot}: XLA does not report its cuda_compute_capability")
    return found | {"capability": [int(capability[1]), int(capability[2] or 0)]}


def _read(name, path):
    """Return the platform, the name and the description of the only accelerator in a file."""
    try:
        [(platform, kinds)] = files.read_json(files.expand(path)).items()
        [(kind, description)] = kinds.items()
        [known, *_] = _DESCRIPTIONS[platform].values()
        if description.keys() != known.keys() or not all(_is_like(description[field], known[field]) for field in known):
            raise ValueError(f"the fields must be {', '.join(known)}, and numbers must be positive")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"target={name!r}: {path} is not a description of one accelerator: {error}; write one with jaxrl doctor "
            "--describe-device --out FILE.json"
        ) from error
    return platform, kind, description


def _is_like(value, known):
    if isinstance(known, int | float):
        return isinstance(value, int | float) and value > 0
    return type(value) is type(known)


def _compiled_for(name, description, hint, variables, *topology, **settings):
    try:
        with _environment(variables):
            devices = topologies.get_topology_desc(*topology, **settings).devices
    except Exception as error:  # any error of the plugin
        raise ConfigError(f"cannot compile for target={name!r}: {' '.join(str(error).split())}; {hint}") from error
    return Target(name, tuple(devices), description["memory"])


@contextlib.contextmanager
def _environment(variables):
    """Set those of `variables` that are unset, and remove them afterwards, so that local devices start without them."""
    added = {variable: value for variable, value in variables.items() if variable not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]
