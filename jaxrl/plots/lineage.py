"""The lineage of a population (which member copied which, hyperparameters and scores), and its plot."""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxrl.core.schedules import PiecewiseConstant
from jaxrl.plots.curves import save_chart
from jaxrl.plots.statistics import is_logarithmic

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

_MOST_PANELS = 9
_BEST = "#D55E00"  # color of the line that leads to the winner


@dataclasses.dataclass(frozen=True, eq=False)
class Lineage:
    """The history of a population's members, interval by interval.

    Attributes:
      steps: environment steps of each member at the end of each interval, shape (points,).
      rows: environment steps per iteration.
      scores: scores of the members at the end of each interval, shape (points, population); NaN without a score.
      parents: index of the member that each member copied at the end of each interval, shape (points, population).
        Members that did not copy another have their own index, as all members do at the last point.
      hyperparameters: values of each searched field in each interval, shape (points, population). For a schedule, the
        value in the middle of the interval.
      winner: index of the best member at the end.
    """

    steps: np.ndarray
    rows: int
    scores: np.ndarray
    parents: np.ndarray
    hyperparameters: dict[str, np.ndarray]
    winner: int

    def ancestors(self, member: int | None = None) -> np.ndarray:
        """Return the index of a member's ancestor in each interval, shape (points,); by default, the winner's."""
        found = [self.winner if member is None else member]
        for parents in self.parents[-2::-1]:
            found.append(int(parents[found[-1]]))
        return np.asarray(found[::-1])

    def schedule(self, name: str, member: int | None = None) -> PiecewiseConstant:
        """Return a schedule with a hyperparameter's values along a member's ancestors; by default, the winner's.

        In a run with the same number of iterations, the schedule has the ancestor's value in each iteration.
        """
        values = self.hyperparameters[name][np.arange(len(self.steps)), self.ancestors(member)]
        changes = [point for point in range(1, len(values)) if values[point] != values[point - 1]]
        # The value changes halfway between two iterations, so that rounding cannot move the change to another one.
        boundaries = [float((self.steps[point - 1] - self.rows / 2) / self.steps[-1]) for point in changes]
        return PiecewiseConstant(tuple(float(values[point]) for point in [0, *changes]), tuple(boundaries))

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each interval and member."""
        return [
            {"step": int(step), "member": member, "parent": int(self.parents[point, member])}
            | {"score": float(self.scores[point, member])}
            | {name: float(values[point, member]) for name, values in self.hyperparameters.items()}
            for point, step in enumerate(self.steps)
            for member in range(self.scores.shape[1])
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the lineage as JSON values, which `from_json` reads."""
        found = {name: getattr(self, name).tolist() for name in ("steps", "scores", "parents")}
        return vars(self) | found | {"hyperparameters": {name: x.tolist() for name, x in self.hyperparameters.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the lineage from a result of `to_json`.

        Raises:
          LookupError, TypeError, ValueError: `found` is not a lineage.
        """
        scores = np.asarray(found["scores"], float)  # None becomes NaN
        steps, parents = np.asarray(found["steps"], np.int64), np.asarray(found["parents"], np.int64)
        values = {str(name): np.asarray(x, float) for name, x in dict(found["hyperparameters"]).items()}
        shape, winner = scores.shape, int(found["winner"])
        if len(shape) != 2 or steps.shape != shape[:1] or {x.shape for x in (parents, *values.values())} != {shape}:
            raise ValueError("the arrays of a lineage have different shapes")
        if not (0 < shape[0] and 0 <= winner < shape[1] and np.all((0 <= parents) & (parents < shape[1]))):
            raise ValueError("a lineage refers to members that do not exist")
        return cls(steps, int(found["rows"]), scores, parents, values, winner)


def plot_lineage(lineage: Lineage, out: str | os.PathLike | None = None, *, title: str = "") -> "Chart":
    """Plot the scores and hyperparameters of a population's members, and highlight the line that leads to the winner.

    If a member copies another, its line ends, and a new line begins at the copied member. The axis of a hyperparameter
    is logarithmic if the values are positive and span a factor of 20 or more.

    Args:
      lineage: lineage of the population.
      out: image file to write, or None; its suffix sets the format.
      title: title of the figure.

    Raises:
      ConfigError: the format is not supported.
    """
    from matplotlib.collections import LineCollection

    from jaxrl.plots import chart

    names = list(lineage.hyperparameters)[: _MOST_PANELS - 1]
    figure, panels = chart.panels(["score", *names], title, "steps", "")
    handles: dict[str, Any] = {}
    drawn = [lineage.scores, *(lineage.hyperparameters[name] for name in names)]
    for axes, values in zip(panels, drawn, strict=True):
        constant = values is not lineage.scores  # hyperparameters are constant in each interval
        lines, winners = _lines(lineage, values, constant)
        for label, some, color, width in (("members", lines, "#BBBBBB", 0.8), ("to the winner", winners, _BEST, 2.2)):
            handles[label] = axes.add_collection(LineCollection(some, colors=color, linewidths=width))
        if constant and is_logarithmic(values[np.isfinite(values)]):
            axes.set_yscale("log")
        axes.autoscale_view()
    caption = "If a member copies another, its line ends, and a new one begins at the copied member."
    chart.finish(figure, handles, [caption])
    return save_chart(figure, out)


def _lines(lineage, values, constant):
    """Return lines from each parent's value at a point to its copy's value at the next point: all, and the winner's.

    With `constant`, the copy has its value from the beginning of the interval on.
    """
    found, winners, best = [], [], lineage.ancestors()
    begins = [0, *lineage.steps[:-1]]
    for point, (begin, end) in enumerate(zip(begins, lineage.steps, strict=True)):
        for member, value in enumerate(values[point]):
            before = [(begin, values[point - 1, lineage.parents[point - 1, member]])] if point else []
            line = [*before, *[(begin, value)] * constant, (end, value)]
            if len(line) > 1 and np.isfinite([y for _, y in line]).all():
                found.append(line)
                winners += [line] if best[point] == member else []
    return found, winners
