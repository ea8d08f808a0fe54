"""Adapters for user-defined networks in Flax NNX, Flax Linen or Equinox.

The user's module has no time axis and does not return distributions. A feed-forward module maps a batch of observations
`[N, *shape]` to its outputs; as usual in Equinox, an Equinox module maps a single observation instead of a batch. A
recurrent module maps observations and a carry `[N, ...]` to outputs and the next carry; the adapter unrolls the module
over time and resets the carry at the beginning of episodes.

With `outputs="q"`, the outputs are action values `[N, n]`. Otherwise, they are a pair of the policy's parameters and
the value `[N]` or `[N, 1]`. The policy's parameters depend on the action space:
  Discrete: logits `[N, n]`.
  MultiDiscrete: logits `[N, sum(nvec)]`.
  Box: a pair of the mean `[N, n]` and the log standard deviation, `[N, n]` or `[n]`.
  Dict or Tuple: a dictionary or tuple with the parameters of each part.

State other than parameters, as in batch normalization, becomes the network's model state: batch statistics in
NNX, every collection except `params` in Linen, and `equinox.nn.State`. A Linen module with such state is called with
the argument `train`. NNX modules are switched between training and evaluation by `train()` and `eval()`, Equinox
modules by `inference_mode`. Modules with random state, as in dropout, are rejected.

Observations are passed as the environment returns them: uint8 pixels are not scaled. User code runs under JAX's
standard promotion rules.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.trees import named_leaves
from jaxrl.core.types import Carry, EnvSpec, ModelState, NetworkInputs, Params, PyTree, where_first
from jaxrl.networks.actor_critic import PolicyValue
from jaxrl.networks.body import Encoder, known, run_module, split_module, structure_of
from jaxrl.networks.cores import scan_time
from jaxrl.networks.heads import action_size, joint, mask_values, masks_of_parts, to_distribution

OUTPUTS = ("actor_critic", "q")


class Library(Protocol):
    """Frozen, hashable interface to a library, which initializes parameters and calls a module with them."""

    def init(self, key: jax.Array, spec: EnvSpec, example: tuple) -> tuple[PyTree, ModelState]: ...
    def call(
        self, params: PyTree, model_state: ModelState, spec: EnvSpec, arguments: tuple, *, train: bool
    ) -> tuple[Any, ModelState]: ...


@dataclasses.dataclass(frozen=True)
class ForeignNetwork(Encoder):
    """Network that wraps a user's module; created by `from_nnx`, `from_linen` and `from_equinox`.

    Parameters are a dict with the single key "policy", even if the module also returns values.

    Args:
      library: interface for creating and calling the module.
      outputs: kind of the module's outputs, "actor_critic" or "q".
      carry: for recurrent modules, a function that takes no arguments and returns the initial carry, without a batch
        axis; None for feed-forward modules.
      continuous: distribution over a `Box`: "gaussian" (unbounded), "tanh" (squashed into the bounds) or "tanh_mean" (a
        Gaussian with only its mean squashed).
    """

    library: Library
    outputs: str = "actor_critic"
    carry: Callable[[], Carry] | None = None
    continuous: str = "gaussian"

    @property
    def recurrent(self) -> bool:
        """True if the network has a carry."""
        return self.carry is not None

    def init(self, key: jax.Array, spec: EnvSpec) -> tuple[Params, ModelState]:
        """Initialize the parameters and the model state.

        Raises:
          ConfigError: the module's outputs do not fit the action space, or the module has random state.
        """
        if self.outputs not in OUTPUTS:
            raise unknown("kind of output", str(self.outputs), OUTPUTS)
        action_size(spec.action_space, self.continuous)
        if self.outputs == "q" and not isinstance(spec.action_space, spaces.Discrete):
            raise ConfigError(f"outputs='q' needs a Discrete action space, not {spec.action_space}")
        example = jax.tree.map(lambda x: x[None], (spaces.zeros(spec.observation_space), self.initial_carry(spec)))
        with _standard_rules():
            params, model_state = self.library.init(key, spec, example if self.recurrent else example[:1])
        params = {"policy": params}

        def check_shapes(params, model_state):
            return self._outputs(params, model_state, *example, None, spec, train=False)

        jax.eval_shape(check_shapes, params, model_state)
        return params, model_state

    def initial_carry(self, spec: EnvSpec) -> Carry:
        """Return the initial carry of one environment; `()` if the module is feed-forward."""
        return () if self.carry is None else self.carry()

    def apply(
        self,
        params: Params,
        inputs: NetworkInputs,
        carry: Carry,
        *,
        spec: EnvSpec,
        model_state: ModelState,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[Any, Carry, ModelState]:
        """Return the output for inputs `[T, B, ...]`, the next carry and the model state; see `types.Network`.

        The output is a `PolicyValue`, or action values `[T, B, n]` with `outputs="q"`.
        """
        observed = (inputs.observation, inputs.action_mask)
        if not self.recurrent:
            leading = jax.tree.leaves(inputs.observation)[0].shape[:2]
            observation, mask = jax.tree.map(_merge_time, observed)
            output, _, model_state = self._outputs(params, model_state, observation, carry, mask, spec, train=train)
            return jax.tree.map(lambda x: x.reshape(leading + x.shape[1:]), output), carry, model_state
        initial = self.initial_carry(spec)

        def step(carried, time_step):
            # The beginning of an episode resets the carry, but not the model state.
            (carry, model_state), (observation, mask, first) = carried, time_step
            carry = where_first(first, initial, carry)
            output, *carried = self._outputs(params, model_state, observation, carry, mask, spec, train=train)
            return tuple(carried), output

        output, (carry, model_state) = scan_time(step, (carry, model_state), (*observed, known(inputs, "first")))
        return output, carry, model_state

    def value(
        self, params: Params, inputs: NetworkInputs, carry: Carry, *, spec: EnvSpec, model_state: ModelState
    ) -> jax.Array:
        """Compute the values `[T, B]` in evaluation mode."""
        return self.apply(params, inputs, carry, spec=spec, model_state=model_state, train=False)[0].value

    def _outputs(self, params, model_state, observation, carry, mask, spec, *, train):
        """Call the module on a batch `[N, ...]`; return outputs as algorithms expect them, carry and model state."""
        arguments = (observation, carry) if self.recurrent else (observation,)
        with _standard_rules():
            output, model_state = self.library.call(params["policy"], model_state, spec, arguments, train=train)
        if self.recurrent:
            output, carry = output
        if self.outputs == "q":
            return mask_values(_checked("action values", output, spec.action_space.n), mask), carry, model_state
        policy, value = _pair("the module must return a pair of the policy's output and the value", output)
        distribution = self._distribution("the policy's output", spec.action_space, policy, mask)
        batch = jax.tree.leaves(observation)[0].shape[:1]
        return PolicyValue(distribution, value.reshape(batch)), carry, model_state

    def _distribution(self, what, space, policy, mask):
        """Convert the module's output to a distribution over an action space; `what` names the output in errors."""
        if isinstance(space, spaces.Composite):
            keys = [key for key, _ in space.items]
            kind = dict if isinstance(space, spaces.Dict) else tuple
            if not isinstance(policy, kind) or sorted(policy if kind is dict else range(len(policy))) != keys:
                shapes = jax.tree.map(jnp.shape, policy)
                raise ConfigError(f"{what} of the module must be a {kind.__name__} with {keys}, not {shapes}")
            masks = masks_of_parts(space, mask)
            return joint(
                space, lambda key, child: self._distribution(f"{what}[{key!r}]", child, policy[key], masks[key])
            )
        log_std = None
        if isinstance(space, spaces.Box):
            policy, log_std = _pair(f"for a Box, {what} must be a pair of mean and log_std", policy)
        policy = _checked(what, policy, action_size(space, self.continuous))
        return to_distribution(space, policy, log_std, mask, self.continuous)


