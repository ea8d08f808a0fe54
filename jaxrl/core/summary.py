"""Short summaries of pytrees, for reprs."""

import math
from typing import Any

import jax
import numpy as np


def tree_summary(tree: Any) -> str:
    """Return the number of arrays in a pytree and their size: "35 arrays, 1.2 MB"."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))]
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    return f"{len(leaves)} arrays, {byte_size(sum(sizes))}"


def byte_size(count: int) -> str:
    """Format a number of bytes: "512 B", "1.2 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
