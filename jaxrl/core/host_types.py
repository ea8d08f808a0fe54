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
        """The number of times that environments were rebuilt after a fault."""
        ...

    @property
    def doing(self) -> str:
        """A description of the pending call and the environments that it waits for; empty if no call is pending."""
        ...


@runtime_checkable
class AsyncEnvironment(HostEnvironment, Protocol):
    """Batch of host environments that returns the first `batch_size` environments that are ready.

    `async_reset` begins all episodes; after that, `recv` and `send` are called alternately from one thread. If
    `batch_size` is `num_envs`, `reset` and `step` send and receive in one call.
    """

    batch_size: int

    def async_reset(self) -> None: ...

    def send(self, actions: PyTree, env_ids: np.ndarray) -> None:
        """Send actions `[B, ...]` to the environments `env_ids` [B], which `recv` returned and which need an action.

        The call returns immediately. The caller must not modify the actions afterwards.
        """
        ...

    def recv(self) -> tuple[np.ndarray, TimeStep[np.ndarray]]:
        """Wait for `batch_size` environments; return their indices (int32 `[batch_size]`, in any order) and time steps.

        At least `batch_size` environments must have a pending reset or action whose result was not received yet.
        """
        ...


class RenderedEnvironment(HostEnvironment, Protocol):
    """Host environment that can be rendered."""

    name: str

    @property
    def frames_per_second(self) -> float:
        """The frame rate for playing an episode at its natural speed, with one frame per step."""
        ...

    def render(self) -> np.ndarray | None:
        """Return an image of the first environment, uint8 [height, width, 3]; None if there is nothing to render."""
        ...


@runtime_checkable
class RenderedRecipe(HostRecipe, Protocol):
    """Recipe whose environments can be rendered."""

    def build_rendered(self, seed: int) -> RenderedEnvironment:
        """Build a single environment that can be rendered; otherwise, it equals an environment from `build`."""
        ...


@runtime_checkable
class AsyncRecipe(HostRecipe, Protocol):
    """Recipe that can also build asynchronous environments."""

    def build_async(self, num_envs: int, batch_size: int, seed: int, first_env: int = 0) -> AsyncEnvironment:
        """Build the same environments as `build`; every `recv` returns `batch_size` of them."""
        ...


@runtime_checkable
class InstanceRecipe(HostRecipe, Protocol):
    """Recipe that may be limited to one existing environment instance, passed by the user."""

    @property
    def instance(self) -> Any | None:
        """The user's environment instance; None if the recipe can create environments."""
        ...


def only_instance(env: Environment | HostRecipe) -> Any | None:
    """Return the user's instance of an `InstanceRecipe`; None for recipes that can create environments."""
    return env.instance if isinstance(env, InstanceRecipe) else None
