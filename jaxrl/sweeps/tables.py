"""Tables of results: as text, CSV, Markdown and pandas data frames."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.core import files
from jaxrl.core.errors import MissingExtraError
from jaxrl.plots.importance import importance, plot_parallel
from jaxrl.run.loggers import write_csv

if TYPE_CHECKING:
    import pandas

    from jaxrl.plots.chart import Chart

# Columns of numbers that are formatted for comparison.
_COMPARED = ("IQM", "low", "high", "mean", "std", "min", "max", "training", "score", "return")
_DIGITS = 5  # significant digits of the largest number of a column
_WIDEST = 10  # powers of ten from which numbers are written with an exponent


class Tabulated:
    """Base class of results with settings and scores, which can be shown as a table and as parallel coordinates."""

    title = ""

    def table(self) -> str:
        """Return the results as a text table, the best first.

        The score of a run in a sweep is the mean return of its final evaluation. The columns "IQM" to "max" are
        statistics of the scores over seeds, with the 95 % bootstrap interval of the interquartile mean from "low" to
        "high"; "training" is the interquartile mean of the last returns in training.
        """
        return aligned(cells(self._rows()))

    def importance(self) -> dict[str, float]:
        """Return the share of the variance of scores that each setting explains (`jaxrl.plots.importance`).

        Pruned trials are left out, because their score is unknown.
        """
        return importance(*self._settings_and_scores())

    def plot_settings(self, path: str | Path | None = None) -> "Chart":
        """Plot settings and scores as parallel coordinates, the most important setting first.

        Args:
          path: image file to write, or None; its suffix sets the format.

        Raises:
          ConfigError: the format is not supported.
        """
        return plot_parallel(*self._settings_and_scores(), path, title=self.title)

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, the best first."""
        raise NotImplementedError

    def _settings_and_scores(self) -> tuple[list[dict[str, Any]], list[float]]:
        raise NotImplementedError


def short(value: Any) -> str:
    """Return a setting as text; floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def significant(values: Sequence[float]) -> list[str]:
    """Format a column of numbers with the same number of decimals, for comparison.

    The largest number has five significant digits. Columns of very large or very small numbers have exponents.
    """
    numbers = np.asarray(values, float)
    largest = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
    magnitude = math.floor(math.log10(largest)) if largest > 0 else 0
    if abs(magnitude) >= _WIDEST:
        return [f"{x:.{_DIGITS - 1}e}" for x in numbers]
    return [f"{x:.{max(_DIGITS - 1 - magnitude, 0)}f}" for x in numbers]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, the first of which is the header, as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, the first of which is the header, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " ---: |" * len(rows[0]), *lines[1:]])


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a header and the rows as text cells; the columns in `_COMPARED` are formatted by `significant`.

    Problems and the scores of single seeds are left out.
    """
    columns = {
        name: significant([row[name] for row in rows]) if name in _COMPARED else [short(row[name]) for row in rows]
        for name in rows[0]
        if name != "problem" and not name.startswith("seed ")
    }
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def write_tables(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to `path`.csv, and as text cells to `path`.md."""
    write_csv(path.with_suffix(".csv"), rows)
    with files.replacing(path.with_suffix(".md")) as file:
        file.write(markdown(cells(rows)) + "\n")


def data_frame(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows as a pandas data frame, with missing values where a row lacks a column.

    Raises:
      MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("to_pandas", "pandas") from None
    return pandas.DataFrame([dict(row) for row in rows])
