"""A check that JAX has a device."""

import os

import jax


def device_problem() -> str | None:
    """Return why JAX has no device, in one line, or None if it has one. Start JAX if necessary."""
    try:
        jax.devices()
    except Exception as error:  # an empty AssertionError if JAX_PLATFORMS is a platform that is not installed
        platforms = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        said = " ".join(str(error).split())
        return (
            f"JAX has no device of JAX_PLATFORMS={platforms!s}{': ' if said else ''}{said:.300}; unset it to use "
            "the available devices, or install the missing packages, for NVIDIA GPUs: pip install 'jaxrl[cuda13]'"
        )
    return None
