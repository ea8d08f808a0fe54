"""The search spaces of a sweep: lists of values, or distributions to sample from."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import checked_seed, count_problems, number_problems, seed_problems, whole
from jaxrl.core.presentation import text


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The uniform distribution between two numbers."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """The distribution between two positive numbers that is uniform in the logarithm."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


Distribution = Uniform | LogUniform
_LISTS = (list, tuple, np.ndarray, range)
_MOST_SEEDS = 1 << 16


def checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a sweep: the given number of them, from 0 on, or the seeds in the list.

    Raises:
      ConfigError: there are none or too many, one is not a seed, or one occurs twice.
    """
    seeds = whole(seeds)
    if isinstance(seeds, str | bool | float) or not isinstance(seeds, int | Iterable):
        raise ConfigError(f"seeds={seeds!r:.80} must be a whole number, or a list of seeds")
    count = seeds if isinstance(seeds, int) else len(seeds := list(seeds))
    if not 1 <= count <= _MOST_SEEDS:
        raise ConfigError(f"seeds: at least one, and at most {_MOST_SEEDS:,}; these are {count:,}")
    found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    problems = [problem for seed in found for problem in seed_problems("seeds", seed)]
    problems += _repeated("seeds", found)
    if problems:
        raise ConfigError(problems)
    return [checked_seed("seeds", seed) for seed in found]


def range_problems(name: str, values: Any) -> list[str]:
    """Explain why a distribution cannot be sampled, or a list has no values; empty if there is no problem."""
    if isinstance(values, Distribution):
        logarithmic = isinstance(values, LogUniform)
        ends = [end for end in (values.low, values.high) if not number_problems(name, end)]
        if len(ends) == 2 and (0.0 if logarithmic else -math.inf) < values.low < values.high < math.inf:
            return []
        return [f"{name}={values}: the ends must be finite, {'0 < ' if logarithmic else ''}low < high"]
    return [f"{name} has no values to try"] if isinstance(values, list | tuple) and not values else []


def _repeated(name: str, values: list[Any]) -> list[str]:
    """Explain which values occur twice, and so would count one run as two."""
    counts = collections.Counter(text(value) for value in values)
    return [f"{name}: {found} is there twice; name each once" for found, count in counts.items() if count > 1]


def configurations(num_samples: int | None, space: Mapping[str, Any], search_seed: int = 0) -> list[dict[str, Any]]:
    """Return the settings that a sweep tries: the product of the lists, or random samples.

    Args:
      num_samples: None for the full grid; a number for that many random samples, from both lists and distributions.
      space: by field, a list of values, a single value, or a distribution.
      search_seed: seed of the samples.

    Raises:
      ConfigError: a distribution without `num_samples` or with wrong ends, an empty list, or a setting that would be
        tried twice.
    """
    choices = {
        name: v if isinstance(v, Distribution) else list(v) if isinstance(v, _LISTS) else [v]
        for name, v in space.items()
    }
    drawn = [name for name, v in choices.items() if isinstance(v, Distribution)]
    problems = [problem for name, v in choices.items() for problem in range_problems(name, v)]
    problems += [problem for name, v in choices.items() if name not in drawn for problem in _repeated(name, v)]
    problems += count_problems(num_samples=(num_samples, 1)) + seed_problems("search_seed", search_seed)
    if num_samples is None:
        problems += [f"{name} is a distribution; set the number of draws, such as num_samples=32" for name in drawn]
    elif not problems and not drawn:
        different = math.prod(map(len, choices.values()))
        if num_samples > different:
            problems.append(
                f"num_samples={num_samples} of {different} different settings would try some twice; leave num_samples "
                "out to try each once"
            )
    if problems:
        raise ConfigError(problems)
    if num_samples is None:
        return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    rng = np.random.default_rng(checked_seed("search_seed", search_seed))

    def draw(v):
        return v.draw(rng) if isinstance(v, Distribution) else v[int(rng.integers(len(v)))]

    return [{name: draw(v) for name, v in choices.items()} for _ in range(num_samples)]
