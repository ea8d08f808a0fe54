"""Versions of installed packages. Nothing here imports JAX."""

from importlib import metadata


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None: jaxrl also runs from a folder that was never installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
