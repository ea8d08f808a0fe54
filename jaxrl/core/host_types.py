"""Optional protocols of host environments and recipes, in addition to `HostEnvironment` and `HostRecipe`."""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl.core.types import Environment, HostEnvironment, HostRecipe, PyTree, TimeStep


@runtime_checkable
class WatchedEnvironment(HostEnvironment, Protocol):
    """Host environment whose pending calls a watchdog can query from another thread."""

    name: str

    @property
    def failures(self) -> int:
        """Return how often environments were rebuilt after a fault."""
        ...

    @property
    def doing(self) -> str:
        """Describe the environments and the call that it is waiting for; empty if it is not waiting."""
        ...


@runtime_checkable
class AsyncEnvironment(HostEnvironment, Protocol):
    """Host environment that returns the first `batch_size` of its environments that are ready.

    `async_reset` begins all episodes; then `recv` and `send` are called in turn, from one thread. If `batch_size` is
    `num_envs`, `reset` and `step` do both in one call.
    """

    batch_size: int

    def async_reset(self) -> None: ...

    def send(self, actions: PyTree, env_ids: np.ndarray) -> None:
        """Send actions `[B, ...]` to the environments `env_ids` [B], which `recv` returned and which await an action.

        It returns immediately. The actions are not modified afterwards.
        """
        ...

    def recv(self) -> tuple[np.ndarray, TimeStep[np.ndarray]]:
        """Wait for `batch_size` environments; return their indices, int32 `[batch_size]`, in any order, and time steps.

        At least `batch_size` environments must have been reset or sent actions and not yet received.
        """
        ...


class RenderedEnvironment(HostEnvironment, Protocol):
    """Host environments that can be rendered."""

    name: str

    @property
    def frames_per_second(self) -> float:
        """Return the frame rate at which an episode looks natural, with one frame per step."""
        ...

    def render(self) -> np.ndarray | None:
        """Render the first environment, uint8 [height, width, 3]; None if it renders nothing."""
        ...


@runtime_checkable
class RenderedRecipe(HostRecipe, Protocol):
    """Recipe whose environments can be rendered."""

    def build_rendered(self, seed: int) -> RenderedEnvironment:
        """Build one environment, as `build` does, that can be rendered."""
        ...


@runtime_checkable
class AsyncRecipe(HostRecipe, Protocol):
    """Recipe whose environments can also be asynchronous."""

    def build_async(self, num_envs: int, batch_size: int, seed: int, first_env: int = 0) -> AsyncEnvironment:
        """Build the environments of `build`, with `batch_size` of them returned by every `recv`."""
        ...


@runtime_checkable
class InstanceRecipe(HostRecipe, Protocol):
    """Recipe that may be limited to one environment, a user's instance."""

    @property
    def instance(self) -> Any | None:
        """Return the only environment; None if others can be created."""
        ...


def only_instance(env: Environment | HostRecipe) -> Any | None:
    """Return the one environment of an `InstanceRecipe`; None for recipes that can build more."""
    return env.instance if isinstance(env, InstanceRecipe) else None
