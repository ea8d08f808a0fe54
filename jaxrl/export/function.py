"""A policy as one pure function of arrays, for any batch size."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, JaxrlError
from jaxrl.core.types import Environment, PyTree
from jaxrl.export.operations import flat_equations, reachable
from jaxrl.run.policies.policy import Policy, act_once


class ActFunction:
    """The function `(observation, carry, first, reward[, action_mask][, key]) -> (action, carry)` of a policy.

    All leaves have shape `[B, ...]`. The carry is a tuple of the memory's arrays that affect actions: `()` for a policy
    without memory. Where `first` is True, the values of the carry are not read, so an episode can begin with zeros.
    `action_mask` is an argument if the environment has one, and `key`, uint32 [2], if actions are sampled. The function
    computes the same actions as the run, and contains the parameters and statistics.

    Attributes:
      arguments: shapes and dtypes of the arguments by name, with the symbolic batch size "b".
      action: shapes and dtypes of the action, with the same batch size.

    Raises:
      ConfigError: the policy cannot be traced for a symbolic batch size, or its action mask is unknown.
    """

    def __init__(self, policy: Policy, sample: bool = False):
        self._policy, self._sample = policy, sample
        initial, self._structure = jax.tree.flatten(policy.initial_carry())
        self._initial, self._needed = initial, tuple(range(len(initial)))
        self.arguments = self._arguments()
        try:
            self._needed = self._read_by_actions()
        except JaxrlError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error!s:.300}".splitlines()[0]
            raise ConfigError(
                f"{type(policy.algo).__name__} cannot be exported for every batch size: {what}"
            ) from error
        self.arguments = self._arguments()
        self.action = jax.eval_shape(self, *self.arguments.values())[0]

    def __call__(
        self, observation: PyTree, carry: tuple[jax.Array, ...], first: jax.Array, reward: jax.Array, *others: Any
    ) -> tuple[PyTree, tuple[jax.Array, ...]]:
        """Return the actions, in the policy's `spec.action_space`, and the carry to pass to the next call."""
        policy, size, more = self._policy, first.shape[0], dict(zip(list(self.arguments)[4:], others, strict=True))
        leaves = [jnp.broadcast_to(x, (size, *x.shape)) for x in self._initial]
        for place, x in zip(self._needed, carry, strict=True):
            begins = first.reshape(size, *(1,) * (x.ndim - 1))
            leaves[place] = jnp.where(begins, leaves[place], x)
        memory, keys = jax.tree.unflatten(self._structure, leaves), None
        if self._sample:
            keys = jax.random.split(jax.random.wrap_key_data(more["key"], impl="threefry2x32"), size)
        # Without the barrier, the compiler would fold the parameters as constants and round differently than in a run.
        algo, actor = jax.lax.optimization_barrier(policy.acting)
        action, memory = act_once(
            algo,
            actor,
            policy.spec,
            observation=observation,
            memory=memory,
            first=first,
            reward=reward,
            action_mask=more.get("action_mask"),
            keys=keys,
            explore=self._sample,
        )
        leaves = jax.tree.leaves(memory)
        return action, tuple(leaves[place] for place in self._needed)

    def traced(self) -> ClosedJaxpr:
        """Return the traced program for a symbolic batch size."""
        return jax.make_jaxpr(self)(*self.arguments.values())

    def _arguments(self) -> dict[str, Any]:
        (batch,) = jax.export.symbolic_shape("b")
        spec = self._policy.spec

        def many(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *x.shape), x.dtype)

        found: dict[str, Any] = {
            "observation": jax.tree.map(many, jax.eval_shape(lambda: spaces.zeros(spec.observation_space))),
            "carry": tuple(many(self._initial[place]) for place in self._needed),
            "first": jax.ShapeDtypeStruct((batch,), jnp.bool_),
            "reward": jax.ShapeDtypeStruct((batch,), jnp.float32),
        }
        if spec.masked:
            env = self._policy.env
            if not isinstance(env, Environment):
                raise ConfigError("the action mask needs the environment, which the policy lacks; load the run instead")
            mask = jax.eval_shape(lambda key: env.reset(key)[1].action_mask, jax.eval_shape(lambda: jax.random.key(0)))
            found["action_mask"] = jax.tree.map(many, mask)
        if self._sample:
            found["key"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return found

    def _read_by_actions(self) -> tuple[int, ...]:
        """Return the indices of the memory's leaves that affect the current action or a later one."""
        program = self.traced()
        equations, outputs = flat_equations(program)
        start = len(jax.tree.leaves(self.arguments["observation"]))
        inputs, count = program.jaxpr.invars[start : start + len(self._initial)], len(self._initial)
        actions, memory = outputs[: len(outputs) - count], outputs[len(outputs) - count :]
        needed: set[int] = set()
        while True:
            read = reachable(equations, [*actions, *(memory[place] for place in needed)])
            found = {place for place, x in enumerate(inputs) if x in read}
            if found == needed:
                return tuple(sorted(found))
            needed = found
