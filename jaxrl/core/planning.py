"""Planning in the environment itself: what an algorithm plans with, and what it offers."""

from typing import Protocol, runtime_checkable

import jax
from flax import struct

from jaxrl.core.types import ActorOutput, ActorState, Carry, Environment, EnvSpec, PyTree, TimeStep


class Model(struct.PyTreeNode):
    """Environments as a model of themselves: where they stand, and what any action would lead to."""

    env: Environment  # one environment
    state: PyTree  # [B, ...]


@runtime_checkable
class Planner(Protocol):
    """An algorithm that acts by planning in the environment itself wherever its states are at hand.

    They are in JAX environments: in training, evaluations, exports and drawings. Elsewhere it acts by `act`: a policy
    that was loaded, environments on the host or of several agents, and games against another policy.
    """

    def plan(
        self,
        actor: ActorState,
        timestep: TimeStep,
        carry: Carry,
        key: jax.Array,
        *,
        model: Model,
        spec: EnvSpec,
        explore: bool,
    ) -> ActorOutput:
        """Return one action for each environment, as `act` does; `model` is where they stand."""
        ...
