"""Checks that replays and rollouts fit in memory, before anything is allocated."""

import math

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.run_state import RunState
from jaxrl.core.sources import Episodes, Replay
from jaxrl.core.types import Algorithm, PyTree
from jaxrl.parallel.targets import Target

_HEADROOM = 0.9  # usable fraction of the free memory; the program itself needs the remaining memory


def size_of(tree: PyTree) -> int:
    """Return the bytes of a tree of arrays or their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def free_on_host() -> int | None:
    """Return the bytes that are available on this machine; None if the system does not report them."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def free_on_device(device: jax.Device) -> int | None:
    """Return the free bytes of an accelerator; None if they are not reported, or for a CPU, which uses host memory."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_run(
    algo: Algorithm,
    state: RunState,
    devices: list[jax.Device],
    *,
    runs: int = 1,
    saved: bool = True,
    target: Target | None = None,
) -> None:
    """Check that the replays of a run's state, given as shapes, will fit in memory.

    Args:
      algo: the algorithm, which defines the sources.
      state: shapes, as from `jax.eval_shape`.
      devices: the devices of all processes, which share the replays evenly.
      runs: number of simultaneous runs with such replays, over all devices.
      saved: whether checkpoints will contain the replays; an asynchronous save keeps a copy on the host while writing.
      target: accelerators to compile for, without running on them; all of their memory counts as free, and the memory
        of their host is not checked.

    Raises:
      ConfigError: the replays do not fit; the error has the bytes needed and free, and the capacity that would fit.
    """
    if not state.buffers:
        return
    sources = {name: source for name, source in algo.experience.items() if isinstance(source, Replay | Episodes)}
    on_host = [x for x in jax.tree.leaves(state.buffers) if x.sharding and x.sharding.memory_kind == "pinned_host"]
    whole, there = size_of(state.buffers) * runs, size_of(on_host) * runs
    copy = whole if saved else 0
    on_cpu = devices[0].platform == "cpu"
    places = [_share(whole + copy if on_cpu else whole - there, devices, target)]
    if not on_cpu:
        host = (there + copy) * len(_here(devices)) // len(devices)
        places.append((host, free_on_host() if target is None else None, "the host"))
    problems = []
    for needed, free, place in places:
        if free is None or needed <= free * _HEADROOM:
            continue
        share = 0.99 * free * _HEADROOM / needed  # 0.99 because the levels of sum trees round up
        fitting = ", ".join(
            f"{name}: {field}={math.floor(size * share)} (now {size})"
            for name, source in sources.items()
            for field, size in _size(source).items()
        )
        copied = saved and (on_cpu or place == "the host")
        replays = [source for source in sources.values() if isinstance(source, Replay)]
        in_rings = not on_cpu and runs == 1 and replays and all(x.storage != "flashbax" for x in replays)
        elsewhere = "; or use storage='host'" if in_rings and not on_host else ""
        held = "the replay" if replays else "the buffer of whole episodes"
        what = f"{held} and its copy in an asynchronous save need" if copied else f"{held} needs"
        problems.append(
            f"{what} {readable(needed)} of {place}, where {readable(free)} are free; use at most {fitting}"
            + (f"; or leave {held} out of checkpoints (save_replay=False)" if copied else elsewhere)
        )
    if problems:
        raise ConfigError(problems)


def _size(source):
    """Return the fields that limit the size of a source's storage, with their values; {} without storage."""
    if isinstance(source, Episodes):
        return {"whole_episodes.max_length": source.max_length, "rollout_length": source.length}
    return {"capacity": source.capacity} if source.over is None else {}


def rollout_problems(
    row_bytes: int, num_envs: int, rollout_length: int, devices: list[jax.Device], target: Target | None = None
) -> list[str]:
    """Return reasons why `num_envs` x `rollout_length` rollouts do not fit in memory; empty if they fit.

    Args:
      row_bytes: bytes of one step of one environment.
      num_envs: number of environments over all devices, which share them evenly.
      rollout_length: number of steps of each environment.
      devices: the devices of all processes.
      target: accelerators to compile for, without running on them; all of their memory counts as free.
    """
    what = f"rollouts of rollout_length={rollout_length} steps in num_envs={num_envs} environments"
    if num_envs * rollout_length >= 2**31:
        return [f"{what} have 2^31 steps or more; reduce rollout_length or num_envs"]
    return _problems(what, "reduce rollout_length or num_envs", row_bytes * num_envs * rollout_length, devices, target)


def check_rings(made: PyTree, devices: list[jax.Device]) -> None:
    """Check that rows in host memory will fit on the devices, which share them evenly.

    Raises:
      ConfigError: the rows do not fit; the error has the bytes needed and free.
    """
    remedy = "use part of the dataset, more devices, or more memory"
    if problems := _problems("the dataset's rows", remedy, size_of(made), devices):
        raise ConfigError(problems)


def _problems(what, remedy, needed, devices, target=None):
    needed, free, place = _share(needed, devices, target)
    if free is None or needed <= free * _HEADROOM:
        return []
    return [f"{what} need {readable(needed)} of {place}, where {readable(free)} are free; {remedy}"]


def _here(devices):
    return [device for device in devices if device.process_index == jax.process_index()]


def _share(needed, devices, target):
    """Divide `needed` bytes over the memories of the devices; return one memory's needed bytes, free bytes and name."""
    if devices[0].platform == "cpu":
        return needed * len(_here(devices)) // len(devices), free_on_host(), "this machine"
    free = free_on_device(_here(devices)[0]) if target is None else target.memory
    return needed // len(devices), free, f"each of {len(devices)} devices"


def readable(count: float) -> str:
    """Format a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
