"""The implementations of `jaxrl.core.types.Replicas` that topologies pass to `update`: one device, or a mesh."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.core.types import PyTree


@dataclasses.dataclass(frozen=True)
class SingleReplica:
    """A single device that has all logical shards; all reductions return their argument unchanged.

    Args:
      shards: number of logical shards.
      platform: the platform of the device.
    """

    shards: int = 1
    platform: str = "cpu"

    @property
    def devices(self) -> int:
        return 1

    @property
    def first_shard(self) -> int:
        return 0

    def mean(self, tree: PyTree) -> PyTree:
        return tree

    def sum(self, tree: PyTree) -> PyTree:
        return tree

    def max(self, tree: PyTree) -> PyTree:
        return tree

    def any(self, flag: jax.Array) -> jax.Array:
        return flag


@dataclasses.dataclass(frozen=True)
class MeshReplicas:
    """The devices along a mesh axis, for use within `jax.shard_map(..., check_vma=False)`.

    Average gradients, never losses. Keep `check_vma=False`: with its default, True, differentiation with respect to
    replicated parameters already sums over devices, so `mean` of a gradient would silently be n times too large.

    Args:
      axis_name: name of the axis, or names of several axes.
      shards: number of logical shards on each device, numbered by the device's position along the axis.
      platform: the platform of the devices.
    """

    axis_name: str | tuple[str, ...]
    shards: int = 1
    platform: str = "cpu"

    @property
    def devices(self) -> int:
        return jax.lax.axis_size(self.axis_name)

    @property
    def first_shard(self) -> jax.Array:
        return jax.lax.axis_index(self.axis_name) * self.shards

    def mean(self, tree: PyTree) -> PyTree:
        return jax.lax.pmean(tree, self.axis_name)

    def sum(self, tree: PyTree) -> PyTree:
        return jax.lax.psum(tree, self.axis_name)

    def max(self, tree: PyTree) -> PyTree:
        return jax.lax.pmax(tree, self.axis_name)

    def any(self, flag: jax.Array) -> jax.Array:
        return jax.lax.pmax(flag.astype(jnp.int32), self.axis_name) > 0
