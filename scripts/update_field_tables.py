"""Update the tables in docs/algorithms/*.md and docs/choosing.md from the code; run this after changing a field.

.venv/bin/python scripts/update_field_tables.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import kind_table  # noqa: E402  needs the path above
from helpers.field_tables import expected_table, with_table  # noqa: E402

from jaxrl.algos import ALGORITHMS  # noqa: E402


def main():
    for path in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        before = path.read_text()
        after = with_table(before, expected_table(ALGORITHMS[path.stem]))
        if after != before:
            path.write_text(after)
            print(path.relative_to(ROOT))
    kind_table.PAGE.write_text(kind_table.with_tables(kind_table.PAGE.read_text()))


if __name__ == "__main__":
    main()
