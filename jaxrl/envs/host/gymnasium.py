"""Gymnasium's environments (Towers et al., 2024, arXiv:2407.17032), in this process or in workers."""

import dataclasses
import functools
import importlib
import inspect
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from jaxrl.core import presentation, registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.spaces import Space
from jaxrl.core.suites import gymnasium_names as names
from jaxrl.core.suites import unknown_name
from jaxrl.envs.host import stepped
from jaxrl.envs.host.stepped import SteppedEnvironment
from jaxrl.envs.suite import arguments_of


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GymnasiumRecipe(stepped.SteppedRecipe):
    """A recipe for a batch of copies of a Gymnasium environment; `options` are passed to `gymnasium.make`.

    `id` is Gymnasium's name, or "module:name" if the user named the module that registers it.

    Args:
      by_hand: whether the user's program made the recipe, so that it may import modules; False if a file contains it.
    """

    by_hand: dataclasses.InitVar[bool] = False

    prefix = "gymnasium:"

    def __post_init__(self, by_hand):
        module, _, name = self.id.rpartition(":")
        if module and module not in sys.modules:  # `make` imports the module; a configuration must not
            raise ConfigError(_module_problem(self.id))
        registered = gymnasium.registry.get(name)
        if not by_hand and registered is not None and "shimmy" in str(registered.entry_point):
            raise ConfigError(
                f"{self.name} runs code of other libraries, which a saved configuration must not do; create the "
                "environment yourself: env=jaxrl.make(...)"
            )

    @property
    def instance(self) -> gymnasium.Env | None:
        """The user's environment instance if the recipe cannot make others, otherwise None."""
        return getattr(self.factory, "instance", None)

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: Space, action_space: Space
    ) -> "GymnasiumRecipe":
        """Restore the recipe from a file; nothing is made or imported until the recipe is built.

        Raises:
          ConfigError: making `name` would import a module or another library, an option contains anything but numbers
            and plain words, or a value is of the wrong type.
        """
        if ":" in name:
            options = {key: x for key, x in parameters.items() if key not in stepped.USUAL or x != stepped.USUAL[key]}
            raise ConfigError(_module_problem(name, options))
        parameters = dict(parameters) | wrapping(parameters.get("wrappers", ()))
        return cls.restored(name, parameters, observation_space, action_space)

    def spec(self) -> Any:
        if self.factory is not None:
            return self.factory
        if "." in self.id and self.id not in gymnasium.registry:
            raise ConfigError(
                f"{self.name} was passed as a Gymnasium environment, class or function, which cannot be restored from "
                "a file; pass it again: env=... in Python; in a shell, register it with Gymnasium and pass "
                "--import MODULE --env gymnasium:ID"
            )
        return _find(self.id)

    def build_rendered(self, seed: int) -> SteppedEnvironment:
        drawn = self.factory is None or _takes_render_mode(self.factory)
        options = self.options | ({"render_mode": "rgb_array"} if drawn else {})
        return replaced(self, options=options, workers=0).build(1, seed)


registry.add("suite", gymnasium=GymnasiumRecipe)


def make(name: str, *, wrappers: Any = (), **options: Any) -> GymnasiumRecipe:
    """Return the recipe of the Gymnasium environment `name`, such as "LunarLander-v3".

    Args:
      name: Gymnasium's name of the environment, or "module:Name-v0" to import a module first.
      wrappers: wrappers to put around the environment, innermost first; see `wrapping`.
      options: options of `stepped.stepping`, such as `info=("reward_ctrl", "x_position")`, and arguments of
        `gymnasium.make`, including those of the environment's constructor.

    Raises:
      ConfigError: the name is unknown, an option is wrong, the environment cannot be made, or its spaces are not
        supported.
    """
    fields = stepped.stepping(options)
    return registered(name, options | wrapping(wrappers), fields)


def registered(name: str, options: dict[str, Any], fields: dict[str, Any]) -> GymnasiumRecipe:
    """Return the recipe of a registered environment; `fields` is a result of `stepped.stepping`."""
    return GymnasiumRecipe.looked_at(name, _find(name), options, fields, by_hand=True)


def replaced(recipe: GymnasiumRecipe, **fields: Any) -> GymnasiumRecipe:
    """Return the recipe with these fields replaced."""
    return dataclasses.replace(recipe, **fields, by_hand=True)


# Wrappers that runs cannot use: the reason and the alternative.
_REFUSED = {
    "HumanRendering": "it opens a window; use jaxrl render",
    "NormalizeObservation": "a resumed run loses its statistics; use the algorithm's normalize_observation",
    "NormalizeReward": "a resumed run loses its statistics; use the algorithm's normalize_reward",
    "RecordVideo": "it writes files while training; use jaxrl render",
}


