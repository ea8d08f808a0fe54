"""The tables and pictures of docs/zoo.md and docs/ablations.md: what the rows of the zoo came to, by their records.

`tests/test_docs.py` compares page and pictures with the records; `scripts/update_results.py` writes them.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers import curve_pictures, score_pictures
from helpers.curve_pictures import ROOT, table
from helpers.shortest import ABLATION, ZOO, Row, short, trained, words
from jaxrl.plots.statistics import bootstrap_interval

FOLDER = ROOT / "docs" / "assets" / "zoo"
# Of docs/choosing.md: the environment steps and the seconds after which rows of an environment are compared.
COMPARED = {
    "gymnax:Pendulum-v1": ((5_000, 20_000, 500_000), (20, 60, 180)),
    "gymnax:CartPole-v1": ((50_000, 200_000, 500_000), (10, 20, 60)),
    "gymnax:Breakout-MinAtar": ((1_000_000, 5_000_000, 10_000_000), (60, 300, 900)),
    "envpool:HalfCheetah-v4": ((25_000, 50_000, 100_000), (300, 900, 2700)),
    "craftax:Craftax-Classic-Symbolic-v1": ((100_000, 300_000, 1_000_000), (120, 300, 900)),
}
_LEAST = 3  # algorithms of a comparison
_HEADER = "environment | algorithm | mean | IQM (95 % interval) | worst seed | published | steps × seeds | wall time"


def families() -> dict[str, list[Row]]:
    """Return the rows by the family of their environment, each as a reader would look for it."""
    found: dict[str, list[Row]] = {}
    for row in ZOO.rows.values():
        suite, _, environment = words(row)[1].partition(":")
        page = ROOT / "docs" / "suites" / f"{suite}.md"
        if row.name.startswith(ABLATION):
            family = "Ablations"
        elif suite == "gymnax":
            family = "MinAtar" if environment.endswith("-MinAtar") else "Classic control"
        else:
            family = page.read_text().partition("\n")[0].removeprefix("# ") if page.exists() else suite
        found.setdefault(family, []).append(row)
    return {family: sorted(rows, key=lambda row: (trained(row)[0].lower(), row.name)) for family, rows in found.items()}


def pictures() -> dict[pathlib.Path, str]:
    """Return every picture: of the seeds' scores by family, and the curve of each row whose record has one."""
    found = {}
    for family, rows in families().items():
        if shown := score_pictures.panels(rows, least=1):
            heading = f"Scores of every seed: {family}"
            found[FOLDER / f"scores-{_file(family)}.svg"] = score_pictures.draw(heading, shown)
        for row in rows:
            if curve := _curve(row):
                found[FOLDER / f"{row.name}.svg"] = curve_pictures.draw(_what(row), {_what(row): curve})
    return found


def block() -> str:
    """Return a section of each family of environments: its table, pictures, and commands."""
    return "\n\n".join(_section(family, rows) for family, rows in families().items())


def _section(family: str, rows: list[Row]) -> str:
    recorded = [(row, record) for row in rows if (record := ZOO.held(row))]
    parts = [f"## {family}"]
    if recorded:
        parts.append(table(_HEADER, [_cells(row, record) for row, record in recorded]))
    if below := [line for row in rows if (line := _below(row))]:
        parts.append("Below target:\n\n" + "\n".join(f"- {line}" for line in below))
    if recorded:
        parts.append(f"![Scores of every seed, {family}](assets/zoo/scores-{_file(family)}.svg)")
    curves = [f"![Learning curve of {_what(row)}](assets/zoo/{row.name}.svg)" for row, _ in recorded if _curve(row)]
    if curves:
        curves += [""] * (len(curves) % 2)
        parts.append(table("|", [curves[place : place + 2] for place in range(0, len(curves), 2)]))
    commands = "\n".join(_command(row, ZOO.held(row)) for row in rows)
    summary = "<summary>Names, machines, commits and commands</summary>"
    parts.append(f'<details markdown="1">{summary}\n\n```shell\n{commands}\n```\n\n</details>')
    return "\n\n".join(parts)


