"""Reports on runs, sweeps and searches as single HTML files without scripts, which work offline."""

import base64
import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxrl.core import files, ownership
from jaxrl.core.errors import ConfigError
from jaxrl.core.versions import own_version
from jaxrl.plots.curves import EVALUATION, TRAINING, plot_runs, plot_trials
from jaxrl.plots.importance import importance, plot_parallel
from jaxrl.plots.labels import Group, Run, grouped
from jaxrl.plots.lineage import plot_lineage
from jaxrl.sweeps.records import Record, compared, read_records
from jaxrl.sweeps.tables import cells, short

if TYPE_CHECKING:
    from jaxrl.plots.chart import Chart

_MOST_ROWS = 200  # maximum number of rows in a table
_MOST_CURVES = 12  # maximum number of curves in a plot
_LEAST_CONFIGURATIONS = 4  # minimum number for the importance of settings
_TEXTS = ("configuration", "settings", "task", "ended", "machine", "versions")  # columns that are not numbers
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .text { text-align: left; }
img { max-width: 100%; display: block; margin: 1em 0; }
meter { width: 12em; }
.note { color: #555; font-size: 13px; }
code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
# With this policy, browsers neither load nor run anything, whatever the page contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def report(runs: Sequence[str | os.PathLike], out: str | os.PathLike) -> Path:
    """Write a report on saved runs, sweeps and searches as a single HTML file that includes its plots.

    Each algorithm and environment, and each search and population, has a section with a table of configurations and
    their scores, learning curves, and, if settings differ, the importance of the settings and a plot with parallel
    coordinates. The last section lists the runs with their commands, machines and versions. Everything read from files
    is shown as text, and a content security policy keeps browsers from loading or running anything.

    Args:
      runs: directories of runs, sweeps and searches, or a single directory.
      out: the `.html` file to write.

    Returns:
      `out`.

    Raises:
      ConfigError: there are no runs, `out` does not end in .html, or it exists and is not a report.
      RunDirectoryError: a path is not the directory of a run, a sweep or a search.
    """
    out = files.expand(out)
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"out={str(out)!r} must be an HTML file, whose name ends in .html")
    ownership.check_output(out, "report")
    records = read_records(runs)
    found: dict[str, list[Group]] = {}
    for group in grouped(records):  # of all families at once, so that each configuration has one style
        found.setdefault(cast("Record", group.runs[0]).family, []).append(group)
    title = next(iter(found)) if len(found) == 1 else f"{len(records)} runs"
    parts = [f"<h1>{_escaped(title)}</h1>"]
    for name, groups in found.items():
        parts += [] if len(found) == 1 else [f"<h2>{_escaped(name)}</h2>"]
        parts += _family(name, groups)
    parts += ["<h2>Runs</h2>", *_runs(records)]
    parts.append(f'<p class="note">Written by jaxrl {html.escape(own_version())}.</p>')
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{_escaped(title)}</title><style>{_STYLE}</style>"
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body>\n</html>\n"
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(out, "wb") as file:
            file.write(page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(f"out={str(out)!r} cannot be written: {error}") from error
    return out


def _family(name: str, groups: Sequence[Group]) -> list[str]:
    """Return the scores and plots of the runs of one family, as HTML."""
    ranked = compared(groups)
    members = [cast("Record", member) for _, group in ranked for member in group.runs]
    rows = []
    for row, group in ranked:
        first = cast("Record", group.runs[0])
        named = {} if first.settings and not first.member else {"configuration": first.member or first.title}
        rows.append(named | row | {"steps": f"{first.steps:,}", "runs": len(group.runs)})
    header, *lines = cells(rows)
    lines = [["" if cell == "nan" else cell for cell in line] for line in lines]
    parts = ["<h3>Scores</h3>", *_table([dict(zip(header, line, strict=True)) for line in lines])]
    parts.append(
        '<p class="note">Scores: mean returns of the final evaluations over seeds, the best first. IQM: interquartile '
        "mean with its 95 % bootstrap interval from low to high, in which a failed run counts as the worst of all. "
        "Training: interquartile mean of the last returns in training.</p>"
    )
    lineage = members[0].result.get("lineage")
    if lineage is not None:  # most members copied the settings of a few, so their importance has no meaning
        return [*parts, "<h3>Lineage</h3>", _picture(plot_lineage(lineage, title=name), "lineage of the members")]
    drawn = [group for _, group in ranked if any(map(_has_curve, group.runs))]
    if all(member.seed is None for member in members):  # trials of a search, or runs without a known seed
        if len(members) > 1:
            scores = [member.score for group in groups for member in cast("list[Record]", group.runs)]
            parts += ["<h3>Trials</h3>", _picture(plot_trials(scores, title=name), "the score of each trial")]
    elif drawn:
        more = f" of the best {_MOST_CURVES} configurations" if len(drawn) > _MOST_CURVES else ""
        parts += [f"<h3>Learning curves{more}</h3>", _picture(plot_runs(drawn[:_MOST_CURVES]), "learning curves")]
    if len(groups) >= _LEAST_CONFIGURATIONS:
        parts += _settings(name, [member for member in members if member.ended != "pruned"])
    return parts


def _has_curve(member: Run) -> bool:
    return max(len(member.curve(metric)[0]) for metric in (TRAINING, EVALUATION)) > 1


def _settings(name: str, members: Sequence[Record]) -> list[str]:
    """Return the importance of each setting and a plot of all runs as parallel coordinates, as HTML."""
    settings, scores = [member.settings for member in members], [member.score for member in members]
    if not np.isfinite(scores).any():
        return []
    parts, shares = [], importance(settings, scores)
    if shares:
        lines = [f'<meter value="{share:.3f}"></meter> {share:.0%} {_escaped(text)}' for text, share in shares.items()]
        lines.append(f"{max(0.0, 1 - sum(shares.values())):.0%} seeds, and interactions of settings")
        text = "<br>".join(["Share of the variance of scores:", *lines])
        parts = ["<h3>Importance of settings</h3>", f"<p>{text}</p>"]
    picture = plot_parallel(settings, scores, title=name)
    return [*parts, "<h3>Settings and scores</h3>", _picture(picture, "parallel coordinates of settings and scores")]


def _runs(records: Sequence[Record]) -> list[str]:
    """Return a table of all runs, the values that all runs share, and the commands that started them, as HTML."""
    rows, commands = [], {}
    for record in records:
        origin = record.result.get("origin")
        origin = origin if isinstance(origin, dict) else {}
        final, seconds = record.final_metrics(), record.result.get("total_seconds")
        row = {"run": record.member or record.name, "seed": _text(record.seed)}
        for name, metric in (("evaluation", EVALUATION), ("training", TRAINING)):
            row[name] = f"{final[metric]:.6g}" if metric in final else ""
        row |= {"steps": f"{record.steps:,}", "seconds": "" if seconds is None else f"{seconds:,.0f}"}
        row["settings"] = ", ".join(f"{name}={_text(value)}" for name, value in record.settings.items())
        row |= {"task": record.title, "ended": record.ended}
        row |= {name: str(origin.get(name, "")) for name in ("machine", "versions")}
        rows.append(row)
        if origin.get("command"):
            commands[str(origin["command"])] = None
    parts = _table(rows)
    text = _escaped("\n".join(list(commands)[:_MOST_ROWS]))
    return [*parts, "<h3>Commands</h3>", f"<pre><code>{text}</code></pre>"] if commands else parts


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return rows of text as an HTML table, followed by the values that all rows share."""
    same = {name for name in list(rows[0])[1:] if name != "IQM" and len({row[name] for row in rows}) == 1}
    names = [name for name in rows[0] if name not in same]
    marks = [' class="text"' * (name in _TEXTS) for name in names]

    def line(tag, cells):
        marked = zip(marks, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{mark}>{_escaped(cell)}</{tag}>' for mark, cell in marked)}</tr>"

    lines = [line("th", names), *(line("td", [row[name] for name in names]) for row in rows[:_MOST_ROWS])]
    notes = [f"and {len(rows) - _MOST_ROWS:,} more"] * (len(rows) > _MOST_ROWS)
    notes += [f"{name}: {cell}" for name, cell in rows[0].items() if name in same and cell]
    table = '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"
    return [table, f'<p class="note">{_escaped("; ".join(notes))}</p>']


def _picture(figure: "Chart", about: str) -> str:
    """Return a plot as an image embedded in the page; text in an image cannot be executed."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f'<img alt="{about}" src="data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _text(value: Any) -> str:
    """Return a setting as text; empty for None."""
    return "" if value is None else short(value)


def _escaped(text: str) -> str:
    """Return untrusted text escaped for HTML."""
    return html.escape(files.escape_for_terminal(text))
