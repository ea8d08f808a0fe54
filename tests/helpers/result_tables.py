"""The tables of docs/results.md, as the records in benchmarks/results have them.

`tests/test_docs.py` compares the page with them; `scripts/update_results.py` writes them to the page.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
HEADER = "| command | mean | interquartile mean | worst | seeds | published |\n|---|---|---|---|---|---|"
_PLACE = re.compile(r"(<!-- records: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def expected_table(kind: str) -> str:
    """The Markdown table of the records `learning-KIND-*.json`, by name."""
    lines = [HEADER]
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"learning-{kind}-*.json")):
        record = json.loads(path.read_text())
        [row] = record["rows"]
        scores = f"{row['mean']:g} | {row['interquartile_mean']:g} | {row['worst']:g} | {len(row['scores'])}"
        lines.append(f"| `{record['run']}` | {scores} | {record['published']} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """A page with what stands between `<!-- records: KIND -->` and `<!-- end -->` made anew."""
    return _PLACE.sub(lambda found: f"{found[1]}{expected_table(found[2])}\n{found[3]}", text)