def comparisons() -> str:
    """Return a table for each environment of `COMPARED`: what its rows return at equal steps and at equal time."""
    tables = []
    for environment, (steps, seconds) in COMPARED.items():
        rows = [row for row in ZOO.rows.values() if words(row)[1] == environment and _curve(row)]
        rows = [row for row in rows if not row.name.startswith(ABLATION)]
        if len(rows) < _LEAST:
            continue
        header = [trained(rows[0])[0], *(f"{short(x)} steps" for x in steps), *(_time(x) for x in seconds), "whole run"]
        lines = []
        for row in rows:
            record = ZOO.held(row) or {}
            at, _, returns, _ = _curve(row) or ([], [], [], [])
            rate = words(row)[2] / record["wall_seconds"]
            found = [_at(x, at, returns) for x in (*steps, *(rate * x for x in seconds))]
            whole = f"{short(words(row)[2])} in {_time(record['wall_seconds'])}"
            lines.append([trained(row)[1], *found, whole])
        tables.append(table(" | ".join(header), lines))
    return "\n\n".join(tables)


def ablation(option: str) -> str:
    """Return a table of the rows that show what an option gains: those named `ablation-OPTION-...`, once recorded."""
    lines = []
    for row in ZOO.rows.values():
        if row.name.startswith(f"{ABLATION}{option}-") and (record := ZOO.held(row)):
            _, *scores, _, size, _ = _cells(row, record)
            lines.append([f"`{row.name}`", *scores, size])
    return table("row | algorithm | mean | IQM (95 % interval) | worst seed | steps × seeds", lines)


def _at(step: float, steps: Sequence[float], returns: Sequence[float]) -> str:
    """Return the curve at a step, in a table; nothing before its first point and after its last."""
    return f"{np.interp(step, steps, returns):.4g}" if steps[0] <= step <= 1.01 * steps[-1] else ""


def _below(row: Row) -> str:
    """Say what a row does not reach, or must reach once it is trained; nothing where it reaches all."""
    if ZOO.held(row) is None:
        which, least = ("each seed", row.worst) if row.worst > row.mean else ("the mean", row.mean)
        return f"{_what(row)}: no record yet; {which} must reach {least:g}."
    notes = "; ".join(note for note in (row.worst_missed, row.mean_missed) if note)
    return f"{_what(row)}: {notes}." if notes else ""


def _cells(row: Row, record: dict[str, Any]) -> list[str]:
    """Return what stands below `_HEADER`."""
    environment, algorithm, steps = trained(row)
    [found] = record["rows"]
    middle = f"{found['interquartile_mean']:g}"
    if len(found["scores"]) > 1:  # one seed has no interval
        low, high = (f"{end:.4g}" for end in bootstrap_interval([np.asarray(found["scores"])]))
        middle += f" ({low} to {high})"
    took = _time(record["wall_seconds"]) if "wall_seconds" in record else ""
    size = f"{steps} × {len(found['scores'])}"
    return [
        environment,
        algorithm,
        f"{found['mean']:g}",
        middle,
        f"{found['worst']:g}",
        record["published"],
        size,
        took,
    ]


def _command(row: Row, record: dict[str, Any] | None) -> str:
    """Return the command of a row below a line that says where its record was made."""
    if record is None:
        return f"# {row.name}: no record yet\njaxrl sweep {row.command}"
    made = record["machine"]
    cores = f"{made['cores']} core{'s' * (made['cores'] > 1)} of {made['processor']}"
    return f"# {row.name}: {cores}, {made['date']}, commit {made['commit'][:8]}\n{record['run']}"


def _what(row: Row) -> str:
    environment, algorithm, _ = trained(row)
    return f"{algorithm.replace('`', '')} on {environment}"


def _curve(row: Row) -> curve_pictures.Points | None:
    """Return the curve of a row from where all its seeds have ended an episode; None if its record has none."""
    curve = (ZOO.held(row) or {}).get("curve")
    if curve is None:
        return None
    places = [place for place, values in enumerate(zip(*curve["returns"], strict=True)) if None not in values]
    if len(places) < 2:
        return None
    steps = [curve["steps"][place] for place in places]
    return curve_pictures.over_seeds(steps, [[seed[place] for place in places] for seed in curve["returns"]])


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _file(family: str) -> str:
    return re.sub(r"\W+", "-", family.lower())
