"""Import of gymnax without the libraries that it only uses for drawing and for Gymnasium's spaces.

gymnax 1.0.1 imports matplotlib for the pictures of five environments, seaborn (and with it pandas and SciPy) for the
colors of one, and Gymnasium to convert spaces that jaxrl converts itself. These libraries take nine tenths of gymnax's
import time, for functions that jaxrl never calls. So gymnax's modules get stand-ins, which import the libraries at
first use.

Only `import` statements in gymnax's modules return stand-ins, and only while gymnax is being imported. Stand-ins are
never in `sys.modules`, so other threads and the user's imports get the real libraries. If gymnax was already imported,
nothing changes.
"""

import builtins
import pkgutil
from types import ModuleType
from typing import Any

# The modules that gymnax's modules import, and attributes that annotations read during the import.
_DEFERRED = frozenset(
    {
        "gymnasium",
        "gymnasium.spaces",
        "gymnasium.spaces.Space",
        "matplotlib",
        "matplotlib.colors",
        "matplotlib.pyplot",
        "seaborn",
    }
)


class _Deferred(ModuleType):
    """A stand-in for a module, which imports the module when one of its attributes is first needed."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        return _Deferred(path) if path in _DEFERRED else getattr(pkgutil.resolve_name(self.__name__), name)


def import_gymnax() -> ModuleType:
    """Import and return gymnax; matplotlib, seaborn and Gymnasium are only imported when gymnax first uses them."""
    usual = builtins.__import__

    def deferring(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        importer = (globals or {}).get("__name__", "")
        if name in _DEFERRED and level == 0 and importer.partition(".")[0] == "gymnax":
            return _Deferred(name if fromlist else name.partition(".")[0])
        return usual(name, globals, locals, fromlist, level)

    # The type checker expects exactly the type of the built-in function.
    builtins.__import__ = deferring  # ty: ignore[invalid-assignment]
    try:
        import gymnax
    finally:
        if builtins.__import__ is deferring:
            builtins.__import__ = usual
    return gymnax
