"""Devices and processes: the one mesh that everything runs on, and the layout of environments over it."""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from jaxrl.errors import ConfigError
from jaxrl.parallel.rollout import source_problems
from jaxrl.types import Algorithm, EnvSpec

_DEFAULT_SHARDS = (8, 4, 2, 1)


def local_device_count() -> int:
    """How many devices a run uses unless told: every accelerator, or one CPU device."""
    return 1 if jax.default_backend() == "cpu" else jax.local_device_count()


@lru_cache
def data_mesh(devices: int) -> jax.sharding.Mesh:
    """The first `devices` devices of this process as one axis named "data"."""
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:devices]
    )


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cpu_devices(count: int) -> bool:
    """Splits the CPU into `count` devices, if JAX has not started yet; whether it now has that many."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return jax.default_backend() == "cpu" and jax.local_device_count() >= count
    return True


def checked_layout(algo: Algorithm, spec: EnvSpec, num_envs: int, devices: int, shards: int | None) -> int:
    """The number of logical shards, after checking that everything divides.

    Args:
      algo, spec: what runs where.
      num_envs: environments over all devices.
      devices: devices asked for.
      shards: asked for, or None for the largest of 8, 4, 2, 1 that works.

    Raises:
      ConfigError: with every problem found.
    """
    problems = []
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs} must be at least 1")
    here = jax.local_device_count()
    if not 1 <= devices <= here:
        problems.append(f"devices={devices} must be between 1 and the {here} that this process has")
    elif num_envs % devices:
        below, above = num_envs // devices * devices, -(-num_envs // devices) * devices
        allowed = f"{below} or {above}" if below else f"{above}"
        problems.append(f"num_envs={num_envs} does not divide over {devices} devices; use {allowed}")
    if shards is not None:
        if shards < 1 or num_envs % shards:
            problems.append(f"shards={shards} must divide num_envs={num_envs}")
        elif shards % devices:
            problems.append(f"shards={shards} must be a multiple of devices={devices}")
    if problems:
        raise ConfigError(problems + algo.validate(spec, num_envs, shards or 1))

    candidates = [shards] if shards else sorted({*_DEFAULT_SHARDS, devices}, reverse=True)
    first_problems = None
    for candidate in candidates:
        if num_envs % candidate or candidate % devices:
            continue
        found = algo.validate(spec, num_envs, candidate) + source_problems(algo, num_envs, candidate)
        if not found:
            return candidate
        first_problems = found
    raise ConfigError(first_problems or [f"num_envs={num_envs} does not divide over {devices} devices"])


def over_devices(function: Callable, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` of `function`, with `check_vma=False`: gradients are averaged by hand, see `MeshReplicas`.

    The function is compiled for itself within (`jax.jit`), so that the arrays it closes over, of which brax's
    environments have over a hundred, stay its own. As inputs of the map they crash XLA's Shardy partitioner (jaxlib
    0.11.2: a null operand in ManualComputationUnusedInputsPattern). GSPMD, the partitioner before, is no way out: it
    aborts on a sort in there.

    Args:
      function: of one device's share of the arguments; may use collectives over the mesh's axes.
      mesh: its axes are all manual within `function`.
      in_specs: a tuple of partition specs, or prefix trees of them, one an argument.
      out_specs: likewise of the result.
    """
    return jax.shard_map(jax.jit(function), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
