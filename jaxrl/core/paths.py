"""Names of the leaves of trees."""

import collections
from typing import Any

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree


def named_leaves(tree: PyTree, separator: str = "/", root: str = "") -> dict[str, Any]:
    """Return the leaves of a tree, in order, each with its own name: "camera/depth".

    Keys are joined by `separator`. Leaves with equal joined names, as in {"a/b": x, "a": {"b": y}}, are named by their
    paths as printed by JAX, "['a/b']" and "['a']['b']"; all others have the short name, as in older files.

    Args:
      tree: any tree.
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
