"""A user's own network, in Flax NNX, Flax Linen or Equinox, as the pure functions that algorithms call.

The user's module knows nothing of time or of distributions. Feed-forward, it maps a batch of observations
`[N, *shape]` (Equinox: one observation, as is the custom there) to its outputs; recurrent, it maps observations and a
carry `[N, ...]` to outputs and the next carry, and the adapter unrolls it and resets the carry where episodes begin.

Outputs are action values `[N, n]` with `outputs="q"`, else a pair of what the policy needs and the value `[N]`
or `[N, 1]`. The policy needs logits for discrete actions, `[N, n]`, or `[N, sum(nvec)]`; for boxes a pair of mean
`[N, n]` and logarithm of the standard deviation, `[N, n]` or `[n]`.

Observations arrive as the environment gives them: uint8 pixels are not scaled. Foreign code runs under JAX's standard
promotion rules.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import spaces
from jaxrl.errors import ConfigError, unknown
from jaxrl.networks.actor_critic import PolicyValue
from jaxrl.networks.cores import unroll
from jaxrl.networks.heads import action_size, mask_values, to_distribution
from jaxrl.types import Carry, EnvSpec, Params, PyTree, TimeStep

OUTPUTS = ("actor_critic", "q")


class Library(Protocol):
    """How one library makes parameters and calls a module with them; frozen and hashable."""

    def init(self, key: jax.Array, spec: EnvSpec, example: tuple) -> PyTree: ...
    def call(self, params: PyTree, spec: EnvSpec, arguments: tuple) -> Any: ...


@dataclasses.dataclass(frozen=True)
class ForeignNetwork:
    """A network of a user's own module; made by `from_nnx`, `from_linen` and `from_equinox`.

    Parameters are a dict with the one key "policy", whatever the module computes with them.

    Args:
      library: how to make and call the module.
      outputs: what it gives, "actor_critic" or "q".
      carry: for recurrent modules, a function of no arguments that gives the initial carry, no batch axis; or None.
      continuous: over boxes, "gaussian" (unbounded) or "tanh" (squashed into the bounds).
    """

    library: Library
    outputs: str = "actor_critic"
    carry: Callable[[], Carry] | None = None
    continuous: str = "gaussian"

    @property
    def recurrent(self) -> bool:
        """Whether there is a carry."""
        return self.carry is not None

    def init(self, key: jax.Array, spec: EnvSpec) -> Params:
        """Fresh parameters.

        Raises:
          ConfigError: if the module's outputs do not fit the action space, or it holds state besides parameters.
        """
        if self.outputs not in OUTPUTS:
            raise unknown("kind of outputs", str(self.outputs), OUTPUTS)
        action_size(spec.action_space, self.continuous)
        if self.outputs == "q" and not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"outputs='q' needs a Discrete action space, not {spec.action_space}")
        example = jax.tree.map(lambda x: x[None], (spaces.zeros(spec.observation_space), self.initial_carry(spec)))
        with _standard_rules():
            params = {"policy": self.library.init(key, spec, example if self.recurrent else example[:1])}
        jax.eval_shape(lambda params: self._outputs(params, *example, None, spec), params)  # checks the shapes
        return params

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """The recurrent state of one environment; `()` if feed-forward."""
        return () if self.carry is None else self.carry()

    def apply(
        self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec, key: jax.Array | None = None
    ) -> tuple[Any, Carry]:
        """`PolicyValue`, or action values `[T, B, n]`, of moments `[T, B, ...]`, and the carry after the last."""
        observation, mask, first = timesteps.observation, timesteps.action_mask, timesteps.first
        if not self.recurrent:
            merged = jax.tree.map(_merge_time, (observation, mask))
            output, _ = self._outputs(params, merged[0], carry, merged[1], spec)
            return jax.tree.map(lambda x: x.reshape(first.shape + x.shape[1:]), output), carry

        def step(carry, moment):
            observation, mask = moment
            output, carry = self._outputs(params, observation, carry, mask, spec)
            return carry, output

        return unroll(step, carry, (observation, mask), first, self.initial_carry(spec))

    def value(self, params: Params, timesteps: TimeStep, carry: Carry, *, spec: EnvSpec) -> jax.Array:
        """Only the values `[T, B]`."""
        return self.apply(params, timesteps, carry, spec=spec)[0].value

    def _outputs(self, params, observation, carry, mask, spec):
        """Of one batch `[N, ...]`: the outputs as algorithms know them, and the next carry."""
        arguments = (observation, carry) if self.recurrent else (observation,)
        with _standard_rules():
            output = self.library.call(params["policy"], spec, arguments)
        if self.recurrent:
            output, carry = output
        if self.outputs == "q":
            return mask_values(_checked("action values", output, spec.action_space.n), mask), carry
        policy, value = _pair("the given module must return a pair of the policy's output and the value", output)
        log_std = None
        if isinstance(spec.action_space, spaces.Box):
            policy, log_std = _pair("over boxes the policy's output must be a pair of mean and log_std", policy)
        policy = _checked("the policy's output", policy, action_size(spec.action_space, self.continuous))
        distribution = to_distribution(spec.action_space, policy, log_std, mask, self.continuous)
        return PolicyValue(distribution, value.reshape(policy.shape[:-1])), carry


def from_nnx(build: Callable[[EnvSpec, nnx.Rngs], nnx.Module], **options: Any) -> ForeignNetwork:
    """A network of a Flax NNX module.

    Args:
      build: makes the module, called with a batch of observations, and of carries if recurrent.
      **options: `outputs`, `carry`, `continuous`, see `ForeignNetwork`.
    """
    return ForeignNetwork(_NNX(build), **options)


def from_linen(module: Any, **options: Any) -> ForeignNetwork:
    """A network of a Flax Linen module.

    Args:
      module: called with a batch of observations, and of carries if recurrent; it may hold nothing but parameters.
      **options: `outputs`, `carry`, `continuous`, see `ForeignNetwork`.
    """
    return ForeignNetwork(_Linen(module), **options)


def from_equinox(build: Callable[[EnvSpec, jax.Array], Any], **options: Any) -> ForeignNetwork:
    """A network of an Equinox module, whose arrays of floats are the parameters.

    Args:
      build: makes the module from the spec and a key; it is called with one observation, and one carry if recurrent.
      **options: `outputs`, `carry`, `continuous`, see `ForeignNetwork`.
    """
    return ForeignNetwork(_Equinox(build), **options)


# --- the libraries -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NNX:
    build: Callable

    def init(self, key, spec, example):
        return _named(self._split(key, spec)[1])

    def call(self, params, spec, arguments):
        structure, example = _nnx_structure(self, spec)
        return nnx.merge(structure, _unnamed(example, params))(*arguments)

    def _split(self, key, spec):
        structure, params, rest = nnx.split(self.build(spec, nnx.Rngs(params=key)), nnx.Param, ...)
        kept = {path[-1] if path else "": type(leaf).__name__ for path, leaf in nnx.to_flat_state(rest)}
        if kept:
            raise ConfigError(
                f"the NNX module holds state besides parameters ({kept}), which nothing would carry; "
                "use layers without it (no batch statistics, no dropout)"
            )
        return structure, nnx.to_pure_dict(params)


@functools.lru_cache(maxsize=64)
def _nnx_structure(library: _NNX, spec: EnvSpec) -> tuple[Any, PyTree]:
    found = []

    def split(key):
        structure, params = library._split(key, spec)
        found.append(structure)
        return params

    with _standard_rules():
        params = jax.eval_shape(split, jax.random.key(0))
    return found[0], params


@dataclasses.dataclass(frozen=True)
class _Linen:
    module: Any

    def init(self, key, spec, example):
        variables = self.module.init(key, *example)
        others = [name for name in variables if name != "params"]
        if others:
            raise ConfigError(
                f"the Linen module has collections besides 'params' ({', '.join(others)}), which nothing would carry; "
                "use layers without them"
            )
        return variables["params"]

    def call(self, params, spec, arguments):
        return self.module.apply({"params": params}, *arguments)


@dataclasses.dataclass(frozen=True)
class _Equinox:
    build: Callable

    def init(self, key, spec, example):
        import equinox as eqx  # not a dependency: only who brings such a module needs it

        return _named(eqx.filter(self.build(spec, key), eqx.is_inexact_array))

    def call(self, params, spec, arguments):
        import equinox as eqx

        example, static = _equinox_structure(self, spec)
        return jax.vmap(eqx.combine(_unnamed(example, params), static))(*arguments)


@functools.lru_cache(maxsize=64)
def _equinox_structure(library: _Equinox, spec: EnvSpec) -> tuple[PyTree, PyTree]:
    import equinox as eqx

    with _standard_rules(), jax.ensure_compile_time_eval():
        return eqx.partition(library.build(spec, jax.random.key(0)), eqx.is_inexact_array)


# --- small things --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _standard_rules():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _named(tree: PyTree) -> dict[str, jax.Array]:
    """The leaves by their path, so that parameters are a plain dict whatever holds them."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _unnamed(example: PyTree, named: dict[str, jax.Array]) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: named[_name(path)], example)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _merge_time(x: jax.Array) -> jax.Array:
    return x.reshape((math.prod(x.shape[:2]), *x.shape[2:]))


def _pair(rule: str, x: Any) -> tuple[Any, Any]:
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise ConfigError(f"{rule}, not {jax.tree.map(jnp.shape, x)}")
    return tuple(x)


def _checked(what: str, x: jax.Array, size: int) -> jax.Array:
    if x.ndim != 2 or x.shape[-1] != size:
        raise ConfigError(f"{what} of the given module must have shape (batch, {size}), not {x.shape}")
    return x
