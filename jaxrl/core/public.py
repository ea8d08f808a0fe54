"""Names of a module for tab completion."""

import types
from collections.abc import Mapping
from typing import Any


def names(module: Mapping[str, Any]) -> list[str]:
    """Return the public names that a module defines, sorted; `module` is its `globals()`."""
    name = module["__name__"]
    return sorted(
        key
        for key, value in module.items()
        if not key.startswith("_") and (isinstance(value, types.UnionType) or getattr(value, "__module__", "") == name)
    )
