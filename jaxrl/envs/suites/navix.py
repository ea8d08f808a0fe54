"""NAVIX environments (Pignatelli et al., 2024, arXiv:2407.19396), without auto-reset.

The library's `step` begins a new episode one step late and, in a batch, computes a reset at every step. So the adapter
calls the internal function that `step` calls.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxrl.core import spaces
from jaxrl.core.types import PyTree
from jaxrl.envs import drawings
from jaxrl.envs.suite import COUNT, Key, LibraryEnv, Step, add_suite, foreign_rules, silent_import

with silent_import(), warnings.catch_warnings(action="ignore"):
    import navix
    from navix.rendering.cache import RenderingCache

_LAST = 10  # the largest index of a kind of grid cell; indices of colors and states are smaller
# Smallest and largest value of each type of observation. The library's spaces are wrong: they omit walls (-1) and
# unseen fields (100), or have the bound 255.
OBSERVATIONS = {
    "categorical": (-1, _LAST),
    "categorical_first_person": (-1, 100),
    "rgb": (0, 255),
    "rgb_first_person": (0, 255),
    "symbolic": (0, _LAST),
    "symbolic_first_person": (0, _LAST),
}


def _see(env, state, time_step):
    state = state.state
    with foreign_rules():
        return navix.observations.rgb(state.replace(cache=state.cache or RenderingCache.init(state.grid)))


class NavixEnvironment(LibraryEnv):
    """A NAVIX environment.

    The leaves are `max_steps`, the number of steps after which episodes are truncated, and `penalty_coeff`, the
    fraction of the last reward that is deducted for elapsed time. The static parameter is `observation`, one of
    `OBSERVATIONS`.
    """

    max_steps: Any
    penalty_coeff: Any

    suite = "navix"
    ranges = {"max_steps": COUNT, "penalty_coeff": {"low": 0}}
    drawing = drawings.Drawing(_see, drawings.image, 8.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(navix.registry())

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        return {"observation": cls.foreign_of(name).observation_fn.__name__}

    @classmethod
    def make_foreign(cls, key: Key) -> Any:
        env = navix.make(key[0])
        chosen: Any = dict(key[1]).get("observation", env.observation_fn.__name__)
        return navix.make(key[0], observation_fn=getattr(navix.observations, chosen))

    @classmethod
    def default(cls, key: Key) -> "NavixEnvironment":
        env = cls.foreign_of(*key)
        seen, bounds = env.observation_space, OBSERVATIONS[env.observation_fn.__name__]
        box = spaces.Box(*bounds, seen.shape, seen.dtype)
        return cls(key, box, spaces.Discrete(int(env.action_space.n)), env.max_steps, env.penalty_coeff)

    @classmethod
    def choices(cls, name: str) -> Mapping[str, Iterable[str]]:
        return {"observation": OBSERVATIONS}

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        first = self.foreign.reset(key)
        # The background of images, 192 bytes per field, is only kept in the state if observations are images.
        pictures = self.static("observation").startswith("rgb")
        timestep = first if pictures else first.replace(state=first.state.replace(cache=None))
        return timestep, Step(first.observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        del key  # NAVIX's key is in its state
        env = self.foreign.replace(max_steps=self.max_steps, penalty_coeff=self.penalty_coeff)
        after = env._step(state, action)  # not `step`, which calls it and may reset
        return after, Step(after.observation, after.reward, after.is_termination(), after.is_truncation())


names, make = add_suite(NavixEnvironment)
