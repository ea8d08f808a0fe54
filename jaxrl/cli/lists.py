"""Tables of the algorithms and presets, for `jaxrl algos`."""

import re
import shutil
import textwrap
from collections.abc import Sequence

from jaxrl.cli import table

_NARROW = 40  # characters


def algorithm_table() -> str:
    """Return a table with name, source of experience, actions and one line of every algorithm."""
    rows = {row[0]: row for row in table.load()["lists"]["algorithms"]}
    if set(table.algorithms()) - set(rows):  # algorithms that a user registered
        from jaxrl.cli import describe

        rows |= {row[0]: row for row in describe.algorithm_rows()}
    return _table(("algorithm", "experience", "actions", ""), [rows[name] for name in sorted(rows)])


def preset_table() -> str:
    """Return a table with name, algorithm, environment and source of every preset.

    The help of each preset lists its differences from the source.
    """
    rows = [(*row[:3], re.split(r"\. (?=[A-Z])", row[3])[0]) for row in table.load()["lists"]["presets"]]
    return _table(("preset", "algorithm", "environment", "source"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows within the terminal's width; a last column that would be narrow is moved below the others."""
    width = shutil.get_terminal_size().columns
    widths = [max(map(len, column)) for column in zip(header[:-1], *(row[:-1] for row in rows), strict=True)]
    place = sum(widths) + 2 * len(widths)
    below = width - place < _NARROW
    indent = " " * (4 if below else place)
    lines = []
    for *cells, text in (header, *rows):
        line = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        first = indent if below else f"{line}  "
        lines += [line] if below else []
        lines += textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [first]
    return "\n".join(line.rstrip() for line in lines)
