"""The threads that XLA computes with on a CPU: one, where no product is large enough to be shared out.

XLA has a pool of as many threads as the process has cores, and hands matrix products, and whatever else is ready beside
one, to another thread. What that costs does not depend on their size: products of a few hundred rows and 64 units take
less. The pool is made when JAX starts, so it is one for all programs of a process; only a process that is there for one
run, as that of `jaxrl train`, can choose it. docs/performance.md says what it gains.
"""

import math
import os
from collections.abc import Iterator

import jax
from jax.extend import backend
from jax.extend.core import Jaxpr, Literal, Var, jaxprs_in_params

from jaxrl.core import keys
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Algorithm, Environment, env_spec
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.mesh import cores

VARIABLES = ("PJRT_NPROC", "NPROC")  # what XLA reads the number of threads from, the first first
_SHARED_OUT = 6_000_000  # operations of a product from which two threads were faster


def one_suffices(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Whether this run is faster with one thread, and nobody has said how many there should be.

    Args:
      algo: as it was asked for, not resolved yet.
      env, topology: where it runs.
    """
    if any(name in os.environ for name in VARIABLES) or cores() == 1:
        return False
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return False
    return products_are_small(algo, env, topology)


def products_are_small(algo: Algorithm, env: Environment, topology: Anakin) -> bool:
    """Whether no product of an iteration is worth a second thread. Traces the iteration, and compiles nothing.

    Args:
      algo: as it was asked for, not resolved yet.
      env, topology: where it runs. False for settings that do not fit, which training tells, and for brax: its physics
        are thousands of kernels beside any products, one thread or two take the same time, and to trace them seconds.
    """
    if env.name.startswith("brax:"):
        return False
    try:
        topology = topology.resolve(algo)
        algo = algo.resolve(env_spec(env), topology.num_envs or 0)
        program = topology.bind(algo, env)
    except ConfigError:
        return False
    state = jax.eval_shape(program.init, algo, env, keys.root_key(0))
    return largest_product(jax.make_jaxpr(program.iterate)(algo, env, state, 1.0).jaxpr) < _SHARED_OUT


def start_again_with_one() -> None:
    """Starts JAX anew with one thread. Arrays that were made before must not be used any more."""
    backend.clear_backends()
    os.environ[VARIABLES[0]] = "1"
    try:
        jax.devices()
    finally:
        del os.environ[VARIABLES[0]]  # it is not for the processes that this one starts


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
