"""dm_env environments (Muldal et al., 2019), such as dm_control's tasks (Tassa et al., 2018, arXiv:1801.00690)."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import Environment, specs
from gymnasium import spaces as foreign

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError
from jaxrl.core.spaces import Space
from jaxrl.core.suites import dm_control_names as names
from jaxrl.core.suites import unknown_name
from jaxrl.envs.host import stepped
from jaxrl.envs.host.conversion import Conversion

type Factory = Callable[..., Environment]


class DmEnvRecipe(stepped.SteppedRecipe):
    """A recipe for a batch of copies of a dm_env environment, which is a dm_control task if there is no `factory`.

    `id` is "dm_control:domain-task", or "dm_env:module:function" with the factory's module and name.
    """

    @classmethod
    def restore(
        cls, name: str, parameters: Mapping[str, Any], observation_space: Space, action_space: Space
    ) -> "DmEnvRecipe":
        """Restore the recipe of a dm_control task from a file; no environment is made until the recipe is built.

        Raises:
          ConfigError: an option contains anything but numbers and plain words, or a value is of the wrong type.
        """
        return cls.restored(f"dm_control:{name}", parameters, observation_space, action_space)

    @classmethod
    def converted(cls, observation_space: Any, action_space: Any, where: str) -> tuple[Conversion, Conversion]:
        specs = {"observation": observation_space, "action": action_space}
        return super().converted(*(_space(what, spec, where) for what, spec in specs.items()), where)

    def spec(self) -> tuple[Any]:
        return _spec(self.name, self.factory)


registry.add("suite", dm_control=DmEnvRecipe)


def make(name: str, **parameters: Any) -> DmEnvRecipe:
    """Return the recipe of dm_control's task `name`, such as "cartpole-balance".

    Args:
      name: "domain-task", as in `dm_control.suite.load`.
      parameters: parameters of `from_dm_env`, of the task (`time_limit=5`), or of every task (`flat_observation`,
        `n_sub_steps`, `control_timestep`, `legacy_step`).

    Raises:
      ConfigError: the name is unknown, or a parameter is wrong.
    """
    if name not in names():
        raise unknown_name("dm_control", name, names())
    return _made(f"dm_control:{name}", None, parameters)


def from_dm_env(factory: Factory, **options: Any) -> DmEnvRecipe:
    """Return a recipe for the environments that `factory` makes, for `jaxrl.train` and `jaxrl.register`.

    A last time step is terminated if its discount is 0, and truncated otherwise. The learner multiplies `gamma` by the
    discounts, unless the `discount_spec` allows only 0 and 1, such as `specs.DiscreteArray(2)`.

    Args:
      factory: a function that makes a `dm_env.Environment`; its parameter `seed` is always passed.
      options: further arguments of `factory`, and

        - `workers`: number of processes that step the environments; 0 (the default) steps them in this process, one
          after another. Workers import `factory`, which must be defined at the top level of a module;
        - `step_timeout`: seconds that one step or reset may take before its worker counts as hung; default 60;
        - `start_timeout`: seconds that a worker may take to start; default 120;
        - `restarts`: number of workers that are replaced before the run stops; default 3;
        - `info`: names of numbers that every step has, to report as training metrics: entries of the observation, or
          of the dictionary that the environment's method `get_info()` returns, if it has this method.

    Raises:
      ConfigError: the environment cannot be made, or its specs are not supported; the message lists supported ones.
    """
    where = f"dm_env:{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', type(factory).__name__)}"
    try:
        taken = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{factory!r:.80} must be a function that makes an environment: {error}") from None
    if not any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        raise ConfigError(f"{where} needs a parameter `seed`, so that the environments of a run differ; add one")
    return _made(where, factory, options)


def _made(where: str, factory: Factory | None, options: dict[str, Any]) -> DmEnvRecipe:
    fields = stepped.stepping(options)
    return DmEnvRecipe.looked_at(where, _spec(where, factory), options, fields, factory=factory)


def _spec(name, factory):
    """Return the tuple from which `worker_program.made` makes an environment, with a task name or a factory."""
    return (name.partition(":")[2] if factory is None else factory,)


# --- specs ---------------------------------------------------------------------------------------------------------

_ALLOWED = {
    "observation": "numeric arrays, or dictionaries of them",
    "action": "an array of floats, a bounded integer, a vector of bounded integers, or a dictionary or tuple of these",
}


def _space(what, spec, where):
    """Convert a dm_env spec to a Gymnasium space."""
    acting, kind = what == "action", spec.dtype.kind if isinstance(spec, specs.Array) else ""
    if isinstance(spec, Mapping):
        return foreign.Dict({name: _space(what, child, f"{where}[{name!r}]") for name, child in spec.items()})
    if acting and isinstance(spec, tuple | list):
        return foreign.Tuple([_space(what, child, f"{where}[{i}]") for i, child in enumerate(spec)])
    if not acting and isinstance(spec, specs.DiscreteArray):
        return foreign.Discrete(spec.num_values)
    whole = isinstance(spec, specs.BoundedArray) and kind in ("i", "u") and len(spec.shape) <= 1
    if not (whole or kind == "f" if acting else kind in ("f", "i", "u", "b")):
        raise ConfigError(
            f"{where} has the {what} spec {spec}, which is not supported; convert it in a wrapper environment to one "
            f"of these: {_ALLOWED[what]}"
        )
    if acting and whole and spec.shape == ():
        low, high = int(spec.minimum), int(spec.maximum)
        return foreign.Discrete(high - low + 1, start=low, dtype=spec.dtype)
    return foreign.MultiBinary(spec.shape) if kind == "b" else _box(spec)


def _box(spec):
    low, high = (-np.inf, np.inf) if spec.dtype.kind == "f" else (np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max)
    if isinstance(spec, specs.BoundedArray):
        low, high = spec.minimum, spec.maximum
    low, high = (np.broadcast_to(np.asarray(bound, spec.dtype), spec.shape) for bound in (low, high))
    return foreign.Box(low, high, spec.shape, spec.dtype.type)
