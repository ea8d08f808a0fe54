"""Writes the tables of figures in README and pages anew, from the records in benchmarks/results.

.venv/bin/python scripts/update_results.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.result_tables import PAGES, with_tables  # noqa: E402  needs the path above

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