def from_nnx(build: Callable[[EnvSpec, nnx.Rngs], nnx.Module], **options: Any) -> ForeignNetwork:
    """Wrap a Flax NNX module as a network.

    Args:
      build: function `build(spec, rngs)` that creates the module. The module is called with a batch of observations; if
        recurrent, also with a batch of carries.
      **options: the arguments `outputs`, `carry` and `continuous` of `ForeignNetwork`.
    """
    return ForeignNetwork(_NNX(build), **options)


def from_linen(module: Any, **options: Any) -> ForeignNetwork:
    """Wrap a Flax Linen module as a network.

    Args:
      module: the module. It is called with a batch of observations; if recurrent, also with a batch of carries; and
        with `train=` if it has state other than parameters.
      **options: the arguments `outputs`, `carry` and `continuous` of `ForeignNetwork`.
    """
    return ForeignNetwork(_Linen(module), **options)


def from_equinox(build: Callable[[EnvSpec, jax.Array], Any], **options: Any) -> ForeignNetwork:
    """Wrap an Equinox module as a network whose parameters are the module's floating-point arrays.

    Args:
      build: function `build(spec, key)` that creates the module. The module is called with one observation; if
        recurrent, also with one carry. For a module with state, `build` returns the pair of
        `equinox.nn.make_with_state`; the module is then called with the state as its last argument and returns a pair
        of its output and the new state. Batches are vmapped with the axis name "batch".
      **options: the arguments `outputs`, `carry` and `continuous` of `ForeignNetwork`.
    """
    return ForeignNetwork(_Equinox(build), **options)


