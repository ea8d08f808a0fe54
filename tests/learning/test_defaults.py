"""What the shortest commands give, as a stranger would type them: every seed, on the command line's own way.

A row's command is run as it stands here; docs/results.md shows the records (`scripts/update_results.py`).
"""

import shlex
import sys

import numpy as np
import pytest
from helpers.shortest import DEFAULTS, PRESETS

from jaxrl.cli.main import main


def case(kind, row):
    marks = [pytest.mark.xfail(strict=False, reason=row.missed)] if row.missed else []
    return pytest.param(kind, row, id=f"{kind}-{row.name}", marks=marks)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("kind", "row"), [case("defaults", row) for row in DEFAULTS] + [case("preset", row) for row in PRESETS]
)
def test_the_shortest_command(kind, row, tmp_path, kept_dir, record_command):
    """In a directory that outlives a kill: begun again, an hour's training goes on."""
    path = tmp_path / "sweep.npz"
    assert main(["sweep", *shlex.split(row.command), "--run-dir", str(kept_dir), "--out", str(path)]) == 0
    with np.load(path) as saved:
        [scores] = np.nanmean(saved["returns"], axis=-1)
    record_command(f"{kind}-{row.name}", row, scores)
    assert scores.min() >= row.worst and scores.mean() >= row.mean, scores


@pytest.mark.long
@pytest.mark.parametrize("row", [*DEFAULTS, *PRESETS], ids=lambda row: row.name)
def test_every_command_begins(row, monkeypatch):
    """Those too that nobody here had the hours for: words, settings and memory are right."""
    began = []
    monkeypatch.setattr("jaxrl.sweeps.sweep._train_many", lambda *_, **__: began.append(1) or sys.exit(7))
    with pytest.raises(SystemExit):
        main(["sweep", *shlex.split(row.command)])
    assert began


@pytest.mark.parametrize("rows", [DEFAULTS, PRESETS])
def test_every_row_can_fail(rows):
    assert all(np.isfinite(max(row.worst, row.mean)) for row in rows)
    assert len({row.name for row in rows}) == len(rows)
