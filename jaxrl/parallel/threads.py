"""The number of threads that XLA uses on a CPU: one, if no product is large enough to be divided.

XLA has a pool of as many threads as the process has cores. It splits matrix products between them, and runs kernels
that do not wait for each other concurrently. The cost of that does not depend on their size: products of a few hundred
rows and 64 units take less time. The pool is made when JAX starts, so all programs of a process share it; only a
process that ends after one run, such as that of `jaxrl train`, can choose its size. docs/performance.md has the gains.
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

VARIABLES = ("PJRT_NPROC", "NPROC")  # where XLA reads the number of threads, in this order
_WORTH_TWO_THREADS = 6_000_000  # operations of a product above which two were faster, measured on two cores


def requested() -> int | None:
    """Return the number of threads set by PJRT_NPROC or NPROC, or None."""
    for name in VARIABLES:
        with contextlib.suppress(ValueError):
            return max(0, int(os.environ.get(name, "")))
    return None


def one_suffices(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Return whether this run is faster with one thread, and the user has not set a number.

    Args:
      algo: as the user set it, not resolved.
      env, topology: the environment and topology of the run.
    """
    return requested() is None and jax.device_count() == 1 and one_is_faster(algo, env, topology)


def one_is_faster(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Return whether there are several cores, and no product of an iteration is worth a second one.

    Traces the iteration, and compiles nothing.

    Args:
      algo: as the user set it, not resolved.
      env, topology: the environment and topology of the run. For invalid settings, which training reports, the result
        is False.
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

    Arrays that were made before stay readable, and JAX copies them when they are passed to a program; arrays that are
    to stay on the device must be made again.
    """
    before = os.environ.get(VARIABLES[0])
    backend.clear_backends()
    data_mesh.cache_clear()  # the devices of its meshes no longer exist
    os.environ[VARIABLES[0]] = "1"
    try:
        jax.devices()
    finally:  # not for the processes that this one starts
        del os.environ[VARIABLES[0]]
        if before is not None:
            os.environ[VARIABLES[0]] = before


def largest_product(program: Jaxpr) -> int:
    """Return the operations of the largest matrix product or convolution in a program and its loops; 0: none."""
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