# --- the libraries -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NNX:
    build: Callable

    def init(self, key, spec, example):
        _, params, model_state = split_module(self, key, spec)
        return named_leaves(params), named_leaves(model_state) or ()

    def call(self, params, model_state, spec, arguments, *, train):
        _, *examples = structure_of(self, spec)
        variables = map(_unnamed, examples, (params, model_state))
        output, model_state = run_module(self, *variables, spec, lambda module: module(*arguments), train=train)
        return output, named_leaves(model_state) or ()


@dataclasses.dataclass(frozen=True)
class _Linen:
    module: Any

    def init(self, key, spec, example):
        options = {"train": False} if "train" in inspect.signature(self.module.__call__).parameters else {}
        variables = dict(self.module.init(key, *example, **options))
        params = variables.pop("params")
        return params, variables or ()

    def call(self, params, model_state, spec, arguments, *, train):
        variables = {"params": params}
        if not model_state:
            return self.module.apply(variables, *arguments), model_state
        variables |= model_state
        if not train:
            return self.module.apply(variables, *arguments, train=False), model_state
        return self.module.apply(variables, *arguments, train=True, mutable=list(model_state))


@dataclasses.dataclass(frozen=True)
class _Equinox:
    build: Callable

    def init(self, key, spec, example):
        import equinox as eqx  # an optional dependency

        module, state = _equinox_parts(self.build(spec, key))
        state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)  # the state's counter has a weak type
        return named_leaves(eqx.filter(module, eqx.is_inexact_array)), named_leaves(state) or ()

    def call(self, params, model_state, spec, arguments, *, train):
        import equinox as eqx

        example, static, state = _equinox_structure(self, spec)
        module = eqx.combine(_unnamed(example, params), static)
        if not model_state:
            return jax.vmap(module)(*arguments), model_state
        module = eqx.nn.inference_mode(module, not train)
        mapped = jax.vmap(module, axis_name="batch", in_axes=(*(0 for _ in arguments), None), out_axes=(0, None))
        output, state = mapped(*arguments, _unnamed(state, model_state))
        return output, named_leaves(state)


@functools.lru_cache(maxsize=64)
def _equinox_structure(library: _Equinox, spec: EnvSpec) -> tuple[PyTree, PyTree, PyTree]:
    import equinox as eqx

    with jax.ensure_compile_time_eval():
        module, state = _equinox_parts(library.build(spec, jax.random.key(0)))
        return *eqx.partition(module, eqx.is_inexact_array), state


def _equinox_parts(built: Any) -> tuple[Any, Any]:
    """Split the result of `build` into the module and its state, which is `()` if there is none."""
    return built if isinstance(built, tuple) and len(built) == 2 else (built, ())


LIBRARIES = {"nnx": _NNX, "linen": _Linen, "equinox": _Equinox}


# --- helpers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _standard_rules():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _unnamed(example: PyTree, named: dict[str, jax.Array]) -> PyTree:
    """Invert `named_leaves`: return a tree with the structure of `example` and the leaves in the dict `named`."""
    return jax.tree.unflatten(jax.tree.structure(example), [named[name] for name in named_leaves(example)])


def _merge_time(x: jax.Array) -> jax.Array:
    return x.reshape((math.prod(x.shape[:2]), *x.shape[2:]))


def _pair(rule: str, x: Any) -> tuple[Any, Any]:
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise ConfigError(f"{rule}, not {jax.tree.map(jnp.shape, x)}")
    return tuple(x)


def _checked(what: str, x: jax.Array, size: int) -> jax.Array:
    if x.ndim != 2 or x.shape[-1] != size:
        raise ConfigError(f"{what} of the module must have shape (batch, {size}), not {x.shape}")
    return x
