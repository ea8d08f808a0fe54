"""gymnax environments (Lange, 2022, github.com/RobertTLange/gymnax), version 1.x, as raw episodic environments."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

from jaxrl.core import registry, spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs import gymnax_rules as rules
from jaxrl.envs.gymnax_import import import_gymnax
from jaxrl.envs.gymnax_spaces import spaces_of
from jaxrl.envs.suite import Key, Step, SuiteEnv, constructing, equal, outside

gymnax: Any = import_gymnax()

NEEDS_DOWNLOAD = ("MNISTBandit-bsuite",)
_LARGEST = 2_048  # limit of constructor arguments in files; DeepSea makes arrays of its square


class GymnaxEnvironment(SuiteEnv):
    """A gymnax environment.

    The leaves are those of gymnax's `EnvParams`. The spaces follow from the numbers passed to `make`; they do not
    change if leaves are replaced later, or are arrays to be mapped over. Derived parameters (`gymnax_rules.DERIVED`)
    follow from the others whenever an environment is built or rebuilt from leaves. They are not computed at every step,
    which would change what XLA fuses, and so the last bit of results.
    """

    params: PyTree
    key: Key = struct.field(pytree_node=False)
    observation_space: spaces.Space = struct.field(pytree_node=False)
    action_space: spaces.Space = struct.field(pytree_node=False)

    suite = "gymnax"

    def __post_init__(self):
        object.__setattr__(self, "params", rules.settled(self.key[0], self.params))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return gymnax's environments that need no download, and those that were registered with it."""
        return tuple(n for n in gymnax.registered_envs if n not in NEEDS_DOWNLOAD)

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        """Return the arguments of the constructor, which change shapes or the program."""
        parameters = inspect.signature(gymnax.registration._registry[name]).parameters
        return {k: parameter.default for k, parameter in parameters.items()}

    @classmethod
    def default(cls, key: Key) -> "GymnaxEnvironment":
        env, params = foreign(key)
        return cls(params=params, key=key, **spaces_of(key[0], env, params))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name in NEEDS_DOWNLOAD:
            raise ConfigError(f"gymnax:{name} downloads its data when it is made, which jaxrl never does at run time")
        super().check(name, parameters)

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: spaces.Space, action_space: spaces.Space
    ) -> "GymnaxEnvironment":
        """Return the environment with recorded `parameters`; its spaces follow from them.

        Raises:
          ConfigError: as `SuiteEnv.restore`; or an argument of the constructor is a number so large that arrays of that
            size, or of its square, would fill the memory as they are made.
        """
        sizes = cls.static_parameters(name) if name in cls.names() else {}
        large = [k for k in sizes if k in parameters and not k.endswith("seed") and _is_large(parameters[k])]
        if large:
            chosen = ", ".join(f"{k}={parameters[k]!r:.80}" for k in large)
            raise ConfigError(
                f"gymnax:{name} is to be made with {chosen}; a file may choose at most {_LARGEST}: hand the "
                "environment in: env=jaxrl.make(...)"
            )
        return super().restore(name, parameters, observation_space, action_space)

    def with_spaces(self) -> "GymnaxEnvironment":
        return self.replace(**spaces_of(self.key[0], foreign(self.key)[0], self.params))

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        derived = rules.DERIVED.get(self.key[0], {})
        return outside(changed, rules.LIMITS) + [
            f"{name}={value!r:.80} of {self.name} follows from {derived[name].equation} = {result!r:.80}; leave it "
            "out, and set those"
            for name, value in changed.items()
            if name in derived and not equal(value, result := getattr(self.params, name))
        ]

    def without_effect(self) -> frozenset[str]:
        useless = super().without_effect() | rules.WITHOUT_EFFECT.get(self.key[0], frozenset())
        return useless - set(rules.DERIVED.get(self.key[0], ()))

    def unused(self, chosen: Mapping[str, Any]) -> list[str]:
        name, defaults = self.key[0], self.static_parameters(self.key[0])
        usual = foreign(self.key)[1]
        return [
            *rules.unused_arguments(name, {k: x for k, x in chosen.items() if k in defaults}, defaults),
            *rules.switched_off(name, self.parameters, chosen, vars(usual) | dict(defaults)),
        ]

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observation, state = foreign(self.key)[0].reset_env(key, self.params)
        return state, Step(observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = foreign(self.key)[0]
        # `step_env`, not `step`, which makes a new episode at every step and hides the last observation.
        observation, state, reward, terminated, info = env.step_env(key, state, action, self.params)
        reported = {name: x for name, x in info.items() if name != "discount"}
        truncated = env.is_truncated(state, self.params)
        return state, Step(observation, reward, terminated, truncated, info=reported)


registry.add("suite", gymnax=GymnaxEnvironment)
names, make = GymnaxEnvironment.names, GymnaxEnvironment.make


@functools.lru_cache(maxsize=256)
def foreign(key: Key) -> tuple[Any, Any]:
    """Return gymnax's own environment for this key and its default `EnvParams`."""
    with constructing():
        return gymnax.make(key[0], **dict(key[1]))


def _is_large(value):
    return isinstance(value, int | float) and not abs(value) <= _LARGEST
