"""The rows of the zoo as tests and tables read them: `tests/learning/test_defaults.py` runs them."""

import pathlib
import re
import sys

from helpers import curve_pictures

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import _zoo  # noqa: E402  needs the path above
from _zoo import Missed, Row, check, train  # noqa: E402
from _zoo import trained as words  # noqa: E402

__all__ = ["ABLATION", "DEFAULTS", "PRESETS", "ZOO", "Missed", "Row", "check", "short", "train", "trained", "words"]

ABLATION = "ablation-"  # how the names of rows begin that show what an option gains
ZOO = _zoo.read()
DEFAULTS = [row for row in ZOO.rows.values() if row.kind == "defaults"]
PRESETS = [row for row in ZOO.rows.values() if row.kind == "preset"]


def trained(row: Row) -> tuple[str, str, str]:
    """Return the environment, the algorithm and the steps of a row, as a reader would call them."""
    name, env, steps, _ = words(row)
    title = curve_pictures.title(name)
    algorithm = f"{title} (`{row.command.split()[1]}`)" if row.kind == "preset" else row.variant or title
    return re.sub(r"(\w+)-MinAtar", r"MinAtar \1", env.partition(":")[2]), algorithm, short(steps)


def short(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k"
