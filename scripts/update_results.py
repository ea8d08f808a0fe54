"""Update the tables and figures of the README and the docs, from the records in benchmarks/results and the code.

.venv/bin/python scripts/update_results.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import curve_pictures, score_pictures, zoo_tables  # noqa: E402  needs the path above
from helpers.result_tables import PAGES, with_tables  # noqa: E402

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for kind in (curve_pictures, score_pictures, zoo_tables):
        for path, text in kind.pictures().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
