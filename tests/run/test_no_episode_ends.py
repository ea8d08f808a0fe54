"""Where no evaluation finishes an episode: null in every file, NaN in results, and nothing is done twice for it."""

import csv
import math

import pytest
from helpers.programs import ENV, PPO, ROWS, anakin
from helpers.strict_json import check_folder, read_json

import jaxrl
from jaxrl.cli import run_summary
from jaxrl.run.callbacks import Decision, FunctionCallback
from jaxrl.run.directory.follow import follow
from jaxrl.run.directory.run_status import read_result
from jaxrl.run.loggers import read_metrics
from jaxrl.run.loop.schedule import LoopLimits
from jaxrl.run.plotting import plot_runs
from jaxrl.run.settings import RunSettings
from jaxrl.run.training import run_training

EACH = 2 * ROWS
SETTINGS = {"evaluate_every": EACH, "evaluation_episodes": 2, "checkpoint_every": ROWS, "progress": False}


def train(run_dir, total_steps=2 * EACH, **settings):
    settings = {"total_steps": total_steps, "topology": anakin(), "run_dir": run_dir, **SETTINGS, **settings}
    limits = LoopLimits(iterations=1, evaluation_steps=3)  # no episode is as short
    return run_training(RunSettings(algo=PPO, env=ENV, **settings), limits)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.warns(RuntimeWarning, match="2 of 2 episodes") as said:
        result = train(tmp_path_factory.mktemp("runs") / "whole")
    assert sum("2 of 2 episodes" in str(warning.message) for warning in said) == 1, "at the first of its evaluations"
    return result


def rows(run_dir):
    """All that was logged, less what depends on the time."""
    timed = ("seconds", "steps_per_second", "updates_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.long
def test_every_file_is_json_and_every_reader_takes_null(whole, tmp_path):
    path = whole.run_dir
    found = list(follow(path, episodes=2, out=path / "evaluations.jsonl"))
    assert found and {"config.json", "metrics.jsonl", "result.json", "manifest.json"} <= check_folder(path)
    assert read_json(path / "result.json")["evaluation"]["return_mean"] is None
    record = read_result(path)
    assert math.isnan(record["evaluation"]["return_mean"]) and record["evaluation"]["unfinished"] == 2
    last = run_summary.report(record | {"explored": True}, "PPO", "e", path)[-1]
    assert last.startswith("evaluation (exploring): no episode ended; 2 reached the step limit; in training ")
    plot_runs([path], tmp_path / "curve.png")
    plot_runs([path], tmp_path / "curve.png", metric="train/return_mean")
    table = [row for row in csv.DictReader((path / "metrics.csv").open()) if row["evaluation/episodes"]]
    assert [row["evaluation/return_mean"] for row in table] == ["", ""]
    assert jaxrl.load(path).algo is not None and list(follow(path, episodes=2, out=path / "evaluations.jsonl")) == []


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"async_evaluation": True}, {"evaluate_every": 3 * ROWS}], ids=str)
def test_a_run_in_parts_logs_what_a_whole_one_does(settings, tmp_path):
    train(tmp_path / "whole", **settings)
    seen = []

    def stopped(moment):
        seen.append(moment.step)
        if moment.step == 3 * ROWS and len(seen) < 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", callbacks=[FunctionCallback(stopped)], callback_every=ROWS, **settings)
    for _ in range(3):
        train(tmp_path / "parts", **settings)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_a_run_that_goes_on_has_the_history_of_one_that_was_not_interrupted(whole, tmp_path):
    train(tmp_path / "run", total_steps=EACH)
    shown = []
    result = train(tmp_path / "run", callbacks=[FunctionCallback(lambda moment: shown.append(moment))])
    mine, other = (
        [row["evaluation/return_mean"] for row in r.metrics if "evaluation/episodes" in row] for r in (result, whole)
    )
    assert len(mine) == len(other) == 2 and all(map(math.isnan, mine + other))
    assert all(math.isnan(moment.score) and math.isnan(moment.metrics["evaluation/return_mean"]) for moment in shown)


@pytest.mark.long
def test_callbacks_are_not_called_twice_at_a_step(tmp_path):
    """Also where the run was interrupted between two calls."""
    calls = []

    def called(moment):
        calls.append(moment.step)
        return None

    for total in (EACH, EACH, 2 * EACH, 2 * EACH):
        train(tmp_path / "run", total_steps=total, callbacks=[FunctionCallback(called)], callback_every=ROWS)
    assert calls == [ROWS, 2 * ROWS, 3 * ROWS, 4 * ROWS]


@pytest.mark.long
def test_a_stopped_run_that_is_started_again_logs_no_other_evaluation(tmp_path):
    stop = FunctionCallback(lambda moment: Decision(stop="enough") if moment.step >= 3 * ROWS else None)
    for _ in range(3):
        result = train(tmp_path / "run", callbacks=[stop], callback_every=ROWS)
        assert (result.stopped, result.total_steps) == ("enough", 3 * ROWS)
    assert [row["step"] for row in rows(tmp_path / "run") if "evaluation/episodes" in row] == [EACH]
