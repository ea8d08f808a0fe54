"""Write the tables of figures and the learning curves of README and pages, from the records in benchmarks/results.

.venv/bin/python scripts/update_results.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.curve_pictures import pictures  # noqa: E402  needs the path above
from helpers.result_tables import PAGES, with_tables  # noqa: E402

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for path, text in pictures().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
