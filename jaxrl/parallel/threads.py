"""The choice between one and several threads for XLA on a CPU, by the size of matrix products.

XLA's pool has one thread per core of the process. It divides matrix products between the threads, and runs independent
kernels concurrently. The overhead is the same for products of all sizes, and exceeds the computing time of small ones
(a few hundred rows and 64 units). The pool is created when JAX starts, and all programs of a process share it. So the
size of the pool can only be chosen in a process that ends after one run, such as `jaxrl train`. docs/performance.md has
measurements.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import jax
from jax.extend import backend
from jax.extend.core import Jaxpr, Literal, Var, jaxprs_in_params

from jaxrl.core import keys
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment, env_spec, num_agents
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.mesh import cores, data_mesh

VARIABLES = ("PJRT_NPROC", "NPROC")  # they set XLA's number of threads; XLA reads them in this order
_WORTH_TWO_THREADS = 6_000_000  # operations of a product above which two threads were faster, measured on two cores


def requested() -> int | None:
    """Return the number of threads set by PJRT_NPROC or NPROC, or None."""
    for name in VARIABLES:
        with contextlib.suppress(ValueError):
            return max(0, int(os.environ.get(name, "")))
    return None


def one_suffices(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Return whether this run is faster with one thread, and no number of threads was set by the user.

    Args:
      algo: the algorithm as set by the user, not resolved.
      env, topology: the environment and topology of the run.
    """
    return requested() is None and jax.device_count() == 1 and one_is_faster(algo, env, topology)


def one_is_faster(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Return whether there are several cores, but all products of an iteration are faster with one thread.

    This traces the iteration without compiling it.

    Args:
      algo: the algorithm as set by the user, not resolved.
      env, topology: the environment and topology of the run. The result is False for invalid settings, which training
        reports.
    """
    if jax.default_backend() != "cpu" or cores() == 1:
        return False
    try:
        topology = topology.resolve(algo, num_agents(env))
        algo = algo.resolve(env_spec(env), topology.num_envs or 0)
        program = topology.bind(algo, env)
    except ConfigError:
        return False
    state = jax.eval_shape(program.init, algo, env, keys.root_key(0))
    return largest_product(jax.make_jaxpr(program.iterate)(algo, env, state, 1.0).jaxpr) < _WORTH_TWO_THREADS


def restart_backend() -> None:
    """Restart JAX with one thread.

    Existing arrays stay readable, but JAX copies them whenever they are passed to a program. To avoid these copies,
    create the arrays again.
    """
    before = os.environ.get(VARIABLES[0])
    backend.clear_backends()
    data_mesh.cache_clear()  # the devices of its meshes no longer exist
    os.environ[VARIABLES[0]] = "1"
    try:
        jax.devices()
    finally:  # reset, so that child processes do not inherit it
        del os.environ[VARIABLES[0]]
        if before is not None:
            os.environ[VARIABLES[0]] = before


def largest_product(program: Jaxpr) -> int:
    """Return the operations of the largest matrix product or convolution in a program and its loops, or 0."""
    return max(_products(program), default=0)


def _products(program: Jaxpr) -> Iterator[int]:
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left = _shape(equation.invars[0])
            yield 2 * math.prod(_shape(equation.outvars[0])) * math.prod(left[axis] for axis in summed)
        elif equation.primitive.name == "conv_general_dilated":
            kernel, numbers = _shape(equation.invars[1]), equation.params["dimension_numbers"]
            one_output = math.prod(kernel) // kernel[numbers.rhs_spec[0]]  # the kernel without its output channels
            yield 2 * math.prod(_shape(equation.outvars[0])) * one_output
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
