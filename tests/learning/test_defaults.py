"""Trainings by the shortest commands: every seed, on the command line's own way.

A row's command is run as `benchmarks/zoo.toml` has it; docs/zoo.md shows the records (`scripts/update_results.py`).
"""

import json
import shlex
import sys

import numpy as np
import pytest
from helpers.result_tables import RECORDS
from helpers.shortest import DEFAULTS, PRESETS, Missed, Row, check, train

from jaxrl.cli.main import main


def case(kind, row):
    missed = row.worst_missed or row.mean_missed
    marks = [pytest.mark.xfail(strict=False, reason=missed, raises=Missed)] if missed else []
    return pytest.param(kind, row, id=f"{kind}-{row.name}", marks=marks)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("kind", "row"), [case("defaults", row) for row in DEFAULTS] + [case("preset", row) for row in PRESETS]
)
def test_the_shortest_command(kind, row, kept_dir, record_command):
    """In a directory that outlives a kill: begun again, an hour's training goes on."""
    outcome = train(row, kept_dir)
    record_command(row, outcome)
    check(row, outcome.scores)


ROWS = [pytest.param(row, id=row.name) for row in [*DEFAULTS, *PRESETS]]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_every_command_begins(row, monkeypatch):
    """Words, settings and memory are right, also of commands that take too many hours here."""
    began = []
    monkeypatch.setattr("jaxrl.sweeps.sweep.train_many", lambda *_, **__: began.append(1) or sys.exit(7))
    with pytest.raises(SystemExit):
        main(["sweep", *shlex.split(row.command)])
    assert began


@pytest.mark.parametrize("rows", [DEFAULTS, PRESETS])
def test_every_row_can_fail(rows):
    assert all(np.isfinite(max(row.worst, row.mean)) for row in rows)
    for row in rows:
        assert not row.worst_missed or np.isfinite(row.worst), row
        assert not row.mean_missed or np.isfinite(row.mean), row


@pytest.mark.parametrize(
    ("scores", "error"),
    [
        ([-150.0, -190.0], None),
        ([-150.0, -207.5], Missed),
        ([-170.0, -198.0], AssertionError),  # the mean is too low, though the worst seed is good enough
        ([-170.0, -207.5], AssertionError),
        ([-150.0, np.nan], AssertionError),
    ],
)
def test_what_a_row_does_not_say_is_missed_holds(scores, error):
    """Before, a row with one figure missed could not fail in the other one either."""
    row = Row("it", "", "", worst=-200.0, mean=-182.75, worst_missed="one seed at -207.5")
    found = None
    try:
        check(row, np.asarray(scores))
    except AssertionError as raised:
        found = type(raised)
    assert found is error


@pytest.mark.parametrize(("kind", "rows"), [("defaults", DEFAULTS), ("preset", PRESETS)])
def test_the_records_miss_what_their_rows_say(kind, rows):
    found, said = set(), {row.name for row in rows if row.worst_missed or row.mean_missed}
    for row in rows:
        path = RECORDS / f"learning-{kind}-{row.name}.json"
        if not path.exists():  # docs/zoo.md says so
            said -= {row.name}
            continue
        [record] = json.loads(path.read_text())["rows"]
        try:
            check(row, np.asarray(record["scores"]))
        except Missed:
            found |= {row.name}
    assert found == said
