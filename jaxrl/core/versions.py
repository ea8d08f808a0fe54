"""Versions of installed packages, without importing JAX."""

import sys
from importlib import metadata


def own_version() -> str:
    """Return the version of the running jaxrl, installed or not."""
    return sys.modules[__name__.partition(".")[0]].__version__


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None; jaxrl also runs without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
