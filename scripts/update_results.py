"""Writes the tables of docs/results.md anew, from the records that `make learning` left in benchmarks/results.

.venv/bin/python scripts/update_results.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.result_tables import PAGE, with_tables  # noqa: E402  needs the path above

if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
