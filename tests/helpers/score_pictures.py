"""Scores of every seed as pictures, as the records `benchmarks/results/learning-defaults-*.json` have them.

`tests/test_docs.py` compares the picture with the records; `scripts/update_results.py` draws it, as SVG.
"""

import html
import json
import pathlib
import re
from collections.abc import Iterable, Mapping

from helpers.curve_pictures import DARK, GRID, LIGHT, RECORDS, ROOT, TEXT, number, ticks
from helpers.shortest import ABLATION, DEFAULTS, Row, trained

PICTURE = ROOT / "docs" / "assets" / "scores.svg"
COLUMN, GAP, LABELS, LINE, HEAD, FOOT = 372, 16, 138, 17, 30, 34  # pixels; LABELS: of the names of algorithms


def pictures() -> dict[pathlib.Path, str]:
    """Return the picture: its path and its text."""
    return {PICTURE: draw()}


def panels(
    rows: Iterable[Row] | None = None, least: int = 2
) -> dict[str, list[tuple[str, list[float], float, float | None]]]:
    """Return for each environment the name, scores, interquartile mean and published score of each algorithm.

    Args:
      rows: those with a record are shown; None: of all at the defaults, but for ablations.
      least: algorithms of an environment that is shown.
    """
    found: dict[str, list] = {}
    rows = [row for row in DEFAULTS if not row.name.startswith(ABLATION)] if rows is None else rows
    for row in sorted(rows, key=lambda row: f"{row.record}.json"):
        path = RECORDS / f"{row.record}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        environment, algorithm, steps = trained(row)
        algorithm = re.sub(r".*`(.*)`.*", r"\1", algorithm)  # of a preset its name alone: there is little room
        published = re.match(r"-?[\d.]+", record["published"])
        row = record["rows"][0]
        what = (algorithm, steps, row["scores"], row["interquartile_mean"], float(published[0]) if published else None)
        found.setdefault(environment, []).append(what)
    named = {}
    for environment, members in found.items():
        names = [algorithm for algorithm, *_ in members]
        named[environment] = [
            (f"{algorithm}, {steps}" if names.count(algorithm) > 1 else algorithm, *rest)
            for algorithm, steps, *rest in members
        ]
    return {environment: members for environment, members in named.items() if len(members) >= least}


def draw(heading: str = "Scores of every seed at the defaults", shown: Mapping[str, list] | None = None) -> str:
    """Return panels, by default of all environments with several algorithms, in two columns as SVG."""
    shown = panels() if shown is None else shown
    bottoms, parts = [36, 36], []
    for environment, members in sorted(shown.items(), key=lambda item: -len(item[1])):
        column = bottoms.index(min(bottoms))
        parts += _panel(environment, members, column * (COLUMN + GAP), bottoms[column])
        bottoms[column] += HEAD + LINE * len(members) + FOOT
    width, height = 2 * COLUMN + GAP, max(bottoms)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{html.escape(heading)}</title>",
        f"<style>text{{font-family:sans-serif;font-size:12px}}{_scheme(0)}"
        f"@media (prefers-color-scheme:dark){{{_scheme(1)}}}</style>",
        '<circle class="s" cx="8" cy="13" r="4"/><text x="18" y="17">a seed</text>',
        '<path class="m" d="M76,5v16"/><text x="84" y="17">interquartile mean</text>',
        f'{_diamond(212, 13)}<text x="222" y="17">published</text>',
    ]
    return "\n".join([*lines, *parts, "</svg>"]) + "\n"


def _panel(environment, members, left, top):
    low = min(min(*scores, middle, middle if known is None else known) for _, scores, middle, known in members)
    high = max(max(*scores, middle, middle if known is None else known) for _, scores, middle, known in members)
    marks = ticks(low, high) if high > low else [low, low + 1]
    low, high = min(low, marks[0]), max(high, marks[-1])
    marks = marks if len(marks) < 6 else marks[::2]
    start, end = left + LABELS, left + COLUMN - 12

    def place(score):
        return start + (score - low) / (high - low) * (end - start)

    bottom = top + HEAD + LINE * len(members)
    lines = [f'<text x="{start}" y="{top + 18}" font-weight="bold">{html.escape(environment)}</text>']
    for mark in marks:
        x = f"{place(mark):.1f}"
        lines.append(f'<path class="g" d="M{x},{top + HEAD - 4}V{bottom}"/>')
        lines.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{number(mark)}</text>')
    for index, (algorithm, scores, middle, known) in enumerate(members):
        y = top + HEAD + LINE * index + LINE / 2
        lines.append(f'<text x="{start - 10}" y="{y + 4:.1f}" text-anchor="end">{html.escape(algorithm)}</text>')
        lines += [f'<circle class="s" cx="{place(score):.1f}" cy="{y}" r="4"/>' for score in scores]
        lines.append(f'<path class="m" d="M{place(middle):.1f},{y - 7}v14"/>')
        lines += [] if known is None else [_diamond(place(known), y)]
    return lines


def _diamond(x, y):
    return f'<path class="p" d="M{x - 5:.1f},{y}l5,-5l5,5l-5,5z"/>'


def _scheme(dark):
    own, other = (DARK if dark else LIGHT)[:2]
    rules = f"text{{fill:{TEXT[dark]}}}.g{{stroke:{GRID[dark]}}}.s{{fill:{own};opacity:.45}}"
    return rules + f".m{{stroke:{own};stroke-width:2.5}}.p{{fill:none;stroke:{other};stroke-width:1.8}}"
