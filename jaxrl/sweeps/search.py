"""What a search tries: lists of values, or draws from distributions."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import checked_seed, seed_problems


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Draws uniformly between two numbers."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """Draws between two positive numbers, uniformly in their logarithm."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


_MOST_SEEDS = 1 << 16


def checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    """The seeds of a sweep: so many from 0 on, or those that are given.

    Raises:
      ConfigError: there are none, too many, or one is no seed.
    """
    count = seeds if isinstance(seeds, int) else len(seeds)
    if not 1 <= count <= _MOST_SEEDS:
        raise ConfigError(f"seeds: at least one, and at most {_MOST_SEEDS:,}; these are {count:,}")
    found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if problems := [problem for seed in found for problem in seed_problems("seeds", seed)]:
        raise ConfigError(problems)
    return [checked_seed("seeds", seed) for seed in found]


def configurations(num_samples: int | None, space: Mapping[str, Any], search_seed: int = 0) -> list[dict[str, Any]]:
    """The settings that a sweep tries: the product of the lists, or random draws.

    Args:
      num_samples: None for the full grid; a number for that many random draws, from lists and distributions alike.
      space: by field, a list of values, a single value, or a distribution.
      search_seed: of the draws.

    Raises:
      ConfigError: a distribution without `num_samples`, or an empty list.
    """
    choices = {name: list(v) if isinstance(v, (list, tuple, np.ndarray, range)) else v for name, v in space.items()}
    problems = [f"{name} has no values to try" for name, v in choices.items() if isinstance(v, list) and not v]
    if num_samples is None:
        drawn = [name for name, v in choices.items() if isinstance(v, (Uniform, LogUniform))]
        problems += [f"{name} is a distribution; set the number of draws, such as num_samples=32" for name in drawn]
    elif num_samples < 1:
        problems.append(f"num_samples={num_samples} must be at least 1")
    problems += seed_problems("search_seed", search_seed)
    if problems:
        raise ConfigError(problems)
    if num_samples is None:
        lists = [v if isinstance(v, list) else [v] for v in choices.values()]
        return [dict(zip(choices, values, strict=True)) for values in itertools.product(*lists)]
    rng = np.random.default_rng(checked_seed("search_seed", search_seed))

    def draw(v):
        if isinstance(v, (Uniform, LogUniform)):
            return v.draw(rng)
        return v[int(rng.integers(len(v)))] if isinstance(v, list) else v

    return [{name: draw(v) for name, v in choices.items()} for _ in range(num_samples)]
