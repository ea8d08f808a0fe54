"""Planning in the environment itself: the model for planning, and the protocol of algorithms that plan."""

from typing import Protocol, runtime_checkable

import jax
from flax import struct

from jaxrl.core.types import ActorOutput, ActorState, Carry, Environment, EnvSpec, PyTree, TimeStep


class Model(struct.PyTreeNode):
    """Model for planning, which is the environment itself: its functions and the current states of all environments."""

    env: Environment  # one environment
    state: PyTree  # [B, ...]


@runtime_checkable
class Planner(Protocol):
    """Algorithm that acts by planning in the environment itself if its states are available.

    The states of JAX environments are available in training, evaluation, export and rendering. Otherwise, the algorithm
    acts with `act`: for loaded policies, host environments, environments with several agents, and games against
    another policy.
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
        """Return one action per environment, as `act` does; `model` has the environments' current states."""
        ...
