"""The threads that XLA computes with on a CPU: one, where no product is large enough to be shared out.

XLA has a pool of as many threads as the process has cores. It splits matrix products between them, and runs kernels
that do not wait for each other side by side. What that costs does not depend on their size: products of a few hundred
rows and 64 units take less. The pool is made when JAX starts, so it is one for all programs of a process; only a
process that does one run and ends, as that of `jaxrl train`, can choose it. docs/performance.md says what it gains.
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

VARIABLES = ("PJRT_NPROC", "NPROC")  # what XLA reads the number of threads from, in the order that it asks
_WORTH_TWO_THREADS = 6_000_000  # operations of a product from which two were faster, measured on two cores


def requested() -> int | None:
    """The number of threads that the environment's variables ask XLA for; None where they do not."""
    for name in VARIABLES:
        with contextlib.suppress(ValueError):
            return max(0, int(os.environ.get(name, "")))
    return None


def one_suffices(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Whether this run is faster with one thread, and nobody has said how many there should be.

    Args:
      algo: as it was asked for, not resolved yet.
      env, topology: where it runs.
    """
    return requested() is None and jax.device_count() == 1 and one_is_faster(algo, env, topology)


def one_is_faster(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Whether there are several cores, and no product of an iteration is worth a second one.

    Traces the iteration, and compiles nothing.

    Args:
      algo: as it was asked for, not resolved yet.
      env, topology: where it runs. False for settings that do not fit, which training tells.
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
    """Starts JAX anew with one thread.

    Arrays that were made before stay readable, and JAX copies them where they go into a program; what is to lie on the
    device must be made anew.
    """
    before = os.environ.get(VARIABLES[0])
    backend.clear_backends()
    data_mesh.cache_clear()  # its meshes are of devices that are gone
    os.environ[VARIABLES[0]] = "1"
    try:
        jax.devices()
    finally:  # it is not for the processes that this one starts
        del os.environ[VARIABLES[0]]
        if before is not None:
            os.environ[VARIABLES[0]] = before


def largest_product(program: Jaxpr) -> int:
    """Operations of the largest matrix product or convolution in a program, those of its loops included; 0: none."""
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
