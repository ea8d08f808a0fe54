"""Checks that trees to be stored match, leaf by leaf, the trees that the storage was built for."""

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree


def problems(expected: PyTree, actual: PyTree, leading: int = 0) -> list[str]:
    """Return the differences between two trees, one line per leaf; empty if there are none.

    Args:
      expected: arrays or their shapes.
      actual: arrays or their shapes.
      leading: number of leading axes whose lengths may differ.
    """
    required, found = (_by_path(tree, leading) for tree in (expected, actual))
    return [
        f"{path} is {found.get(path, 'missing')}; expected {required.get(path, 'nothing')}"
        for path in sorted(required.keys() | found.keys())
        if required.get(path) != found.get(path)
    ]


def check(expected: PyTree, actual: PyTree, what: str, leading: int = 0) -> None:
    """Raise an error if two trees differ.

    Args:
      expected, actual, leading: as in `problems`.
      what: name of `actual` in the error.

    Raises:
      ConfigError: the trees differ; the message lists every leaf that does.
    """
    lines = problems(expected, actual, leading)
    if lines:
        raise ConfigError([f"{what}: {line}" for line in lines])


def _by_path(tree: PyTree, leading: int) -> dict[str, str]:
    """Return the type and shape of each leaf of a tree, by its path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        shape = ["..."] * min(leading, 1) + [str(n) for n in leaf.shape[leading:]]
        found[jax.tree_util.keystr(path).lstrip(".")] = f"{leaf.dtype}[{', '.join(shape)}]"
    return found
