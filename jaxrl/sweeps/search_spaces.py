"""Search spaces of `jaxrl.tune` and `jaxrl.pbt`: default ranges of fields, and overrides by the caller.

All fields with default ranges are traced, so all trials of a study share one compiled program.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl.algos.base import field_problems, has_effect, replace
from jaxrl.core.errors import ConfigError
from jaxrl.core.schedules import is_schedule
from jaxrl.core.types import Algorithm
from jaxrl.sweeps.distributions import Distribution, LogUniform, Uniform, range_problems

Range = Distribution | list[Any] | tuple[Any, ...]

_RATE = LogUniform(1e-5, 1e-2)
# Default ranges by field, for every algorithm that has the field.
RANGES: dict[str, Range] = {
    "learning_rate": _RATE,
    "policy_learning_rate": _RATE,
    "temperature.learning_rate": _RATE,
    "gamma": (0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
    "tau": LogUniform(1e-3, 5e-2),
    "entropy_cost": LogUniform(1e-8, 0.1),
    "value_cost": Uniform(0.2, 1.0),
    "gae_lambda": Uniform(0.8, 1.0),
    "trace_lambda": Uniform(0.8, 1.0),
    "return_lambda": Uniform(0.0, 1.0),
    "max_grad_norm": LogUniform(0.3, 50.0),
    "clip": Uniform(0.1, 0.4),
    "alpha": LogUniform(0.5, 10.0),
    "coefficient": LogUniform(0.1, 10.0),
    "expectile": Uniform(0.5, 0.95),
    "inverse_temperature": LogUniform(0.5, 10.0),
    "noise.std": Uniform(0.05, 0.5),
    "target_noise": Uniform(0.05, 0.4),
    "prioritized.exponent": Uniform(0.0, 1.0),
    "tree_search.epsilon": Uniform(0.0, 0.5),
    "kl_limits.learning_rate": LogUniform(1e-3, 0.1),
    "kl_limits.epsilon": LogUniform(0.02, 0.5),
    "kl_limits.epsilon_mean": LogUniform(5e-4, 0.1),
}
# Further and other ranges by algorithm; an empty one leaves the field out.
_OF_ALGORITHMS: dict[str, dict[str, Range]] = {
    "crossq": {"tau": ()},
    "crr": {"tau": (), "temperature": LogUniform(0.1, 10.0)},
    "dqn": {"target_update": LogUniform(0.01, 1.0)},
    "dreamer": {"learning_rate": LogUniform(1e-5, 1e-3), "entropy_cost": LogUniform(1e-5, 1e-2)},
    "mpo": {"tau": ()},
    "r2d2": {"epsilon": Uniform(0.05, 0.6)},
    "vmpo": {"entropy_cost": ()},
}


def _is_open(algo: Algorithm, default: Algorithm, path: str) -> bool:
    """Return whether the setting at a dotted path exists, has an effect and its default value."""
    part, _, name = path.rpartition(".")
    owner, own = (getattr(thing, part, None) if part else thing for thing in (algo, default))
    if owner is None or not hasattr(owner, name) or not has_effect(owner, name, algo):
        return False
    return getattr(owner, name) == getattr(own or owner, name)


def search_space(
    algo: Algorithm, overrides: Mapping[str, Any], *, schedules: bool = False
) -> tuple[dict[str, Any], dict[str, Range]]:
    """Return the fixed fields with their values, and the fields to search with their ranges.

    A field with a default range is searched if it has its default value in `algo` and affects this algorithm.

    Args:
      algo: the algorithm to tune.
      overrides: for each field, a range or a list that replaces the default range, or a single value that fixes the
        field.
      schedules: whether a list may contain schedules.

    Raises:
      ConfigError: a field does not exist or cannot have one of its values, or there are no fields to search.
    """
    default = type(algo)()
    table = RANGES | _OF_ALGORITHMS.get(type(algo).__name__.lower(), {})
    space = {path: values for path, values in table.items() if values and _is_open(algo, default, path)}
    space |= {name: list(values) if isinstance(values, range) else values for name, values in overrides.items()}
    fixed = {name: value for name, value in space.items() if not isinstance(value, Distribution | list | tuple)}
    ranges = {name: values for name, values in space.items() if name not in fixed}
    problems = field_problems(replace(algo, **fixed))
    for name, values in ranges.items():
        problems += range_problems(name, values)
        tried = ends(values)
        if isinstance(values, Distribution):
            if not problems:  # an integer field may accept the two ends but no values between them
                tried.append(values.low + 0.3 * (values.high - values.low))
        else:
            problems += [
                f"{name}={value!r:.80}: a study can only store numbers, text, True, False and None"
                for value in values
                if not isinstance(value, bool | int | float | str | None) and not (schedules and is_schedule(value))
            ]
        for value in tried:
            problems += field_problems(replace(algo, **fixed | {name: value}))
    if not ranges:
        problems.append(
            f"nothing to search: no field of {type(algo).__name__} has a range; set one, such as "
            "learning_rate=LogUniform(1e-5, 1e-2) or --space learning_rate=log:1e-5:1e-2"
        )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return fixed, ranges


def ends(values: Range) -> list[Any]:
    """Return the values of a list, or the two ends of a distribution."""
    return [values.low, values.high] if isinstance(values, Distribution) else list(values)
