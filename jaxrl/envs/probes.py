"""Probe environments: tiny tasks with known values, each of which tests one part of an algorithm.

All five are the same environment with different leaves, so that each algorithm compiles once for all of them. They are
the probes of rejax (Liesen et al., 2023), plus one for time limits.

| name | what happens | true value |
|---|---|---|
| `probe:Constant` | one step, reward 1 | 1 |
| `probe:RewardIsObservation` | one step, reward = observation, -1 or 1 | the observation |
| `probe:TwoStepDiscount` | observes 0, reward 0; then observes 1, reward 1 | gamma; then 1 |
| `probe:ActionReward` | one step; reward as below | 1 (of the best policy) |
| `probe:Truncated` | observes 0 forever, reward `reward` per step, truncated every `max_steps` | reward / (1 - gamma) |

The action-dependent reward depends on the action space. For discrete actions, it is 1 for action 0 and -1 for action 1.
For continuous actions (one number in [-2, 2]), it is 1 - (action - 0.5)^2, with the maximum at 0.5. Composite actions
are a dictionary of such a number and a tuple with a `Discrete` and a `MultiDiscrete` part. If all discrete choices have
their largest values, the reward is the continuous reward, but at least 0; otherwise it is 0. So no part of the action
is rewarded separately.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs.parameters import like
from jaxrl.envs.suite import COUNT, Key, Step, SuiteEnv, add_suite, key_of

BEST_ACTION = 0.5  # the best continuous action of probe:ActionReward
COMPOSITE = spaces.Dict(
    {
        "amount": spaces.Box(-2.0, 2.0, (1,)),
        "choice": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete((2, 3)))),
    }
)


class ProbeState(struct.PyTreeNode):
    """The state of a probe environment."""

    time: jax.Array  # int32, transitions so far
    observation: jax.Array  # float32, shape (1,)


class Probe(SuiteEnv, repr=True):
    """The probe environment; see the module's table.

    The reward of a transition is `reward + observation_reward * observation + action_reward * f(action)`. If `endless`
    is 0, only the last of `terminate_after` transitions is rewarded; if it is 1, every transition is.

    Args:
      reward, observation_reward, action_reward: weights of the three terms.
      random_observation: 1 to sample the observation, -1 or 1, at the reset; 0 for an observation that is 0 at first
        and 1 later, or always 0 if `endless` is 1.
      terminate_after: number of transitions after which an episode terminates, unless `endless` is 1.
      endless: 1 if episodes never terminate, otherwise 0.
      max_steps: time limit after which an episode is truncated if it has not terminated.
      continuous: whether the action space is `Box(-2, 2, (1,))` instead of `Discrete(2)`.
      composite: whether the action space is `COMPOSITE`, a dictionary that contains a tuple.
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

    suite = "probe"
    ranges = {"terminate_after": COUNT, "max_steps": COUNT}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the probe environments."""
        return tuple(_PROBES)

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        return dict.fromkeys(_KINDS, False)

    @classmethod
    def default(cls, key: Key) -> "Probe":
        # The leaves are arrays with the same types for every probe, so that only the values differ.
        values = {k: _array(field.default) for k, field in cls.__dataclass_fields__.items() if k not in _KINDS}
        chosen = {k: like(values[k], x) for k, x in _PROBES.get(key[0], {}).items()}
        return cls(**values | chosen, **{k: bool(x) for k, x in key[1]})

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        super().check(name, parameters)
        if all(parameters.get(k) for k in _KINDS):
            raise ConfigError(f"probe:{name} can have continuous=True or composite=True, not both")

    @property
    def key(self) -> Key:
        # The same name for all probes, because the name is static: different names would need different programs.
        name = "Composite" if self.composite else "Continuous" if self.continuous else "Discrete"
        return key_of(name, {"continuous": self.continuous, "composite": self.composite})

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of all fields, which `make` accepts as the parameters of this probe."""
        values = {field: np.asarray(getattr(self, field)) for field in self.__dataclass_fields__}
        return {field: value if value.ndim else value.item() for field, value in values.items()}

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> "Probe":
        """Return the probe with these `parameters`; `name` is ignored, because they determine the probe."""
        del name
        return super().restore("Constant", parameters, observation_space, action_space)

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        flags = {k: changed[k] for k in ("random_observation", "endless") if isinstance(changed.get(k), int | float)}
        wrong = [f"{k}={value} of {self.name} must be 0 or 1" for k, value in flags.items() if value not in (0, 1)]
        return super().contradictions(changed) + wrong

    def without_effect(self) -> frozenset[str]:
        return frozenset(self.idle())

    def idle(self) -> Mapping[str, str]:
        if any(isinstance(value, jax.core.Tracer) or jnp.ndim(value) for value in self.numbers.values()):
            return {}  # mapped over
        one_step = not self.endless and self.terminate_after <= 1
        found = {}
        if self.endless:
            found["terminate_after"] = "with endless=1, because no step terminates"
        if one_step:
            found["max_steps"] = "with terminate_after=1, which ends every episode at its first step"
        if not self.random_observation and (self.endless or one_step):
            found["observation_reward"] = "because every rewarded observation is 0; set random_observation=1"
        return found

    observation_space = spaces.Box(-1.0, 1.0, (1,))

    @property
    def action_space(self) -> spaces.Space:
        if self.composite:
            return COMPOSITE
        return spaces.Box(-2.0, 2.0, (1,)) if self.continuous else spaces.Discrete(2)

    def begin(self, key: jax.Array) -> tuple[ProbeState, Step]:
        sign = jnp.where(jax.random.bernoulli(key), jnp.float32(1), jnp.float32(-1))
        observation = jnp.where(jnp.asarray(self.random_observation, jnp.bool_), sign, 0.0).reshape(1)
        return ProbeState(jnp.zeros((), jnp.int32), observation), Step(observation)

    def advance(self, state: ProbeState, action: PyTree, key: jax.Array) -> tuple[ProbeState, Step]:
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
        return ProbeState(time, observation), Step(observation, reward, done & ~endless, time >= self.max_steps)


names, make = add_suite(Probe)

_KINDS = ("continuous", "composite")  # fields that choose the kind of actions
_PROBES: dict[str, dict[str, Any]] = {
    "Constant": {"reward": 1.0},
    "RewardIsObservation": {"observation_reward": 1.0, "random_observation": 1.0},
    "TwoStepDiscount": {"reward": 1.0, "terminate_after": 2},
    "ActionReward": {"action_reward": 1.0},
    "Truncated": {"reward": 1.0, "endless": 1.0, "max_steps": 5},
}


def _array(default):
    return jnp.zeros((), np.int32 if isinstance(default, int) else np.float32) + default
