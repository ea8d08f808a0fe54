"""A report of a dataset's contents, as numbers and a text histogram."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxrl.data import episodes as rules
from jaxrl.data.episodes import Episode

_BARS, _WIDTH = 12, 40  # of the histogram
LAST_REWARD = (
    "have a reward at their last step, which has no meaning in RLDS and is ignored; to use it, load the dataset with "
    "last_step='transition'"
)
NO_REWARD = "every reward is 0"
_ABSENT = {
    "observation": "the data cannot be used for learning",
    "action": "the data cannot be used for learning",
    "reward": "each counts as 0",
    "discount": "it follows from is_terminal",
    "is_terminal": "an episode counts as terminated if the discount before its last step is 0",
}


@dataclasses.dataclass(frozen=True)
class FieldSummary:
    """A summary of one array over all steps, without the last steps' unused actions, rewards and discounts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a dataset; `print` shows them.

    Attributes:
      returns, lengths: one entry for each sound episode.
      endings: number of episodes that were terminated, truncated and cut off; datasets of other programs do not
        distinguish the last two.
      fields: the arrays of the steps.
      faults: problems, one line each.
      notes: allowed but possibly unintended contents, one line each.
    """

    path: str
    episodes: int
    returns: np.ndarray
    lengths: np.ndarray
    endings: dict[str, int]
    fields: list[FieldSummary]
    faults: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def transitions(self) -> int:
        return int(self.lengths.sum())

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.episodes:,} episodes, {self.transitions:,} transitions"]
        if self.returns.size:
            lines += [
                ", ".join(f"{count:,} {name}" for name, count in sorted(self.endings.items())),
                _spread("return", self.returns),
                *_histogram(self.returns),
                _spread("length", self.lengths),
                "",
            ]
        width = max((len(field.name) for field in self.fields), default=0)
        for field in self.fields:
            span = f"{field.low:.6g} to {field.high:.6g}" if np.isfinite([field.low, field.high]).all() else ""
            lines.append(f"{field.name.ljust(width)}  {field.dtype} {field.shape}  {span}".rstrip())
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        lines += ["", *(f"fault: {fault}" for fault in self.faults)] if self.faults else ["", "no errors found"]
        return "\n".join(lines)


def _spread(name, x):
    return f"{name}: mean {x.mean():.6g}, deviation {x.std():.6g}, from {x.min():.6g} to {x.max():.6g}"


def _histogram(x):
    """Return a text histogram, one line per bin."""
    x = x[np.isfinite(x)]
    if not x.size or x.min() == x.max():
        return []
    counts, edges = np.histogram(x, bins=_BARS)
    return [
        f"  {low:>12.6g}  {'█' * round(_WIDTH * count / counts.max())} {count}"
        for low, count in zip(edges[:-1], counts, strict=True)
    ]


class Tally:
    """An accumulator of episodes for a `Report`."""

    def __init__(self):
        self.faults: list[str] = []
        self._last_rewards, self._rewarded = 0, False
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._endings: Counter[str] = Counter()
        self._seen: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def add(self, index: int, episode: Episode) -> None:
        found = rules.non_finite(episode) + rules.discount_problems(episode)
        self.faults += [f"episode {index}: {field} {what}" for field, what in found]
        self._last_rewards += bool(episode.reward[-1])
        self._rewarded |= bool(episode.reward[:-1].any())
        self._returns.append(episode.episode_return)
        self._lengths.append(episode.length)
        implied = rules.TERMINATED if episode.is_terminal[-1] else "not terminated"
        self._endings[str(episode.metadata.get("ending", implied))] += 1
        for path, x in jax.tree.leaves_with_path(rules.meaningful(episode)):
            name = rules.field_name("", path)
            self._seen.setdefault(name, (x.dtype, x.shape[1:]))
            if x.dtype.kind not in "SUO" and x.size:
                low, high = self._ranges.get(name, (np.inf, -np.inf))
                self._ranges[name] = min(low, float(x.min())), max(high, float(x.max()))

    def report(self, path: str, episodes: int, absent: tuple[str, ...] = ()) -> Report:
        nowhere = (np.nan, np.nan)
        fields = [
            FieldSummary(name, str(dtype), shape, *self._ranges.get(name, nowhere))
            for name, (dtype, shape) in self._seen.items()
        ]
        returns, lengths = np.asarray(self._returns, np.float64), np.asarray(self._lengths, np.int64)
        notes = [f"the steps have no {name}; {_ABSENT[name]}" for name in absent]
        if self._last_rewards:
            notes.append(f"{self._last_rewards:,} of {len(self._returns):,} episodes {LAST_REWARD}")
        elif self._returns and not self._rewarded and "reward" not in absent:
            notes.append(NO_REWARD)
        return Report(path, episodes, returns, lengths, dict(self._endings), fields, self.faults, notes)
