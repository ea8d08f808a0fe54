"""How whole programs are compiled."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

_FLAG = "xla_backend_optimization_level"


def compiler_options() -> dict[str, int] | None:
    """Options of `jax.jit` for a whole program: on a CPU, LLVM's first level of optimization in place of its third.

    XLA has fused and vectorized before LLVM begins, so the third level runs no faster and takes up to twice as long to
    compile (docs/startup.md). A level in `XLA_FLAGS` is left as it is. This starts JAX's backend.
    """
    if jax.default_backend() != "cpu" or _FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return {_FLAG: 1}


class WholeProgram:
    """A function that is compiled with `compiler_options`, which are looked up at its first use.

    Args:
      function: what is compiled.
      options: of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self._function, compiler_options=compiler_options(), **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What else a jitted function has: `lower`, `eval_shape`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._jitted, name)


def whole_program(**options: Any) -> Callable[[Callable[..., Any]], WholeProgram]:
    """Decorates with `WholeProgram`."""
    return lambda function: WholeProgram(function, **options)
