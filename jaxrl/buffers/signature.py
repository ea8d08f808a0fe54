"""Checks that trees to be stored match, leaf by leaf, the trees that the storage was built for."""

from typing import Any

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree


def problems(expected: PyTree, actual: PyTree, leading: int = 0) -> list[str]:
    """Return the differences between two trees, one line per leaf; empty if there are none.

    Args:
      expected: arrays or their shapes.
      actual: likewise.
      leading: number of leading axes whose lengths may differ.
    """
    required, found = _by_path(expected), _by_path(actual)
    lines = []
    for path in sorted(required.keys() | found.keys()):
        if path not in found:
            lines.append(f"{path} is missing; expected {_described(required[path], leading)}")
        elif path not in required:
            lines.append(f"{path} is not expected; it is {_described(found[path], leading)}")
        elif _described(required[path], leading) != _described(found[path], leading):
            lines.append(
                f"{path} is {_described(found[path], leading)}; expected {_described(required[path], leading)}"
            )
    return lines


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


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _described(leaf: Any, leading: int) -> str:
    shape = ["..."] * min(leading, 1) + [str(n) for n in leaf.shape[leading:]]
    return f"{leaf.dtype}[{', '.join(shape)}]"
