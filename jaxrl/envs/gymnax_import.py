"""The import of gymnax without the libraries that it only uses for drawing.

gymnax 1.0.1 imports matplotlib for the pictures of five environments, seaborn (and with it pandas and SciPy) for the
colors of one, and Gymnasium to convert spaces that jaxrl converts itself: nine tenths of the time of its import, for
functions that jaxrl never calls. Here the modules of gymnax get stand-ins for these libraries, which import them when
they are first used.

The stand-ins are names within gymnax's own modules: only their `import` statements find another `__import__`.
`sys.modules` never holds a stand-in, so other threads and the user's own imports see the libraries themselves. A
gymnax that was imported before is not changed.
"""

import builtins
import importlib.machinery
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

# The modules that gymnax's modules import, and the attributes that they read meanwhile, in annotations.
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
    """A stand-in for a module until one of its attributes is needed."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        return _Deferred(path) if path in _DEFERRED else getattr(pkgutil.resolve_name(self.__name__), name)


def _import(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name in _DEFERRED:
        return _Deferred(name if fromlist else name.partition(".")[0])
    return builtins.__import__(name, globals, locals, fromlist, level)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        # The `import` statement looks `__import__` up here.
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)


class _Finder:
    """A finder of gymnax's modules that has them executed by `_Loader`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "gymnax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        # Only this loader: modules that are compiled, zipped or loaded in another way are imported as usual.
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def import_gymnax() -> ModuleType:
    """Import gymnax, without its drawing libraries unless it was imported before."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        import gymnax
    finally:
        sys.meta_path.remove(finder)
    return gymnax
