"""The picture of learning curves. Importing this imports matplotlib, so `jaxrl.plots.curves` does when it draws."""

import io

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter


class Chart(Figure):
    """A matplotlib figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def empty(title: str, y_label: str) -> tuple[Chart, Axes]:
    """A chart over environment steps, and the axes to draw on."""
    figure = Chart(figsize=(7, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel("steps")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
