"""Packing of scalars into few arrays, because XLA's loops start a kernel for every array that they carry or store."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree

_TYPES = {32: jnp.uint32, 8: jnp.uint8}  # by the number of bits of an element


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of a tree's leaves `[B]` in arrays `[K, B]`, one of 32-bit elements and one of 8-bit elements.

    Elements are packed as raw bits, so packing cannot be differentiated. Other leaves are unchanged: leaves of another
    shape (packing observations made PPO slower on CPUs, because matrix products read them transposed), leaves with 16
    or 64 bits per element, random keys, and weakly typed leaves, which a loop may promote.

    Args:
      structure: the structure of the tree.
      avals: shapes and types of the leaves, by path.
      groups: indices of the leaves in each packed array, in order, by the number of bits of an element.
    """

    structure: jax.tree_util.PyTreeDef
    avals: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    groups: dict[int, list[int]]

    @classmethod
    def of(cls, tree: PyTree, batch: int) -> Self:
        """Return the packing for trees with the structure, shapes and dtypes of `tree`; B is `batch`."""
        groups: dict[int, list[int]] = {}
        avals = []
        for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
            leaf = jax.typeof(leaf)
            avals.append((jax.tree_util.keystr(path), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.weak_type or leaf.shape != (batch,):
                continue
            if (bits := jax.dtypes.itemsize_bits(leaf.dtype)) in _TYPES:
                groups.setdefault(bits, []).append(number)
        return cls(jax.tree.structure(tree), tuple(avals), groups)

    def pack(self, tree: PyTree) -> list[jax.Array]:
        """Return the packed arrays `[K, B]`, followed by the unchanged leaves.

        Raises:
          ConfigError: leaves differ from the packing in shape or type; the message names them.
        """
        leaves = self.structure.flatten_up_to(tree)
        packed = {number for numbers in self.groups.values() for number in numbers}
        changed = [
            f"{path} was {aval.dtype}{list(aval.shape)} but is now {leaves[n].dtype}{list(leaves[n].shape)}"
            for n, (path, aval) in enumerate(self.avals)
            if n in packed and (leaves[n].shape, leaves[n].dtype) != (aval.shape, aval.dtype)
        ]
        if changed:
            raise ConfigError([f"shapes and dtypes must not change from step to step: {one}" for one in changed])
        rows = [jnp.stack([_bits(leaves[n], _TYPES[bits]) for n in numbers]) for bits, numbers in self.groups.items()]
        return rows + [leaf for n, leaf in enumerate(leaves) if n not in packed]

    def unpack(self, packed: Sequence[jax.Array]) -> PyTree:
        """Return the tree, with leaves `[..., B, ...]`, that was packed into arrays `[..., K, B]`."""
        rows, others = packed[: len(self.groups)], iter(packed[len(self.groups) :])
        found = {
            n: _from_bits(row[..., k, :], self.avals[n][1].dtype)
            for row, numbers in zip(rows, self.groups.values(), strict=True)
            for k, n in enumerate(numbers)
        }
        return self.structure.unflatten([found[n] if n in found else next(others) for n in range(len(self.avals))])


def _bits(x, dtype):
    return x.astype(dtype) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, dtype)


def _from_bits(x, dtype):
    return x != 0 if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, dtype)
