"""Search spaces of a sweep: lists of values, and distributions to sample from."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import checked_seed, number_problems, seed_problems, whole
from jaxrl.core.presentation import text


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A uniform distribution between two numbers."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        """Return a sample."""
        return float(rng.uniform(self.low, self.high))


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """A log-uniform distribution between two positive numbers."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        """Return a sample."""
        return float(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


Distribution = Uniform | LogUniform
# Limits of arguments that are counts.
COUNTS = dict.fromkeys(
    ("total_steps", "num_envs", "num_samples", "points", "devices", "runs", "max_concurrent")
    + ("evaluation_episodes", "evaluate_every", "checkpoint_every", "exploit_every"),
    {"low": 1},
)
MOST_TRIALS = 20_000  # maximum number in a search; limited by the file size and by the time that Optuna takes to choose
_LISTS = (list, tuple, np.ndarray, range)
_MOST_SEEDS = 1 << 16


def checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a sweep: the given number of seeds, starting from 0, or the seeds in the list.

    Raises:
      ConfigError: there are no seeds or too many, one is not a seed, or one occurs twice.
    """
    seeds = whole(seeds)
    if isinstance(seeds, str | bool | float) or not isinstance(seeds, int | Iterable):
        raise ConfigError(f"seeds={seeds!r:.80} must be a number of seeds or a list of seeds")
    found = list(range(min(seeds, _MOST_SEEDS + 1)) if isinstance(seeds, int) else seeds)
    if not 1 <= len(found) <= _MOST_SEEDS:
        raise ConfigError(f"seeds={seeds!r:.80}: use at least 1 and at most {_MOST_SEEDS:,} seeds")
    problems = [problem for seed in found for problem in seed_problems("seeds", seed)]
    if problems := problems + _repeated("seeds", found):
        raise ConfigError(problems)
    return [checked_seed("seeds", seed) for seed in found]


def range_problems(name: str, values: Any) -> list[str]:
    """Return a list that contains an error message if `values` is an empty list or an invalid distribution."""
    if isinstance(values, Distribution):
        logarithmic = isinstance(values, LogUniform)
        ends = [end for end in (values.low, values.high) if not number_problems(name, end)]
        if len(ends) == 2 and (0.0 if logarithmic else -math.inf) < values.low < values.high < math.inf:
            return []
        return [f"{name}={values}: low and high must be finite, with {'0 < ' if logarithmic else ''}low < high"]
    return [f"{name} is an empty list"] if isinstance(values, list | tuple) and not values else []


def _repeated(name: str, values: list[Any]) -> list[str]:
    """Return one error message for each value that occurs twice, because its run would be counted twice."""
    counts = collections.Counter(text(value) for value in values)
    return [f"{name}: {found} occurs {count} times; list it once" for found, count in counts.items() if count > 1]


def configurations(num_samples: int | None, space: Mapping[str, Any], search_seed: int = 0) -> list[dict[str, Any]]:
    """Return the configurations of a sweep: all combinations of the lists' values, or random samples.

    Args:
      num_samples: number of random samples from the lists and distributions; None: all combinations.
      space: the values to try for each field: a list, a single value, or a distribution.
      search_seed: seed of the samples.

    Raises:
      ConfigError: a distribution without `num_samples` or with invalid limits, an empty list, or a configuration that
        would be tried twice.
    """
    choices = {
        name: v if isinstance(v, Distribution) else list(v) if isinstance(v, _LISTS) else [v]
        for name, v in space.items()
    }
    drawn = [name for name, v in choices.items() if isinstance(v, Distribution)]
    problems = [problem for name, v in choices.items() for problem in range_problems(name, v)]
    problems += [problem for name, v in choices.items() if name not in drawn for problem in _repeated(name, v)]
    if num_samples is None:
        problems += [f"{name} is a distribution; set the number of samples, such as num_samples=32" for name in drawn]
    elif not problems and not drawn and num_samples > (different := math.prod(map(len, choices.values()))):
        problems.append(
            f"num_samples={num_samples} is more than the {different} different configurations; remove num_samples to "
            "try each configuration once"
        )
    if problems:
        raise ConfigError(problems)
    if num_samples is None:
        return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    rng = np.random.default_rng(checked_seed("search_seed", search_seed))

    def draw(v):
        return v.draw(rng) if isinstance(v, Distribution) else v[int(rng.integers(len(v)))]

    return [{name: draw(v) for name, v in choices.items()} for _ in range(num_samples)]
