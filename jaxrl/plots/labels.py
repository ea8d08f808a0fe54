"""Labels of curves: the algorithm, the settings in which configurations differ, and the number of seeds."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.core import registry
from jaxrl.core.errors import ConfigError

EVALUATION, TRAINING = "evaluation/return_mean", "train/return_mean"
_SPACES = (("environment", "observation_space"), ("environment", "action_space"))  # determined by other settings
_WRITTEN = {"float", "dtype", "registered", "opaque"}  # keys of single values in files, such as {"float": "inf"}
LARGEST = 1e300  # largest value used as a number; NaN, infinities and larger numbers are used as text
_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Run:
    """A run for plotting: its name, its configuration and the rows of its metrics.

    Runs of the same configuration form one curve, so settings that may differ within a curve are left out of `config`.

    Attributes:
      name: name of the run directory.
      config: configuration as in `config.json`, without the seed.
      rows: rows of metrics by name, each with its "step".
      seed: the seed, if known.
      place: location of the run: its directory, or the directory of its sweep with its configuration and seed. Runs in
        the same place count once; runs in different places count separately, even if their contents are equal.
      member: name of the run in a population. A member has a separate curve, since its settings changed during
        training.
    """

    name: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    seed: int | None = None
    place: Hashable = dataclasses.field(default_factory=object, compare=False)
    member: str = ""

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the finite values of a metric and their steps, in ascending order of steps; may be empty arrays."""
        points = {row["step"]: row[metric] for row in self.rows if row.get(metric) is not None}
        steps, values = np.array(sorted(points.items()), float).reshape(-1, 2).T
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def final_metrics(self) -> dict[str, float]:
        """Return the last finite value of every metric."""
        pairs = (pair for row in self.rows for pair in row.items())
        found = {name: float(value) for name, value in pairs if isinstance(value, int | float) and np.isfinite(value)}
        return {name: value for name, value in found.items() if name not in ("step", "seconds")}

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, such as "PPO"; empty if the configuration has none."""
        name = _mapping(self.config, "algorithm").get("type")
        if not isinstance(name, str):
            return ""
        if name.startswith("algorithm:"):
            with contextlib.suppress(ConfigError):  # the algorithm is not one of jaxrl's
                return registry.find(name).__name__
        return name.rpartition(":")[2].upper()

    @property
    def environment(self) -> str:
        """The name of the environment, such as "gymnax:CartPole-v1"; empty if the configuration has none."""
        environment = _mapping(self.config, "environment")
        return ":".join(str(environment[key]) for key in ("suite", "name") if environment.get(key))

    @property
    def title(self) -> str:
        """The algorithm and the environment that the configuration names, such as "PPO on gymnax:CartPole-v1"."""
        return " on ".join(filter(None, (self.algorithm, self.environment)))


@dataclasses.dataclass
class Group:
    """The runs of one configuration.

    Attributes:
      runs: the runs, at least one.
      settings: name and text of each setting in which the group differs from others of the same algorithm and
        environment.
      style: index of the style of its curves; groups of one label in several environments share it.
    """

    runs: list[Run]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    style: int = 0


def once(found: Iterable[tuple[Hashable, Any]]) -> list[Any]:
    """Return the first item for each place, given pairs `(place, item)`."""
    items: dict[Hashable, Any] = {}
    for place, item in found:
        items.setdefault(place, item)
    return list(items.values())


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs by configuration, in the order in which configurations first appear."""
    groups: dict[Hashable, Group] = {}
    for run in runs:
        groups.setdefault(run.member or frozen(run.config), Group([])).runs.append(run)
    found = list(groups.values())
    by_name: dict[tuple[str, str], list[Group]] = {}
    for group in found:
        by_name.setdefault((group.runs[0].title, group.runs[0].member), []).append(group)
    for members in by_name.values():
        for group, settings in zip(members, _differences([group.runs[0].config for group in members]), strict=True):
            group.settings |= {name: text for name, (_, text) in settings.items()}
    names = labels(found)
    for group, name in zip(found, names, strict=True):
        group.style = list(dict.fromkeys(names)).index(name)
    return found


