"""Names of the leaves of pytrees, and short summaries of pytrees for reprs."""

import collections
import math
from typing import Any

import jax
import numpy as np
from rich import filesize

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree


def named_leaves(tree: PyTree, separator: str = "/", root: str = "") -> dict[str, Any]:
    """Return the leaves of a tree, in order, by unique names such as "camera/depth".

    Keys are joined by `separator`. Leaves with equal joined names, as in {"a/b": x, "a": {"b": y}}, are named by their
    paths as printed by JAX, "['a/b']" and "['a']['b']"; all other leaves have the short name, as in older files.

    Args:
      tree: any pytree.
      separator: separator between keys.
      root: name of the leaf if the tree is a single leaf.

    Raises:
      ConfigError: two names are still equal, because a key is spelled like a printed path.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    joined = [jax.tree_util.keystr(path, simple=True, separator=separator) or root for path in paths]
    uses, named = collections.Counter(joined), {}
    for path, name, leaf in zip(paths, joined, jax.tree.leaves(tree), strict=True):
        name = jax.tree_util.keystr(path) if uses[name] > 1 else name
        if name in named:
            raise ConfigError(f"two leaves have the name {name}; rename a field or dictionary key")
        named[name] = leaf
    return named


def tree_summary(tree: Any) -> str:
    """Return the number of arrays in a pytree and their size: "35 arrays, 1.2 MB"."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))]
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    return f"{len(leaves)} arrays, {filesize.decimal(sum(sizes))}"
