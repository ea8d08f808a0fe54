"""Selection of the environments that a run records, and of the rows to transfer from the devices per chunk."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxrl.core.types import Trajectory

CHUNK_BYTES = 1 << 26  # target size of the recorded rows per chunk

# Function that returns the rows of a chunk on the host (numpy `[T, E, ...]`, for the environments `Recorded.here`) and
# the version of the acting policy at each time `[T]`, which is the number of iterations that it had learned from. It
# may be called in any thread.
Fetch = Callable[[], tuple[Trajectory, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Environments whose rows are transferred from the devices after every chunk; a static argument of programs.

    Attributes:
      num_envs: number of environments over all devices and processes.
      env_index: indices of the recorded environments, ascending.
      iterations: maximum iterations per chunk, to bound the memory of its rows.
    """

    num_envs: int
    env_index: tuple[int, ...]
    iterations: int

    @classmethod
    def every(cls, every: int, num_envs: int, iteration_bytes: int) -> "Recorded":
        """Select about one in `every` environments, evenly spaced, at least one per process; all if there are fewer.

        Args:
          every: record one in `every` episodes.
          num_envs: number of environments over all devices and processes.
          iteration_bytes: size in bytes of one environment's rows in one iteration.
        """
        count = max(jax.process_count(), round(num_envs / every)) if num_envs >= every else num_envs
        env_index = tuple(number * num_envs // count for number in range(count))
        return cls(num_envs, env_index, max(1, CHUNK_BYTES // (iteration_bytes * count)))

    @property
    def here(self) -> tuple[int, ...]:
        """The indices of the recorded environments of this process."""
        block, process = self.num_envs // jax.process_count(), jax.process_index()
        return tuple(index for index in self.env_index if index // block == process)

    def within(self, first: int, count: int) -> list[int]:
        """Return the offsets of recorded environments among the `count` environments from `first` on."""
        return [index - first for index in self.env_index if first <= index < first + count]

    def columns(self, devices: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the recorded columns of each device, int32 `[devices, m]`, and a mask that is False at padding."""
        block = self.num_envs // devices
        each = [self.within(device * block, block) for device in range(devices)]
        columns = np.zeros((devices, max(map(len, each))), np.int32)
        real = np.zeros(columns.shape, np.bool_)
        for device, places in enumerate(each):
            columns[device, : len(places)], real[device, : len(places)] = places, True
        return columns, real
