"""Host environments that Ray actors step, while this process acts; lost steps are masked as for worker processes."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl.core.spaces import Space
from jaxrl.core.types import HostRecipe, PyTree, TimeStep
from jaxrl.parallel.ray.remote import ActorPool, Remote


@dataclasses.dataclass(frozen=True)
class RemoteRecipe:
    """The recipe `recipe` with its environments in `actors` Ray actors."""

    recipe: HostRecipe
    remote: Remote
    actors: int

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def observation_space(self) -> Space:
        return self.recipe.observation_space

    @property
    def action_space(self) -> Space:
        return self.recipe.action_space

    def build(self, num_envs: int, seed: int, first_env: int = 0) -> "RemoteEnvironments":
        """Build the environments of `recipe`, in Ray actors."""
        return RemoteEnvironments(self.recipe, self.remote, self.actors, num_envs, seed, first_env)


class RemoteEnvironments:
    """A batch of host environments, divided over Ray actors.

    Attributes:
      name: the environment's name.
      failures: number of actors that were lost and replaced.
      patience: seconds that a step may take longer if an actor is given up and replaced.
    """

    def __init__(self, recipe: HostRecipe, remote: Remote, actors: int, num_envs: int, seed: int, first_env: int = 0):
        self.num_envs, self.patience = num_envs, remote.patience
        self._crew = ActorPool(EnvironmentActor, (recipe,), recipe.name, remote, actors, num_envs, seed, first_env)
        self._crew.wait()

    @property
    def name(self) -> str:
        return self._crew.name

    @property
    def failures(self) -> int:
        return self._crew.failures

    @property
    def doing(self) -> str:
        return self._crew.doing

    def reset(self) -> TimeStep[np.ndarray]:
        self._crew.begin("reset", [()] * len(self._crew.shares))
        return _joined(self._crew.finish(again="reset"))

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        parts = [(jax.tree.map(lambda x, share=share: x[share], actions),) for share in self._crew.shares]
        self._crew.begin("step", parts)
        return _joined(self._crew.finish(again="reset"))

    def close(self) -> None:
        self._crew.close()


def _joined(parts: Sequence[TimeStep[np.ndarray]]) -> TimeStep[np.ndarray]:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


class EnvironmentActor:
    """The class of Ray actors that hold a share of the environments."""

    def __init__(self, num_envs: int, seed: int, first_env: int, recipe: HostRecipe):
        jax.config.update("jax_platforms", "cpu")  # otherwise environments in JAX would use an accelerator
        self._host = recipe.build(num_envs, seed, first_env)

    def reset(self) -> TimeStep[np.ndarray]:
        return self._host.reset()

    def step(self, actions: PyTree) -> TimeStep[np.ndarray]:
        return self._host.step(actions)
