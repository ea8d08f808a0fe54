"""gymnax environments (Lange, 2022, github.com/RobertTLange/gymnax), version 1.x, without auto-reset."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.core.errors import ConfigError
from jaxrl.core.types import PyTree
from jaxrl.envs import gymnax_rules as rules
from jaxrl.envs.gymnax_import import import_gymnax
from jaxrl.envs.suite import Key, LibraryEnv, Step, add_suite, arguments_of, equal, made_once

gymnax: Any = import_gymnax()

NEEDS_DOWNLOAD = ("MNISTBandit-bsuite",)


class GymnaxEnvironment(LibraryEnv):
    """A gymnax environment.

    The leaves are those of gymnax's `EnvParams`. The spaces are computed from the numbers passed to `make`; they ignore
    arrays to map over, and do not change if leaves are replaced later. Derived parameters (`gymnax_rules.DERIVED`) are
    recomputed whenever an environment is built, or rebuilt from leaves. They are not computed at every step, because
    XLA would then fuse operations differently, which changes the last bit of results.
    """

    params: PyTree

    suite = "gymnax"
    ranges = rules.LIMITS
    largest = 2_048  # DeepSea makes arrays of shape (size, size)

    def __post_init__(self):
        object.__setattr__(self, "params", rules.settled(self.key[0], self.params))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of gymnax's environments that do not download data, including those registered by users."""
        return tuple(n for n in gymnax.registered_envs if n not in NEEDS_DOWNLOAD)

    @classmethod
    def static_parameters(cls, name: str) -> Mapping[str, Any]:
        """Return the constructor's arguments, which change shapes or the compiled program, with their defaults."""
        return arguments_of(gymnax.registration._registry[name])

    @classmethod
    def default(cls, key: Key) -> "GymnaxEnvironment":
        env, params = foreign(key)
        return cls(params=params, key=key, **rules.spaces_of(key[0], env, params))

    @classmethod
    def check(cls, name: str, parameters: Mapping[str, Any]) -> None:
        if name in NEEDS_DOWNLOAD:
            raise ConfigError(f"gymnax:{name} needs a download, but jaxrl downloads nothing at run time")
        super().check(name, parameters)

    def with_spaces(self) -> "GymnaxEnvironment":
        return self.replace(**rules.spaces_of(self.key[0], foreign(self.key)[0], self.params))

    def contradictions(self, changed: Mapping[str, Any]) -> list[str]:
        derived = rules.DERIVED.get(self.key[0], {})
        return super().contradictions(changed) + [
            f"{name}={value!r:.80} of {self.name} is computed as {derived[name].equation} = {result!r:.80}; set those "
            "parameters instead"
            for name, value in changed.items()
            if name in derived and not equal(value, result := getattr(self.params, name))
        ]

    def without_effect(self) -> frozenset[str]:
        useless = super().without_effect() | rules.WITHOUT_EFFECT.get(self.key[0], frozenset())
        return useless - set(rules.DERIVED.get(self.key[0], ()))

    def idle(self) -> Mapping[str, str]:
        return rules.idle(self.key[0], {**self.static_parameters(self.key[0]), **self.parameters})

    def begin(self, key: jax.Array) -> tuple[PyTree, Step]:
        observation, state = foreign(self.key)[0].reset_env(key, self.params)
        return state, Step(observation)

    def advance(self, state: PyTree, action: PyTree, key: jax.Array) -> tuple[PyTree, Step]:
        env = foreign(self.key)[0]
        # `step_env`, because `step` resets at every step and hides the last observation.
        observation, state, reward, terminated, info = env.step_env(key, state, action, self.params)
        reported = {name: x for name, x in info.items() if name != "discount"}
        truncated = env.is_truncated(state, self.params)
        return state, Step(observation, reward, terminated, truncated, info=reported)


names, make = add_suite(GymnaxEnvironment)


@made_once
def foreign(key: Key) -> tuple[Any, Any]:
    """Return gymnax's environment for `key` and its default `EnvParams`."""
    return gymnax.make(key[0], **dict(key[1]))