def labels(groups: Sequence[Group]) -> list[str]:
    """Return one label per group, unique within each environment, of what differs between the groups."""
    named = len({group.runs[0].algorithm for group in groups}) > 1 or not all(group.settings for group in groups)
    found = []
    for group in groups:
        run, settings = group.runs[0], [f"{name}={text}" for name, text in group.settings.items()]
        first = run.algorithm or run.name if named else ""
        found.append(", ".join(filter(None, [first, *settings, run.member])))
    return found


def title(runs: Sequence[Run]) -> str:
    """Return a title with the algorithm if all runs share it, and with the environment if all runs share it."""
    algorithms, environments = {run.algorithm for run in runs}, {run.environment for run in runs}
    shared = (found.pop() if len(found) == 1 else "" for found in (algorithms, environments))
    return " on ".join(filter(None, shared))


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the differing settings of each configuration, as numbers if possible, otherwise as text."""
    return [
        {
            name: value if isinstance(value, bool | int | float) and abs(value) <= LARGEST else text
            for name, (value, text) in settings.items()
        }
        for settings in _differences(configs)
    ]


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, tuple[Any, str]]]:
    """Return the value and the text of each differing setting, for each configuration."""
    found = list(_differing(configs, ()))
    differences = [entry for entry in found if entry[0][:2] not in _SPACES] or found
    settings: list[dict[str, tuple[Any, str]]] = [{} for _ in configs]
    for name, (_, values) in zip(unique_names([path for path, _ in differences]), differences, strict=True):
        for one, value, text in zip(settings, values, _texts(values), strict=True):
            if text is not None:
                one[name] = value, text
    return settings


def _differing(values: Sequence[Any], path: tuple[str, ...]):
    """Yield the path and the values of every setting that differs; the value is `_ABSENT` where there is none."""
    if len({frozen(value) for value in values}) == 1:
        return
    trees = [_as_mapping(value) for value in values]
    types = {None if tree is None else frozen(tree.get("type")) for tree in trees}
    lengths = {len(value) for value in values if isinstance(value, list | tuple)}
    if any(tree is None for tree in trees) or len(types) > 1 or len(lengths) > 1:
        yield path, values
        return
    for name in dict.fromkeys(itertools.chain.from_iterable(tree for tree in trees if tree is not None)):
        yield from _differing([tree.get(name, _ABSENT) for tree in trees if tree is not None], (*path, name))


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """Return a nested part as a mapping, or None for a single value."""
    if isinstance(value, Mapping) and not (len(value) == 1 and set(value) <= _WRITTEN):
        return value
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return {str(place): item for place, item in enumerate(value)}
    return None


def _texts(values: Sequence[Any]) -> list[str | None]:
    """Return the shortest texts that distinguish different values; None for absent values."""
    different = len({frozen(value) for value in values if value is not _ABSENT})
    texts: list[str | None] = []
    for digits in (3, 4, 6, 9, 17, 0):
        texts = [None if value is _ABSENT else _text(value, digits, brief=digits == 3) for value in values]
        if len({text for text in texts if text is not None}) == different:
            break
    return texts


def _text(value: Any, digits: int, brief: bool) -> str:
    if isinstance(value, float):
        return repr(value) if digits == 0 else f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        if len(value) == 1 and set(value) <= _WRITTEN:
            return _text(next(iter(value.values())), digits, brief)
        name = str(value.get("type", "")).rpartition(":")[2]
        inner = [_text(item, digits, brief) for key, item in value.items() if key != "type"]
        numbers = all(not isinstance(item, Mapping | list | tuple) for item in value.values())
        return f"{name}({', '.join(inner)})" if numbers or not brief else name
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(item, digits, brief) for item in value)})"
    return str(value)


def unique_names(paths: Sequence[tuple[str, ...]], joint: str = ".") -> list[str]:
    """Return the shortest suffix of each path that distinguishes it from the others, joined by `joint`."""
    counts = collections.Counter(path[-size:] for path in paths for size in range(1, len(path)))
    names = []
    for path in paths:
        size = next((size for size in range(1, len(path)) if counts[path[-size:]] == 1), len(path))
        names.append(joint.join(path[-size:]))
    return names


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def frozen(value: Any) -> Hashable:
    """Convert a value to a hashable one for comparison; 1 and 1.0 are equal, True and 1 are not."""
    if isinstance(value, Mapping):
        return ("mapping", *sorted((str(key), frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", *map(frozen, value))
    return repr(float(value)) if type(value) is int and abs(value) < 1 << 53 else repr(value)
