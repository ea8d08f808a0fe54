"""Optional protocols of host environments and recipes, in addition to `HostEnvironment` and `HostRecipe`."""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl.core.types import Environment, HostEnvironment, HostRecipe, PyTree, TimeStep


@runtime_checkable
class WatchedEnvironment(HostEnvironment, Protocol):
    """A host environment that a watchdog can ask, from another thread, what it is waiting for."""

    name: str

    @property
    def failures(self) -> int:
        """Return how often environments were rebuilt after a fault."""
        ...

    @property
    def doing(self) -> str:
        """Return in words which environments it is waiting for, and in what call; empty when it is not."""
        ...


@runtime_checkable
class AsyncEnvironment(HostEnvironment, Protocol):
    """A host environment that returns the `batch_size` of its environments that are ready first.

    `async_reset` begins all episodes; then `recv` and `send` are called in turn, from one thread. Where `batch_size` is
    `num_envs`, `reset` and `step` do both in one call.
    """

    batch_size: int

    def async_reset(self) -> None: ...

    def send(self, actions: PyTree, env_ids: np.ndarray) -> None:
        """Send actions `[B, ...]` to the environments `env_ids` [B], which `recv` returned and which await an action.

        Returns at once. The actions are never written to again.
        """
        ...

    def recv(self) -> tuple[np.ndarray, TimeStep[np.ndarray]]:
        """Wait for `batch_size` environments; return their indices, int32 `[batch_size]`, in any order, and time steps.

        At least as many must have been reset or sent actions, and not received yet.
        """
        ...


class RenderedEnvironment(HostEnvironment, Protocol):
    """Host environments that can be rendered."""

    name: str

    @property
    def frames_per_second(self) -> float:
        """Return the frame rate at which an episode looks natural, with a frame a step."""
        ...

    def render(self) -> np.ndarray | None:
        """Render the first environment, uint8 [height, width, 3]; None where it draws nothing."""
        ...


@runtime_checkable
class RenderedRecipe(HostRecipe, Protocol):
    """A recipe whose environments can be rendered."""

    def build_rendered(self, seed: int) -> RenderedEnvironment:
        """Build one environment, as `build` does, that can be rendered."""
        ...


@runtime_checkable
class AsyncRecipe(HostRecipe, Protocol):
    """A recipe whose environments can be asynchronous too."""

    def build_async(self, num_envs: int, batch_size: int, seed: int, first_env: int = 0) -> AsyncEnvironment:
        """Build the environments of `build`, of which every `recv` returns `batch_size`."""
        ...


@runtime_checkable
class InstanceRecipe(HostRecipe, Protocol):
    """A recipe that may have no more than one environment, an instance of the user's."""

    @property
    def instance(self) -> Any | None:
        """Return the only environment; None where others can be made."""
        ...


def only_instance(env: Environment | HostRecipe) -> Any | None:
    """Return the one environment of an `InstanceRecipe`; None for recipes that can build more."""
    return env.instance if isinstance(env, InstanceRecipe) else None