def wrapping(wrappers: Any) -> dict[str, Any]:
    """Return the option `{"wrappers": ...}` of an environment in a uniform format, or {} if there are no wrappers.

    Args:
      wrappers: one wrapper's name (`"FlattenObservation"` of `gymnasium.wrappers`, `"my_module:Mine"`) or class; a
        mapping from names to dictionaries of arguments; or a sequence of names, classes, `functools.partial`s of
        classes with keyword arguments, and pairs (name, dictionary of arguments).

    Raises:
      ConfigError: `wrappers` has another type, or names a wrapper that runs cannot use.
    """
    several = list(wrappers.items()) if isinstance(wrappers, Mapping) else wrappers
    several = list(several) if isinstance(several, list | tuple) else [several]
    found = tuple(_wrapper(one) for one in several)
    return {"wrappers": found} if found else {}


def _wrapper(one: Any) -> tuple[str, dict[str, Any]]:
    """Return a wrapper's name and arguments, with the types of values read from a file (tuples, not lists)."""
    named, arguments = one if isinstance(one, list | tuple) and len(one) == 2 else (one, {})
    if isinstance(named, functools.partial) and not named.args:
        named, arguments = named.func, named.keywords
    if isinstance(named, type) and issubclass(named, gymnasium.Wrapper) and "<locals>" not in named.__qualname__:
        usual = getattr(gymnasium.wrappers, named.__name__, None) is named
        named = named.__name__ if usual else f"{named.__module__}:{named.__qualname__}"
    if not isinstance(named, str) or not isinstance(arguments, Mapping):
        raise ConfigError(
            f"the wrapper {one!r:.80} must be a gymnasium.Wrapper class that a module defines, or its name "
            "('FlattenObservation', 'my_module:Mine'), optionally with a dictionary of arguments; for anything else "
            "pass a function: env=lambda: Mine(gymnasium.make(...))"
        )
    if named in _REFUSED:
        raise ConfigError(f"the wrapper {named} cannot be used for training: {_REFUSED[named]}")
    return named, {key: _plain(x) for key, x in arguments.items()}


def _plain(value: Any) -> Any:
    """Convert lists to tuples, and NumPy scalars to Python numbers, as in values that were read from a file."""
    value = value.item() if isinstance(value, np.generic) else value
    return tuple(_plain(x) for x in value) if isinstance(value, list | tuple) else value


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a registered environment's constructor and their defaults, without `render_mode`.

    Args:
      name: the environment's registered name, or "module:Name-v0".
    """
    spec = _find(name)
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    try:
        named = arguments_of(creator)
    except (TypeError, ValueError):
        return {}
    named = {name: "required" if default is inspect.Parameter.empty else default for name, default in named.items()}
    found = named | spec.kwargs | {"max_episode_steps": spec.max_episode_steps}
    return {name: default for name, default in found.items() if name != "render_mode"}


def _module_problem(name, options=()):
    assigned = [f"{key}={presentation.text(value)}" for key, value in dict(options).items()]
    words = " ".join(f'"{x}"' if "'" in x and not set(x) & set('"$`\\!') else shlex.quote(x) for x in assigned)
    return (
        f"gymnasium:{name} imports a module, which a saved configuration must not do; create the environment "
        f"yourself: in a shell --env gymnasium:{name}{' --env-params ' * bool(assigned)}{words}, in Python "
        f"env=jaxrl.{presentation.made(f'gymnasium:{name}', dict(options), {})}"
    )


def _find(name: str) -> Any:
    """Return the spec registered under `name`, after importing the module if `name` contains one."""
    module, _, registered = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(registered)
    except gymnasium.error.UnregisteredEnv:
        raise unknown_name("gymnasium", registered, names()) from None
    except Exception as error:  # importing a module may raise anything
        hint = f"; module names cannot contain '-': {module.replace('-', '_')}" if "-" in module else ""
        kind = "" if isinstance(error, gymnasium.error.Error | ImportError) else f"{type(error).__name__}: "
        raise ConfigError(f"gymnasium:{name} cannot be found: {kind}{error}{hint}") from error
    if spec.entry_point is None:
        raise ConfigError(
            f"gymnasium:{name} is only registered as a vectorized environment, which jaxrl cannot step; pass a "
            "function that makes a single environment, and num_envs=N"
        )
    return spec


def _takes_render_mode(factory: Any) -> bool:
    """Return whether an environment's factory has the parameter `render_mode`."""
    if isinstance(factory, gymnasium.envs.registration.EnvSpec):
        return True
    try:
        return "render_mode" in inspect.signature(getattr(factory, "function", factory)).parameters
    except (TypeError, ValueError):
        return False
