"""Whether what is to be stored is what the storage was built for, leaf by leaf, with the leaf named if not."""

from typing import Any

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree


def problems(expected: PyTree, given: PyTree, leading: int = 0) -> list[str]:
    """What differs, one line a leaf; empty if nothing does.

    Args:
      expected: arrays or their shapes.
      given: likewise.
      leading: axes at the front whose lengths may differ.
    """
    wanted, found = _by_path(expected), _by_path(given)
    lines = []
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            lines.append(f"{path} is missing; expected {_described(wanted[path], leading)}")
        elif path not in wanted:
            lines.append(f"{path} is not expected; it is {_described(found[path], leading)}")
        elif _described(wanted[path], leading) != _described(found[path], leading):
            lines.append(f"{path} is {_described(found[path], leading)}; expected {_described(wanted[path], leading)}")
    return lines


def check(expected: PyTree, given: PyTree, what: str, leading: int = 0) -> None:
    """Raises if anything differs.

    Args:
      expected, given, leading: as in `problems`.
      what: is given, in words.

    Raises:
      ConfigError: with every leaf that differs.
    """
    lines = problems(expected, given, leading)
    if lines:
        raise ConfigError([f"{what}: {line}" for line in lines])


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _described(leaf: Any, leading: int) -> str:
    shape = ["..."] * min(leading, 1) + [str(n) for n in leaf.shape[leading:]]
    return f"{leaf.dtype}[{', '.join(shape)}]"
