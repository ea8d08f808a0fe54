"""The text log of a run: what is said stands in it, with times, also of a run that goes on; it stays small."""

import re
import warnings

import pytest
from helpers import programs
from helpers.programs import ENV, NUM_ENVS, ROWS

from jaxrl.run.directory import run_log
from jaxrl.run.directory.run_log import RunLog

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def lines(path):
    text = (path / "log.txt").read_text()
    assert all(re.match(TIME, line) for line in text.splitlines()), text
    return [re.sub(TIME, "", line, count=1) for line in text.splitlines()]


def test_what_was_said_before_there_was_a_directory_comes_first(tmp_path):
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00 of before\n")
    log = RunLog()
    log.write("early")
    log.open(tmp_path)
    log.write("late\x1b[2J")
    log.close()
    log.write("of no directory")
    assert lines(tmp_path) == ["of before", "early", "late\\x1b[2J"]


def test_warnings_are_logged_and_shown_as_before(tmp_path):
    before = warnings.showwarning
    with pytest.warns(RuntimeWarning, match="of something"), run_log.logged() as log:
        log.open(tmp_path)
        warnings.warn("of something", RuntimeWarning, stacklevel=1)
    assert lines(tmp_path) == ["warning: of something"] and warnings.showwarning is before
    with pytest.raises(ValueError, match="wrong"), run_log.logged() as log:
        log.open(tmp_path)
        raise ValueError("wrong")
    assert lines(tmp_path)[1:] == ["error: wrong"] and warnings.showwarning is before


def test_the_older_half_goes_where_it_grows_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "_MOST", 1_000)
    log = RunLog()
    log.open(tmp_path)
    for number in range(200):
        log.write(str(number))
        assert (tmp_path / "log.txt").stat().st_size <= 1_000
    found = [int(line) for line in lines(tmp_path)]
    assert found == list(range(found[0], 200)) and 15 < len(found) < 50


def test_what_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "log.txt").symlink_to(tmp_path / "elsewhere")
    log = RunLog()
    for directory in (tmp_path, tmp_path / "gone"):
        log.open(directory)
        log.write("lost")
    assert (tmp_path / "elsewhere").read_text() == "mine" and not (tmp_path / "gone").exists()


@pytest.mark.long
def test_a_run_says_how_it_went_and_goes_on_where_it_was(tmp_path):
    def train(rows, **others):
        settings = {"evaluation_episodes": NUM_ENVS, "seed": 3, **others}
        return programs.train(tmp_path, total_steps=rows * ROWS, **settings)

    train(2, evaluate_every=ROWS)
    began = f"PPO on {ENV.name}, seed 3, {2 * ROWS:,} steps"
    first = lines(tmp_path)
    assert first[0] == began and first[-1] == f"finished at step {2 * ROWS:,}"
    assert [line.split(":")[0] for line in first if "evaluation" in line] == [f"step {ROWS}", f"step {2 * ROWS}"]
    train(3)
    later = lines(tmp_path)
    assert later[: len(first)] == first and f"resumed at step {2 * ROWS}" in later[len(first) :]
    assert later[-1] == f"finished at step {3 * ROWS:,}"
    train(1, overwrite=True)
    assert lines(tmp_path)[0] == f"PPO on {ENV.name}, seed 3, {ROWS:,} steps"
