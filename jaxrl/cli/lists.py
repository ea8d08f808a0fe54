"""Tables of the algorithms and presets, for `jaxrl algos`."""

from collections.abc import Sequence

from jaxrl.cli import table


def algorithm_table() -> str:
    """Name, one line, actions and source of experience of every algorithm."""
    rows = {row[0]: row for row in table.load()["lists"]["algorithms"]}
    if set(table.algorithms()) - set(rows):  # a user's
        from jaxrl.cli import describe

        rows |= {row[0]: row for row in describe.algorithm_rows()}
    return _table(("algorithm", "experience", "actions", ""), [rows[name] for name in sorted(rows)])


def preset_table() -> str:
    """Name, algorithm, environment and source of every preset."""
    return _table(("preset", "algorithm", "environment", "source"), table.load()["lists"]["presets"])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    widths[-1] = 0  # nothing is to the right of it
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)
