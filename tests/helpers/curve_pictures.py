"""Learning curves as pictures, as the records `benchmarks/results/curve-*.json` have them.

`tests/test_docs.py` compares the pictures with the records; `scripts/update_results.py` draws them. They are written
here as SVG, so that they are the same bytes everywhere, and their colors follow the reader's light or dark scheme.
"""

import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "assets" / "curves"
PAGES = ROOT / "docs" / "algorithms"
# Pictures of several algorithms: a title, and the pages whose curves they hold.
GROUPS = {
    "cartpole": ("CartPole-v1", ("ppo", "a2c", "impala", "vmpo", "pqn", "dqn")),
    "pendulum": ("Pendulum-v1", ("sac", "td3", "ddpg", "d4pg", "mpo")),
    "from-data": ("Pendulum-v1, from data", ("bc", "td3bc", "iql", "crr", "cql")),
}
# What the folders of data in those commands hold (`benchmarks/curves.py`).
DATA = {
    "mixed": "The data are all episodes of a training run of SAC, good and bad.",
    "expert": "The data are 20 episodes of a trained policy of SAC.",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 300, 58, 20, 56, 44
FONT = "text{font-family:sans-serif;font-size:13px}"
# By scheme, in the order of the curves (after Okabe and Ito); and the text, the grid.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8528c", "#b07800", "#6a51a3")
DARK = ("#4fb0e8", "#ff8a3d", "#2fc79b", "#e394c0", "#f0b429", "#b9a7f0")
TEXT, GRID = ("#3c4043", "#d0d4d9"), ("#d8dce0", "#4a4f57")

Points = tuple[list[int], list[float], list[float], list[float]]  # steps; lowest, mean and highest return there


def names() -> list[str]:
    """Return the algorithms that have a curve, by their page."""
    return sorted(path.stem.removeprefix("curve-") for path in RECORDS.glob("curve-*.json"))


def record(name: str) -> dict[str, Any]:
    """Return the record of an algorithm's curve."""
    return json.loads((RECORDS / f"curve-{name}.json").read_text())


def title(name: str) -> str:
    """Return an algorithm's name, as its page is headed."""
    return (PAGES / f"{name}.md").read_text().partition("\n")[0].removeprefix("# ")


def environment(name: str) -> str:
    """Return the environment that a curve's evaluations ran in, without its suite."""
    return re.findall(r"env \w+:(\S+)", record(name)["run"])[0]


def pictures() -> dict[pathlib.Path, str]:
    """Return every picture of a record: its path and its text."""
    one = {name: (f"{title(name)} on {environment(name)}", (name,)) for name in names()}
    groups = {name: (heading, [one for one in of if one in names()]) for name, (heading, of) in GROUPS.items()}
    return {
        FOLDER / f"{name}.svg": draw(heading, {title(member): points(record(member)) for member in of})
        for name, (heading, of) in (one | groups).items()
    }


def block(name: str) -> str:
    """Return the Markdown of an algorithm's picture, with its command and its seeds; nothing while it has no record."""
    if name not in names():
        return ""
    found = record(name)
    seeds, updates = len(found["rows"]), "--dataset" in found["run"] and "--env" not in found["run"].split()
    source = next((f" {text}" for data, text in DATA.items() if f"rlds:data/{data}" in found["run"]), "")
    many = f"{seeds} seeds: their mean, and the range from the lowest to the highest" if seeds > 1 else "one seed"
    return (
        f"![Learning curve of {title(name)} on {environment(name)}](../assets/curves/{name}.svg)\n\n"
        f"`{found['run']}`, {many}. Each point is the mean return of {found['evaluation_episodes']} greedy episodes; "
        f"steps are {'updates' if updates else 'environment steps'}.{source} Record: "
        f"`benchmarks/results/curve-{name}.json`."
    )


def draw(heading: str, members: Mapping[str, Points]) -> str:
    """Return a picture of the mean over seeds of each algorithm, with the range between the seeds, as SVG.

    Args:
      heading: over the picture.
      members: names of algorithms, and the curve of each, at most six.
    """
    curves = list(members.values())
    low = min(value for _, lowest, _, _ in curves for value in lowest)
    high = max(value for _, _, _, highest in curves for value in highest)
    x0, x1 = 0, max(steps[-1] for steps, *_ in curves)
    y_ticks, x_ticks = ticks(min(low, 0), max(high, 0)), [value for value in ticks(0, x1) if value <= x1]
    y0, y1 = min(low, y_ticks[0]), max(high, y_ticks[-1])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> str:
        return (
            f"{LEFT + (x - x0) / (x1 - x0) * (right - LEFT):.1f},{bottom - (y - y0) / (y1 - y0) * (bottom - TOP):.1f}"
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f"<title>{heading}</title>",
        f"<style>{FONT}{_scheme(0)}@media (prefers-color-scheme:dark){{{_scheme(1)}}}</style>",
        f'<text x="{LEFT}" y="20" font-weight="bold">{heading}</text>',
    ]
    for value in y_ticks:
        _, y = place(x0, value).split(",")
        lines.append(f'<path class="g" d="M{LEFT},{y}H{right}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x_ticks:
        x, _ = place(value, y0).split(",")
        lines.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{number(value)}</text>')
    lines.append(f'<text x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">steps</text>')
    lines.append(f'<text x="{LEFT - 46}" y="{TOP - 16}">return</text>')
    at = LEFT + 6.0
    for index, (name, (steps, lowest, mean, highest)) in enumerate(members.items()):
        upper = [place(x, y) for x, y in zip(steps, highest, strict=True)]
        lower = [place(x, y) for x, y in zip(steps, lowest, strict=True)]
        line = " ".join(place(x, y) for x, y in zip(steps, mean, strict=True))
        if lowest != highest:
            lines.append(f'<polygon class="b{index}" points="{" ".join(upper + lower[::-1])}"/>')
        lines.append(f'<polyline class="c{index}" points="{line}"/>')
        if len(members) > 1:  # else the heading says it
            at += 8 if at > LEFT + 6 else 0
            lines.append(f'<path class="c{index}" d="M{at:.0f},{TOP - 20}h18"/>')
            lines.append(f'<text x="{at + 23:.0f}" y="{TOP - 16}">{name}</text>')
            at += 31 + 8.2 * len(name)
    return "\n".join([*lines, "</svg>"]) + "\n"


def points(found: dict[str, Any]) -> Points:
    """Return a record's steps, and over its seeds the lowest, the mean and the highest return at each of them."""
    rows = found["rows"]
    if any(row["steps"] != rows[0]["steps"] for row in rows):
        raise ValueError(f"the seeds of {found['run']} were evaluated at different steps")
    return over_seeds(rows[0]["steps"], [row["returns"] for row in rows])


def over_seeds(steps: list[int], returns: list[list[float]]) -> Points:
    """Return the lowest, the mean and the highest of the seeds' returns at each of the steps."""
    each = list(zip(*returns, strict=True))
    return steps, [min(r) for r in each], [sum(r) / len(r) for r in each], [max(r) for r in each]


def ticks(low: float, high: float) -> list[float]:
    """Return four to seven round numbers that span a range."""
    rough = max(high - low, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 0.05)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Return a number as axes have it."""
    unit, letter = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k") if abs(value) >= 10_000 else (1.0, "")
    text = f"{value / unit:g}{letter}"
    return text.replace("-", "\N{MINUS SIGN}")


def table(header: str, rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown, whose header has bars between the names of the columns."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {header} |", "|---" * (1 + header.count("|")) + "|", *lines])


def _scheme(dark: int) -> str:
    rules = f"text{{fill:{TEXT[dark]}}}.g{{stroke:{GRID[dark]}}}"
    for index, color in enumerate(DARK if dark else LIGHT):
        rules += f".c{index}{{fill:none;stroke:{color};stroke-width:2}}.b{index}{{fill:{color};opacity:.18}}"
    return rules
