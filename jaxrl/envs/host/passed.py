"""Recipes of Gymnasium environments that a program passes: an instance, a class, or a function that makes one."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from jaxrl.core.errors import ConfigError
from jaxrl.envs.host import gymnasium as adapter
from jaxrl.envs.host import stepped

# The instances in use, keyed by the `id` of the unwrapped environment.
_playing: weakref.WeakValueDictionary[int, gymnasium.Env] = weakref.WeakValueDictionary()


def recipe(
    env: gymnasium.Env | Callable[..., gymnasium.Env], *, wrappers: Any = (), **options: Any
) -> adapter.GymnasiumRecipe:
    """Return the recipe of a Gymnasium environment that is an instance, a class or a function.

    Args:
      env: a class or a function, which is called once for each environment; or an instance, which is made again from
        its `spec`. If an instance has no usable `spec`, the recipe can only use the instance itself.
      wrappers: as for `make`.
      options: options of `stepped.stepping`, as for `make`, and arguments of the class or function.

    Raises:
      ConfigError: the environment is vectorized, cannot be made or sent to workers, or has spaces that are not
        supported.
    """
    if issubclass(_class_of(env), VectorEnv):
        spec = getattr(env, "spec", None)
        one = (
            f"'gymnasium:{spec.id}'"
            if spec is not None
            else "the class of one environment or a function that makes one"
        )
        raise ConfigError(
            f"{_class_of(env).__name__} is a vectorized environment; pass {one}, and num_envs=N; workers=M steps them "
            "in M processes"
        )
    fields = stepped.stepping(options)
    if not isinstance(env, gymnasium.Env):
        return _of_function(env, options | adapter.wrapping(wrappers), fields)
    name = _name(type(env.unwrapped))
    if wrappers or options:
        names = ", ".join([*options, *["wrappers"] * bool(wrappers)])
        raise ConfigError(f"{names}: gymnasium:{name} was already made; pass its class or a function instead")
    spec = _spec(env)
    if spec is None:
        if fields["workers"]:
            raise ConfigError(f"workers={fields['workers']}: gymnasium:{name} is {_ONE}; pass {instead(env)}")
        return _looked_at(name, Instance(env), {}, fields)
    known = _registered_options(spec)
    if known is not None:
        return adapter.registered(spec.id, known, fields)
    return _looked_at(name, spec, {}, fields)


_ONE = "a single environment, and its spec does not allow making another"


def instead(env: gymnasium.Env) -> str:
    """Return a hint that names what to pass instead of the instance `env`."""
    name = type(env.unwrapped).__name__
    return f"the class {name}, or a function that makes one: lambda: {name}(...)"


class Instance:
    """A factory that returns the user's environment to one batch at a time, and never closes or copies it.

    Args:
      env: the user's environment.
    """

    def __init__(self, env: gymnasium.Env):
        self.instance = env

    def __call__(self) -> gymnasium.Env:
        own = self.instance.unwrapped
        if _playing.get(id(own)) is own:
            raise ConfigError(
                f"{type(own).__name__} is {_ONE}, but two are needed at the same time; pass {instead(own)}"
            )
        _playing[id(own)] = own
        return _Lent(self.instance)

    def __reduce__(self):
        raise ConfigError(
            f"{type(self.instance.unwrapped).__name__} is {_ONE}, so it cannot be copied to another process; pass "
            f"{instead(self.instance)}"
        )


class _Lent(gymnasium.Wrapper):
    """A wrapper of the user's environment, whose `close` makes the environment available to another batch."""

    def close(self):
        _playing.pop(id(self.env.unwrapped), None)


class Another:
    """A factory that calls a function, and checks that each call returns a new environment.

    Args:
      function: a function that makes an environment.

    Attributes:
      function: the same function.
      makes: the class of the newest environment, without wrappers; None before the first call.
    """

    def __init__(self, function: Callable[..., gymnasium.Env]):
        self.function, self.makes = function, None
        self._made: weakref.WeakValueDictionary[int, gymnasium.Env] = weakref.WeakValueDictionary()

    def __call__(self, **options: Any) -> gymnasium.Env:
        env = self.function(**options)
        if isinstance(env, gymnasium.Env):
            own = env.unwrapped
            if self._made.get(id(own)) is own:
                raise ConfigError(
                    f"the function that makes {type(own).__name__} returned the same environment twice; make a new one "
                    f"in every call: lambda: {type(own).__name__}(...)"
                )
            self._made[id(own)], self.makes = own, type(own)
        return env

    def __reduce__(self):
        return Another, (self.function,)


def _of_function(function, options, fields):
    cls = _class_of(function)
    named = function if hasattr(function, "__qualname__") else cls
    if fields["workers"]:
        return _looked_at(_name(named), function, options, fields)
    factory = Another(function)
    found = _looked_at(_name(named), factory, options, fields)
    if isinstance(function, type) or (named is function and "<lambda>" not in function.__qualname__):
        return found
    return adapter.replaced(found, id=_name(factory.makes))  # the function has no name


def _looked_at(name, factory, options, fields):
    return adapter.GymnasiumRecipe.looked_at(name, factory, options, fields, factory=factory, by_hand=True)


def _class_of(env):
    return env if isinstance(env, type) else type(env)


def _name(named):
    return f"{named.__module__}.{named.__qualname__}".replace("<locals>.", "")


def _spec(env):
    """Return a spec that `gymnasium.make` can use to make the environment again, or None if there is none."""
    try:
        spec = env.spec
    except Exception:  # a wrapper may raise anything
        return None
    if not isinstance(spec, EnvSpec) or spec.entry_point is None:
        return None
    if any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
        return None
    layer, limited = env, False
    while isinstance(layer, gymnasium.Wrapper):
        limited, layer = limited or isinstance(layer, gymnasium.wrappers.TimeLimit), layer.env
    if spec.max_episode_steps is not None and not limited:  # the user removed the limit
        spec = copy.deepcopy(spec)
        spec.max_episode_steps = None
    return spec


def _registered_options(spec):
    """Return the arguments with which `jaxrl.make("gymnasium:ID")` makes the same environment; None if it cannot."""
    known = gymnasium.registry.get(spec.id)
    if known is None or known.entry_point != spec.entry_point or spec.additional_wrappers:
        return None
    if known.additional_wrappers or known.kwargs.keys() - spec.kwargs.keys():
        return None
    limit = spec.max_episode_steps
    if limit is None and known.max_episode_steps is not None:
        return None
    options = {key: x for key, x in spec.kwargs.items() if not _same(x, known.kwargs.get(key))}
    return options | ({} if limit == known.max_episode_steps else {"max_episode_steps": limit})


def _same(one, other):
    try:
        return bool(one == other)
    except Exception:  # such as arrays
        return False
