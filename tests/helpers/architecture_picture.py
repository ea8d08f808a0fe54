"""The figure of the architecture, as SVG, its names taken from the code.

`tests/test_docs.py` compares the picture with the code; `scripts/update_results.py` draws it.
"""

import dataclasses
import html
import pathlib

from helpers.curve_pictures import DARK, GRID, LIGHT, ROOT, TEXT
from jaxrl.core import sources
from jaxrl.core.registry import registered
from jaxrl.core.types import Algorithm
from jaxrl.parallel.topology import Topology

PICTURE = ROOT / "docs" / "assets" / "architecture.svg"
WIDTH, HEIGHT, GAP, LINE = 760, 470, 20, 17
# What each topology does, in lines.
TOPOLOGIES = {
    "Anakin": ("environments, replay and learner", "in one compiled program,", "on one or many devices"),
    "Sebulba": ("threads step environments", "on the host or elsewhere,", "the learner is compiled"),
    "Offline": ("a dataset instead of", "an environment"),
}
STEPS = ("collect", "store", "update", "report")  # of an iteration (jaxrl/parallel/iteration.py)


def pictures() -> dict[pathlib.Path, str]:
    """Return the picture: its path and its text."""
    return {PICTURE: draw()}


def topologies() -> list[str]:
    """Return the names of jaxrl's topologies."""
    found = registered("topology").values()
    return sorted(
        kind.__name__ for kind in found if issubclass(kind, Topology) and kind.__module__.startswith("jaxrl.")
    )


def methods() -> list[str]:
    """Return those methods of an algorithm that compute, in the order of the protocol."""
    return [name for name in vars(Algorithm) if name in ("init", "act", "update")]


def experience() -> list[str]:
    """Return what an algorithm can learn from."""
    kinds = [kind for kind in vars(sources).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    return [kind.__name__ for kind in kinds if kind.__name__ in ("Rollouts", "Episodes", "Replay", "Dataset")]


def draw() -> str:
    """Return the figure: what a user passes, what one iteration does, where it runs, and what a run leaves."""
    third, whole = (WIDTH - 4 * GAP) / 3, WIDTH - 2 * GAP
    lefts = [GAP + place * (third + GAP) for place in range(3)]
    parts = _box(GAP, 14, whole, 34, "", ["jaxrl.train(algorithm, environment, topology=...)"], code=True)
    for left, title, lines in (
        (
            lefts[0],
            "Environment",
            ("reset, step", "in JAX: gymnax, brax and other suites", "on the host: Gymnasium, EnvPool"),
        ),
        (
            lefts[1],
            "Algorithm",
            (", ".join(methods()), "pure functions over pytrees,", "one file, the equations of its paper"),
        ),
        (lefts[2], "Experience", (", ".join(experience()), "rows in one convention,", "in time order, on the device")),
    ):
        parts += [*_arrow(left + third / 2, 48, 66), *_box(left, 70, third, 86, title, lines)]
        parts += _arrow(left + third / 2, 156, 174)
    parts += _box(GAP, 178, whole, 84, "Program: one iteration, the same for all", [])
    size = (whole - 5 * GAP - 20) / 4
    for place, name in enumerate(STEPS):
        left = 2 * GAP + place * (size + GAP + 6)
        parts.append(f'<rect class="i" x="{left:.1f}" y="206" width="{size:.1f}" height="28" rx="6"/>')
        parts.append(f'<text x="{left + size / 2:.1f}" y="225" text-anchor="middle">{name}</text>')
        if place:
            parts.append(f'<path class="a" d="M{left - GAP - 4:.1f},220h{GAP}"/>')
            parts.append(f'<path class="h" d="M{left - 5:.1f},220l-6,-4v8z"/>')
    first, last = 2 * GAP + size / 2, 2 * GAP + 2 * (size + GAP + 6) + size / 2
    parts.append(f'<path class="a" d="M{last:.1f},234v12H{first:.1f}v-6"/>')
    parts.append(f'<path class="h" d="M{first:.1f},235l-4,6h8z"/>')
    parts.append(f'<text class="n" x="{(first + last) / 2:.1f}" y="258" text-anchor="middle">new parameters</text>')
    for left, name in zip(lefts, TOPOLOGIES, strict=True):
        parts += [*_arrow(left + third / 2, 262, 280), *_box(left, 284, third, 90, name, TOPOLOGIES[name])]
        parts += _arrow(left + third / 2, 374, 392)
    parts += _box(
        GAP, 396, whole, 60, "Run", ["chunks of a second: checkpoints, evaluations, metrics, signals; then a policy"]
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<title>Parts of a run</title>",
        f"<style>text{{font-family:sans-serif;font-size:13px}}.n{{font-size:11px}}.c{{font-family:monospace}}"
        f"{_scheme(0)}@media (prefers-color-scheme:dark){{{_scheme(1)}}}</style>",
    ]
    return "\n".join([*lines, *parts, "</svg>"]) + "\n"


def _box(left, top, width, height, title, lines, code=False):
    parts = [f'<rect class="b" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="8"/>']
    middle, y = left + width / 2, top + 21
    if title:
        parts.append(
            f'<text x="{middle:.1f}" y="{y}" text-anchor="middle" font-weight="bold">{html.escape(title)}</text>'
        )
        y += LINE + 3
    for line in lines:
        kind = ' class="c"' if code else ' class="n"'
        parts.append(f'<text{kind} x="{middle:.1f}" y="{y}" text-anchor="middle">{html.escape(line)}</text>')
        y += LINE
    return parts


def _arrow(x, top, bottom):
    return [
        f'<path class="a" d="M{x:.1f},{top}V{bottom - 4}"/>',
        f'<path class="h" d="M{x:.1f},{bottom + 2}l-4,-7h8z"/>',
    ]


def _scheme(dark):
    color, warm = (DARK if dark else LIGHT)[:2]
    rules = f"text{{fill:{TEXT[dark]}}}.b{{fill:{color};fill-opacity:.08;stroke:{color};stroke-width:1.5}}"
    rules += f".i{{fill:{warm};fill-opacity:.14;stroke:{warm}}}.a{{fill:none;stroke:{TEXT[dark]};stroke-width:1.3}}"
    return rules + f".h{{fill:{TEXT[dark]}}}.g{{stroke:{GRID[dark]}}}"
