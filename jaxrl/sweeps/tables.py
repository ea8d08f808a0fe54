"""Results as text."""

from collections.abc import Sequence
from typing import Any


def short(value: Any) -> str:
    """A setting, a number with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the header first, as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
