"""XLA flags that make the results of GPU programs reproducible; they must be set before JAX starts.

When XLA compiles for a GPU, it times several kernels for each product or convolution and chooses the fastest, which may
differ from one compilation to the next. Also, some kernels add numbers in the order in which their threads finish.
Neither is the case on CPUs and TPUs.
"""

import os

import jax
from jax._src import xla_bridge

from jaxrl.core.errors import ConfigError

# The flags, each with the required value, followed by other spellings of this value.
_FLAGS = {"--xla_gpu_deterministic_ops": ("true", "1", ""), "--xla_gpu_autotune_level": ("0",)}
_VARIABLE = "XLA_FLAGS"


def set_flags() -> None:
    """Add the flags to XLA_FLAGS before JAX starts; do nothing if they are set already, or if JAX runs without a GPU.

    Raises:
      ConfigError: XLA_FLAGS sets them to other values, or JAX has started on a GPU without them.
    """
    text = os.environ.get(_VARIABLE, "")
    words = text.split()
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"deterministic=True: {_VARIABLE}={text!r} names a file, and flags cannot be added to a file; set the "
            "variable to the flags in the file instead"
        )
    present = {name: value for name, _, value in (word.partition("=") for word in words)}
    ours = [name for name in _FLAGS if name in present]
    wrong = [f"{name}={present[name]}" for name in ours if present[name].lower() not in _FLAGS[name]]
    if wrong:
        raise ConfigError(
            f"deterministic=True needs {_joined(_FLAGS)}, but {_VARIABLE} has {' '.join(wrong)}; remove the flag"
        )
    missing = _joined(name for name in _FLAGS if name not in present)
    if not missing:
        return
    if not xla_bridge.backends_are_initialized():
        os.environ[_VARIABLE] = f"{text} {missing}".strip()
    elif jax.default_backend() == "gpu":
        raise ConfigError(
            f"deterministic=True: JAX was started on a GPU without the necessary flags; set {_VARIABLE}="
            f"'{_joined(_FLAGS)}' before JAX starts, or use jaxrl train --deterministic"
        )


def _joined(names):
    return " ".join(f"{name}={_FLAGS[name][0]}" for name in names)
