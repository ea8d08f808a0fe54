"""Transfer of the rows of recorded environments from the devices to the host."""

import jax
import numpy as np

from jaxrl.core.recorded import Recorded
from jaxrl.core.types import Trajectory


def from_mesh(rows: Trajectory, recorded: Recorded, devices: int, length: int) -> Trajectory:
    """Return this process's first `length` rows, `[length, E, ...]`, from padded rows `[E, time, ...]` on `devices`."""
    real = recorded.columns(devices)[1]
    real = np.split(real, jax.process_count())[jax.process_index()].ravel()
    pick = slice(None) if real.all() else real

    def one(x):
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        parts = [np.asarray(shard.data) for shard in shards]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.swapaxes(whole[pick, :length], 0, 1)

    return jax.tree.map(one, rows)


def from_rollouts(rows: list[list[Trajectory]]) -> Trajectory:
    """Join rollouts along time, each of them the rows of every group's recorded environments."""
    wide = [jax.tree.map(lambda *x: np.concatenate(x, axis=1), *groups) for groups in jax.device_get(rows)]
    return jax.tree.map(lambda *x: np.concatenate(x), *wide)
