"""Probe environments: tiny tasks with known values, one for each link of an algorithm.

All five are one environment whose leaves choose, so that one compiled program per algorithm serves them all. They are
the probes of rejax (Liesen et al., 2023), and one for time limits.

| name | what happens | true value |
|---|---|---|
| `probe:Constant` | one step, reward 1 | 1 |
| `probe:RewardIsObservation` | one step, reward = observation, -1 or 1 | the observation |
| `probe:TwoStepDiscount` | observes 0, reward 0; then observes 1, reward 1 | gamma; then 1 |
| `probe:ActionReward` | one step; reward as below | 1 (of the best policy) |
| `probe:Truncated` | observes 0 for ever, reward `reward` a step, cut off every `max_steps` | reward / (1 - gamma) |

Action-dependent reward: discrete, 1 for action 0 and -1 for action 1; continuous (one number in [-2, 2]),
1 - (action - 0.5)^2, best at 0.5; composite (a dictionary of such a number and a tuple of three choices in two spaces),
the larger of that and 0 where each choice is the last of its kind, else 0: whatever one part does alone, it earns
nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.suites import unknown_name
from jaxrl.core.types import PyTree, TimeStep
from jaxrl.envs import suite
from jaxrl.envs.timestep import restart, transition

BEST_ACTION = 0.5  # of the continuous action-dependent probe
COMPOSITE = spaces.Dict(
    {
        "amount": spaces.Box(-2.0, 2.0, (1,)),
        "choice": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete((2, 3)))),
    }
)


class ProbeState(struct.PyTreeNode):
    """Where a probe environment stands."""

    time: jax.Array  # int32, transitions so far
    observation: jax.Array  # float32, shape (1,)


class Probe(struct.PyTreeNode):
    """The probe environment; see the module's table. It does not reset itself.

    The reward of a transition is `reward + observation_reward * observation + action_reward * f(action)`, given on the
    last of `terminate_after` transitions only; or on every one where `endless` is 1, which nothing ends but the limit.

    Args:
      reward, observation_reward, action_reward: weights of the three parts.
      random_observation: 1: the observation is -1 or 1, drawn at the reset; 0: it is 0 at first and then 1, or always 0
        where `endless` is 1.
      terminate_after: length of an episode that terminates.
      endless: 1: episodes never terminate.
      max_steps: time limit; the episode is truncated there unless it terminates.
      continuous: the action space is `Box(-2, 2, (1,))` instead of `Discrete(2)`.
      composite: it is `COMPOSITE`, a dictionary with a tuple in it.
    """

    reward: Any = 0.0
    observation_reward: Any = 0.0
    action_reward: Any = 0.0
    random_observation: Any = 0.0
    terminate_after: Any = 1
    endless: Any = 0.0
    max_steps: Any = 1000
    continuous: bool = struct.field(pytree_node=False, default=False)
    composite: bool = struct.field(pytree_node=False, default=False)

    @property
    def name(self) -> str:
        # One name for all: it is static where specifications are, and must not make another program of each probe.
        return "probe:Composite" if self.composite else "probe:Continuous" if self.continuous else "probe:Discrete"

    @property
    def parameters(self) -> dict[str, Any]:
        """Every field; what `make` takes to make it again."""
        values = {field: np.asarray(getattr(self, field)) for field in self.__dataclass_fields__}
        return {field: value if value.ndim else value.item() for field, value in values.items()}

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> "Probe":
        """The probe of these `parameters`, which are all there is to one."""
        del name, observation_space, action_space
        return make("Constant", **parameters)

    @property
    def observation_space(self) -> spaces.Space:
        return spaces.Box(-1.0, 1.0, (1,))

    @property
    def action_space(self) -> spaces.Space:
        if self.composite:
            return COMPOSITE
        return spaces.Box(-2.0, 2.0, (1,)) if self.continuous else spaces.Discrete(2)

    @property
    def resets(self) -> bool:
        return False

    def reset(self, key: jax.Array) -> tuple[ProbeState, TimeStep]:
        sign = jnp.where(jax.random.bernoulli(key), jnp.float32(1), jnp.float32(-1))
        observation = jnp.where(jnp.asarray(self.random_observation, jnp.bool_), sign, 0.0).reshape(1)
        return ProbeState(jnp.zeros((), jnp.int32), observation), restart(observation)

    def step(self, state: ProbeState, action: PyTree, key: jax.Array) -> tuple[ProbeState, TimeStep]:
        del key
        time = state.time + 1
        endless = jnp.asarray(self.endless, jnp.bool_)
        done = time >= self.terminate_after
        if self.composite:
            one, two = action["choice"]
            right = (one == 1) & jnp.all(two == jnp.asarray([1, 2], two.dtype))
            effect = jnp.where(
                right, jnp.maximum(1.0 - jnp.square(action["amount"].reshape(()) - BEST_ACTION), 0.0), 0.0
            )
        elif self.continuous:
            effect = 1.0 - jnp.square(action.reshape(()) - BEST_ACTION)
        else:
            effect = jnp.where(action.reshape(()) == 0, 1.0, -1.0)
        reward = (
            self.reward + self.observation_reward * state.observation.reshape(()) + self.action_reward * effect
        ) * jnp.asarray(done | endless, jnp.float32)
        later = jnp.where(endless, jnp.float32(0), jnp.float32(1)).reshape(1)
        observation = jnp.where(jnp.asarray(self.random_observation, jnp.bool_), state.observation, later)
        time_step = transition(observation, reward, done & ~endless, time >= self.max_steps)
        return ProbeState(time, observation), time_step


registry.add("suite", probe=Probe)

_KINDS = ("continuous", "composite")  # of actions
_PROBES: dict[str, dict[str, Any]] = {
    "Constant": {"reward": 1.0},
    "RewardIsObservation": {"observation_reward": 1.0, "random_observation": 1.0},
    "TwoStepDiscount": {"reward": 1.0, "terminate_after": 2},
    "ActionReward": {"action_reward": 1.0},
    "Truncated": {"reward": 1.0, "endless": 1.0, "max_steps": 5},
}


def names() -> tuple[str, ...]:
    """The probe environments."""
    return tuple(_PROBES)


def make(name: str, **parameters: Any) -> Probe:
    """The probe `name` ("Constant"), with `parameters` replacing its own.

    Raises:
      ConfigError: unknown name or parameters.
    """
    if name not in _PROBES:
        raise unknown_name("probe", name, _PROBES)
    fields = Probe.__dataclass_fields__
    if problems := suite.unknown_parameters("parameter of probes", parameters, fields):
        raise ConfigError(problems)
    chosen = {**_PROBES[name], **parameters}
    if chosen.get("continuous") and chosen.get("composite"):
        raise ConfigError(f"probe:{name} is continuous=True or composite=True, not both")
    types = {k: np.int32 if isinstance(field.default, int) else np.float32 for k, field in fields.items()}
    return Probe(
        # Arrays of one type, whatever numbers were given: probes must not differ in anything but values.
        **{k: jnp.asarray(chosen.get(k, fields[k].default), types[k]) for k in fields if k not in _KINDS},
        continuous=bool(chosen.get("continuous", False)),
        composite=bool(chosen.get("composite", False)),
    )
