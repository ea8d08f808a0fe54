"""A report of a dataset's contents, as numbers and a text histogram."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

import numpy as np

from jaxrl.core.trees import named_leaves
from jaxrl.data import episodes as rules
from jaxrl.data.episodes import Episode

_BARS, _WIDTH = 12, 40  # number and length of the histogram's bars
_ABSENT = {
    "observation": "the data cannot be used for learning",
    "action": "the data cannot be used for learning",
    "reward": "rewards count as 0",
    "discount": "discounts follow from is_terminal",
    "is_terminal": "an episode counts as terminated if the discount before its last step is 0",
}


@dataclasses.dataclass(frozen=True)
class FieldSummary:
    """A summary of one array over all steps, without the unused actions, rewards and discounts of last steps.

    `low` and `high` are the array's range, NaN for text.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a dataset; `print` shows them.

    Attributes:
      returns, lengths: one entry for each episode without faults.
      endings: number of episodes for each kind of ending: terminated, truncated or cut off. Datasets of other programs
        do not distinguish truncated and cut-off episodes.
      fields: one summary for each array of the steps.
      faults: problems, one line each.
      notes: valid but possibly unintended contents, one line each.
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


@dataclasses.dataclass
class Rewards:
    """Counters of episodes with an ignored reward at the last step, and a flag for any other nonzero reward."""

    episodes: int = 0
    ignored: int = 0
    rewarded: bool = False

    def add(self, episode: Episode) -> None:
        self.episodes += 1
        self.ignored += bool(episode.reward[-1])
        self.rewarded |= bool(episode.reward[:-1].any())

    def notes(self) -> list[str]:
        found = []
        if self.ignored:
            found.append(
                f"{self.ignored:,} of {self.episodes:,} episodes have a reward at their last step, which has no "
                "meaning in RLDS and is ignored; to use it, load the dataset with last_step='transition'"
            )
        if self.episodes and not self.rewarded:
            found.append("every reward is 0")
        return found


def report(path: str, found: Iterable[tuple[int, Episode | None, list[str]]], absent: tuple[str, ...] = ()) -> Report:
    """Return the report of a dataset.

    Args:
      path: the dataset's directory.
      found: (index, episode, faults) for each episode; the episode is None if it is faulty.
      absent: names of the optional RLDS fields that the steps do not have.
    """
    episodes, rewards = 0, Rewards()
    returns: list[float] = []
    lengths: list[int] = []
    endings: Counter[str] = Counter()
    fields: dict[str, FieldSummary] = {}
    faults: list[str] = []
    for index, episode, problems in found:
        episodes += 1
        faults += problems
        if episode is None:
            continue
        odd = rules.non_finite(episode) + rules.discount_problems(episode)
        faults += [f"episode {index}: {field} {what}" for field, what in odd]
        rewards.add(episode)
        returns.append(episode.episode_return)
        lengths.append(episode.length)
        implied = rules.TERMINATED if episode.is_terminal[-1] else "not terminated"
        endings[str(episode.metadata.get("ending", implied))] += 1
        for name, x in named_leaves(rules.meaningful(episode)).items():
            field = fields.setdefault(name, FieldSummary(name, str(x.dtype), x.shape[1:], np.nan, np.nan))
            if x.dtype.kind not in "SUO" and x.size:
                low, high = np.fmin(field.low, float(x.min())), np.fmax(field.high, float(x.max()))
                fields[name] = dataclasses.replace(field, low=low, high=high)
    notes = [f"the steps have no {name}; {_ABSENT[name]}" for name in absent]
    notes += [] if "reward" in absent else rewards.notes()
    return Report(
        path,
        episodes,
        np.asarray(returns, np.float64),
        np.asarray(lengths, np.int64),
        dict(endings),
        list(fields.values()),
        faults,
        notes,
    )
