"""Checks that replays and rollouts fit in memory, before anything is allocated."""

import math
from collections.abc import Mapping

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.run_state import RunState
from jaxrl.core.sources import Episodes, Replay
from jaxrl.core.types import Algorithm, PyTree

_HEADROOM = 0.9  # usable fraction of the free memory: the program around the replay needs some too


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
    """Return the bytes left on an accelerator; None if it does not report them, and on CPU, which uses the host's."""
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
    free: Mapping[str, int | None] | None = None,
) -> None:
    """Raise if the replays of a run's state, given as shapes, would not fit in memory.

    Args:
      algo: the algorithm, which has the sources.
      state: shapes, as from `jax.eval_shape`.
      devices: the devices of all processes, which share the replays evenly.
      runs: number of runs at once that have such replays, over all devices.
      saved: whether checkpoints will hold the replays: an asynchronous save keeps a copy on the host while it writes.
      free: bytes free on "host" and on each "device"; None: as they are now.

    Raises:
      ConfigError: with the bytes needed and free, and the capacity that would fit.
    """
    buffers, here = state.buffers, _here(devices)
    if not buffers:
        return
    sources = {name: source for name, source in algo.experience.items() if isinstance(source, Replay | Episodes)}
    if free is None:
        free = {"host": free_on_host(), "device": free_on_device(here[0])}
    on_cpu = here[0].platform == "cpu"
    on_host = [x for x in jax.tree.leaves(buffers) if x.sharding and x.sharding.memory_kind == "pinned_host"]
    needed, there = (size_of(x) * runs * len(here) // len(devices) for x in (buffers, on_host))
    copy = needed if saved else 0
    places = (
        [("this machine", needed + copy, free["host"])]
        if on_cpu
        else [
            (f"each of {len(devices)} devices", (needed - there) // len(here), free["device"]),
            ("the host", there + copy, free["host"]),
        ]
    )
    problems = []
    for place, bytes_needed, bytes_free in places:
        if bytes_free is None or bytes_needed <= bytes_free * _HEADROOM:
            continue
        share = 0.99 * bytes_free * _HEADROOM / bytes_needed  # the levels of sums round up
        fitting = ", ".join(
            f"{name}: {field}={math.floor(size * share)} (now {size})"
            for name, source in sources.items()
            for field, size in _size(source).items()
        )
        copied = saved and (on_cpu or place == "the host")
        replays = [source for source in sources.values() if isinstance(source, Replay)]
        in_rings = not on_cpu and runs == 1 and replays and all(source.storage == "ring" for source in replays)
        elsewhere = "; or replay_memory='host'" if in_rings and not on_host else ""
        held = "the replay" if replays else "the room for whole episodes"
        what = f"{held} and an asynchronous save's copy of it need" if copied else f"{held} needs"
        problems.append(
            f"{what} {readable(bytes_needed)} of {place}, where {readable(bytes_free)} are free; what would fit is "
            f"{fitting}" + (f"; or leave {held} out of checkpoints (save_replay=False)" if copied else elsewhere)
        )
    if problems:
        raise ConfigError(problems)


def _size(source):
    """Return the fields that limit how much a source stores, and their values; {} if it stores nothing itself."""
    if isinstance(source, Episodes):
        return {"max_episode_length": source.max_length, "rollout_length": source.length}
    return {"capacity": source.capacity} if source.over is None else {}


def rollout_problems(
    row_bytes: int, num_envs: int, rollout_length: int, devices: list[jax.Device], free: int | None = None
) -> list[str]:
    """Return reasons why `num_envs` x `rollout_length` rollouts do not fit; empty if they fit.

    Args:
      row_bytes: bytes of one step of one environment.
      num_envs: number of environments over all devices, which share them evenly.
      rollout_length: steps of each environment.
      devices: the devices of all processes together.
      free: free bytes of a device; None: as they are now.
    """
    what = f"rollouts of rollout_length={rollout_length} steps of num_envs={num_envs} environments"
    if num_envs * rollout_length >= 2**31:
        return [f"{what} have 2^31 steps or more; use fewer"]
    needed, free, _ = _share(row_bytes * num_envs * rollout_length, devices, free)
    if free is None or needed <= free * _HEADROOM:
        return []
    return [f"{what} need {readable(needed)}, where {readable(free)} are free; use fewer of either"]


def check_rings(made: PyTree, devices: list[jax.Device]) -> None:
    """Raise if rows in host memory do not fit on the devices that will share them evenly.

    Raises:
      ConfigError: with the bytes needed and free.
    """
    needed, free, place = _share(size_of(made), devices)
    if free is not None and needed > free * _HEADROOM:
        raise ConfigError(
            f"the dataset's rows need {readable(needed)} of {place}, where {readable(free)} are free; "
            "use a part of it, more devices, or more memory"
        )


def _here(devices):
    return [device for device in devices if device.process_index == jax.process_index()]


def _share(needed, devices, free=None):
    """Return the bytes of `needed`, divided over the devices, in the memory of one, those free there, and its name."""
    here = _here(devices)
    if here[0].platform == "cpu":
        return needed * len(here) // len(devices), free_on_host() if free is None else free, "this machine"
    free = free_on_device(here[0]) if free is None else free
    return needed // len(devices), free, f"each of {len(devices)} devices"


def readable(count: float) -> str:
    """Format a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
