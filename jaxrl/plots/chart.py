"""Figures of curves, with panels and a legend that fits. Importing this module imports matplotlib."""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from jaxrl.core import files

# Okabe and Ito's colors for the color-blind, with gray in place of their yellow, which is invisible on white paper;
# dark and light ones alternate, so that neighbors also differ in grayscale.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#7F7F7F")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_MARKERS = "os^DvPX"
_WIDTHS = {1: 7.0, 2: 10.0}  # width of a figure in inches, by its number of columns
_GAP = 0.1  # inches between axes, legend, caption and border
_SIZES = (9.0, 8.0, 7.0, 6.0)  # font sizes of the legend in points; the largest that fits is used
_MOST_ROWS = 12  # rows of a legend before its text becomes smaller
_MOST_LINES = 3  # maximum number of lines of a label, and of the caption
_MOST_LABELS = 60


class Chart(Figure):
    """A matplotlib figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def panels(titles: Sequence[str], title: str, x_label: str, y_label: str) -> tuple[Chart, list[Axes]]:
    """Make a figure with one panel per title.

    Args:
      titles: titles of the panels; a single panel has the title of the figure instead.
      title: title of the figure; may be empty.
      x_label, y_label: labels of the axes; if `x_label` is "steps", its ticks are written as 10k and 1M.

    Returns:
      The figure, to be completed by `finish`, and the axes.
    """
    columns = len(titles) if len(titles) <= 3 else 2 if len(titles) == 4 else 3
    rows = math.ceil(len(titles) / columns)
    width, height = _WIDTHS.get(columns, 13.0), 3.9 if rows * columns == 1 else 3.2 * rows + 0.2
    figure = Chart(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in found[len(titles) :]:
        axes.remove()
    for place, (axes, name) in enumerate(zip(found, titles, strict=False)):
        _fit(axes.set_title(plain(title if len(titles) == 1 else name)), (width - 1.2 * columns) / columns)
        if place + columns >= len(titles):
            axes.set_xlabel(x_label)
        if place % columns == 0:
            axes.set_ylabel(_shortened(plain(y_label), 40))
        if x_label == "steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(titles) > 1 and title:
        _fit(figure.suptitle(plain(title)), width - 2 * _GAP)
    return figure, found[: len(titles)]


def style(place: int, marked: bool = True) -> dict[str, Any]:
    """Return the style of a curve; curves differ in color first, and then in line style and markers.

    Args:
      place: index among all curves of the figure, from 0.
      marked: whether to add sparse markers, which distinguish curves in grayscale.
    """
    dashes = _DASHES[place // len(COLORS) % len(_DASHES)]
    drawn: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "linestyle": dashes, "linewidth": 1.5}
    if marked:
        every = (0.03 * (place % 5), 0.15)  # fractions of the diagonal of the axes
        drawn |= {"marker": _MARKERS[place % len(_MARKERS)], "markersize": 4.5, "markevery": every}
    return drawn


def brightness(heights: np.ndarray) -> list[Any]:
    """Return a color for each number between 0 and 1, darker for lower numbers; colors also differ in grayscale."""
    return colormaps["viridis"](0.95 * heights).tolist()


def say(axes: Axes, text: str) -> None:
    """Write a short text in the middle of the axes, such as a note that there are no curves to plot."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center")


def finish(figure: Chart, handles: Mapping[str, Artist], caption: Sequence[str] = ()) -> None:
    """Place the legend and the caption below the axes, and make the figure taller by their height.

    Args:
      figure: a figure from `panels`, with all curves drawn.
      handles: the artist of each label in the legend.
      caption: sentences below the legend, each on a separate line and wrapped if it is too long.
    """
    width, height = figure.get_size_inches()
    legend = _legend(figure, handles, width - 2 * _GAP)
    lines = [line for sentence in caption for line in textwrap.wrap(plain(sentence), int(width * 16))]
    text = figure.text(
        0.5, 0.0, "\n".join(lines[:_MOST_LINES]), fontsize=7.5, color="#444444", ha="center", va="bottom"
    )
    bottom = _GAP + (_inches(text)[1] + _GAP if lines else 0.0)
    below = bottom + (0.0 if legend is None else _inches(legend)[1] + _GAP)
    full = height + below
    figure.set_size_inches(width, full)
    text.set_y(_GAP / full)
    if legend is not None:
        legend.set_bbox_to_anchor((0.5, bottom / full), figure.transFigure)
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0.0, below / full, 1.0, height / full), w_pad=_GAP, h_pad=_GAP)


def plain(text: str) -> str:
    """Escape text so that matplotlib draws it literally, instead of parsing text between two $ as a formula."""
    return files.escape_for_terminal(text).replace("$", r"\$")


def _legend(figure: Chart, handles: Mapping[str, Artist], width: float) -> Legend | None:
    """Add a legend of at most `width` inches with as many columns as fit, and smaller text if it has many rows."""
    if not handles:
        return None
    labels, artists = list(handles)[:_MOST_LABELS], list(handles.values())[:_MOST_LABELS]
    if more := len(handles) - len(labels):
        labels[-1], artists[-1] = f"... and {more + 1} more", Line2D([], [], linestyle="none")
    legend = None
    for texts, size, columns in _layouts(labels, width):
        if legend is not None:
            legend.remove()
        legend = figure.legend(
            artists,
            [plain(text) for text in texts],
            loc="lower center",
            ncols=columns,
            fontsize=size,
            frameon=False,
            borderaxespad=0.0,
            borderpad=0.0,
            columnspacing=1.5,
            handlelength=2.4,
        )
        if _inches(legend)[0] <= width:
            break
    return legend


def _layouts(labels: Sequence[str], width: float) -> Iterator[tuple[Sequence[str], float, int]]:
    """Yield layouts to try for a legend of `width` inches, best first: texts, font size and number of columns."""
    for size in _SIZES:
        for columns in range(min(len(labels), 8), 0, -1):
            if math.ceil(len(labels) / columns) <= _MOST_ROWS or size == _SIZES[-1]:
                yield labels, size, columns
    # Not even a single column fits: wrap long labels, and cut the middle of labels that are still too long.
    for letters in range(int(width * 16), 8, -6):
        yield [_in_lines(label, letters) for label in labels], _SIZES[1], 1


def _in_lines(label: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(_shortened(label, letters * _MOST_LINES - letters // 2), letters))


def _shortened(text: str, letters: int) -> str:
    """Return `text`, with its middle cut out if it is longer than `letters`."""
    if len(text) <= letters:
        return text
    first = (letters - 1) // 2
    return f"{text[:first]}…{text[len(text) - (letters - 1 - first) :]}"


def _fit(text, width: float) -> None:
    """Shorten the middle of a text until it is at most `width` inches wide."""
    whole = text.get_text()
    letters = len(whole)
    while (now := _inches(text)[0]) > width and letters > 8:
        letters = min(letters - 1, int(letters * max(width / now, 0.5)))
        text.set_text(_shortened(whole, letters))


def _inches(artist) -> tuple[float, float]:
    """Return the width and height of an artist in inches."""
    box = artist.get_window_extent()
    return box.width / artist.figure.dpi, box.height / artist.figure.dpi
