"""What a sweep leaves behind: curves, tables, a picture, and the policy of its best run."""

import csv
import json

import jax
import numpy as np
import pytest
from helpers.programs import ENV, PPO, ROWS, anakin, assert_equal
from helpers.results import made
from helpers.strict_json import read_json
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import JaxrlError, NonFiniteError, RunDirectoryError
from jaxrl.plots.curves import EVALUATION, TRAINING
from jaxrl.plots.importance import importance
from jaxrl.run import plotting
from jaxrl.run.directory import sweep_directory
from jaxrl.run.directory.run_directory import read_config
from jaxrl.run.loggers import read_metrics
from jaxrl.sweeps.records import read_records, to_pandas
from jaxrl.sweeps.results import leave

pytestmark = pytest.mark.long

SEEDS = [0, 4]
RATES = [1e-2, 1e30, 3e-3]  # the second destroys its run
FILES = {"sweep.json", "metrics.jsonl", "curves.csv", "table.csv", "table.md", "curves.png", "best"}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("swept") / "sweep"
    settings = {"total_steps": 10 * ROWS, "topology": anakin(), "evaluation_episodes": 8, "points": 5}
    settings |= {"seeds": SEEDS, "learning_rate": RATES, "mapping": "in_turn", "devices": 1, "progress": False}
    return jaxrl.sweep(PPO, ENV, run_dir=path, **settings), path


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_leaves_its_curves_tables_picture_and_best_policy(swept):
    result, path = swept
    assert {found.name for found in path.iterdir()} == FILES | {"program-0"}
    curves = rows_of(path / "curves.csv")
    assert len(curves) == 3 * 2 * 5
    for row in curves:
        number, place, point = (
            int(row["configuration"]),
            SEEDS.index(int(row["seed"])),
            int(row["step"]) // (2 * ROWS) - 1,
        )
        assert float(row["learning_rate"]) == RATES[number]
        value = result.metrics[TRAINING][number, place, point]
        assert float(row[TRAINING] or "nan") == pytest.approx(value, nan_ok=True)
    table = rows_of(path / "table.csv")
    assert [float(row["learning_rate"]) for row in table][0] == result.best["learning_rate"]
    assert float(table[0]["IQM"]) == pytest.approx(np.nanmax(result.interquartile_means))
    assert float(table[0]["seed 4"]) == pytest.approx(result.scores[RATES.index(result.best["learning_rate"]), 1])
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (path / "table.md").read_text().splitlines()
    ]
    assert [" ".join(row).split() for row in (cells[0], *cells[2:])] == [
        line.split() for line in result.table().splitlines()
    ]


def test_the_best_policy_of_a_sweep_loads_and_is_evaluated(swept, capsys):
    result, path = swept
    number = int(np.nanargmax(result.interquartile_means))
    place = int(np.nanargmax(result.scores[number]))
    learner = jax.tree.map(lambda x: x[place], result.learners[number])
    loaded = jaxrl.load(path)
    assert_equal(loaded.actor, loaded.algo.actor(learner))
    assert loaded.algo.learning_rate == pytest.approx(result.best["learning_rate"])
    assert_equal(jaxrl.load(path, best=True).actor, loaded.actor)
    config = read_config(path / "best")
    assert config["seed"] == SEEDS[place] and config["algorithm"]["learning_rate"] == result.best["learning_rate"]
    last = read_metrics(path / "best" / "metrics.jsonl")[-1]
    assert last["step"] == 10 * ROWS and last[EVALUATION] == pytest.approx(result.scores[number, place])
    assert main.main(["eval", str(path), "--episodes", "2"]) == 0
    assert f"checkpoint at step {10 * ROWS}" in capsys.readouterr().out


def test_the_directory_of_a_sweep_is_drawn_as_the_sweep_itself(swept, tmp_path):
    result, path = swept
    of_files = plotting.plot_runs([path], tmp_path / "files.png")
    of_result = result.plot(tmp_path / "result.png")
    assert (tmp_path / "files.png").read_bytes() == (tmp_path / "result.png").read_bytes()
    assert (path / "curves.png").read_bytes() == (tmp_path / "result.png").read_bytes()
    (axes,) = of_files.axes
    assert [line.get_label() for line in axes.get_lines()] == [f"learning_rate={rate:.3g}" for rate in RATES]
    assert axes.get_title() == of_result.axes[0].get_title() == "PPO on gymnax:CartPole-v1"
    beside = plotting.plot_runs([path, path / "best"], tmp_path / "beside.png").axes[0].get_lines()
    assert [line.get_label() for line in beside] == [line.get_label() for line in axes.get_lines()], "the best is there"


def test_a_result_is_saved_where_one_says(swept, tmp_path):
    result, path = swept
    assert result.save(tmp_path / "a" / "copy") == tmp_path / "a" / "copy"
    assert {found.name for found in (tmp_path / "a" / "copy").iterdir()} == FILES
    for name in FILES - {"best"}:
        assert (tmp_path / "a" / "copy" / name).read_bytes() == (path / name).read_bytes()
    result.save(tmp_path / "a" / "copy")
    with pytest.raises(RunDirectoryError, match="contains the best policy"):
        result.save(path / "best")
    with pytest.raises(RunDirectoryError, match="another sweep.*overwrite=True"):
        made([[1.0, 2.0]]).save(tmp_path / "a" / "copy")
    with pytest.raises(RunDirectoryError, match="the results of another sweep"):
        jaxrl.sweep(PPO, ENV, total_steps=ROWS, devices=1, topology=anakin(), run_dir=tmp_path / "a" / "copy")
    assert_equal(jaxrl.load(tmp_path / "a" / "copy").actor, jaxrl.load(path).actor)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "best").symlink_to(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="is a link"):
        result.save(tmp_path / "linked")


def test_a_sweep_in_which_all_fail_leaves_its_table_and_no_policy(tmp_path):
    assert made([[np.nan, np.nan], [1.0, 1.0]]).best == {"clip": 0.2}, "the other one has no score"
    failed = made([[np.nan, np.nan]])
    failed.save(tmp_path)
    with pytest.raises(NonFiniteError, match="every run"):
        failed.best  # noqa: B018
    record = read_json(tmp_path / "sweep.json")
    assert record["best"] is None and set(record["origin"]) == {"command", "machine", "versions"}
    assert "nan" in (tmp_path / "table.md").read_text() and (tmp_path / "curves.png").exists()
    with pytest.raises(RunDirectoryError, match="none of its runs has a score"):
        jaxrl.load(tmp_path)
    (axes,) = plotting.plot_runs([tmp_path], tmp_path / "x.png").axes
    assert [text.get_text() for text in axes.texts] == ["no episode has ended yet"]


def test_a_sweep_that_had_ended_keeps_the_record_of_its_training(tmp_path):
    """The same call again trains nothing, and would write 0 steps a second; of another sweep nothing is kept."""
    first = leave(made([[1.0]], learners=[()], wall_seconds=60.0, origin={"command": "first"}), tmp_path, trained=True)
    none = {"steps_per_second": 0.0, "wall_seconds": 2.0, "origin": {"command": "again"}, "learners": [()]}
    for score, trained, kept in ((1.0, False, True), (1.5, False, True), (1.0, True, False)):
        found = leave(made([[score]], **none), tmp_path, trained=trained)
        record = read_json(tmp_path / "sweep.json")
        assert record["scores"] == [[score]]
        for name in ("steps_per_second", "wall_seconds", "origin"):
            assert record[name] == getattr(found, name) == (getattr(first, name) if kept else none[name])
    leave(first, tmp_path, trained=True)
    assert leave(made([[1.0], [2.0]], **none | {"learners": [(), ()]}), tmp_path, trained=False).wall_seconds == 2.0


def test_an_unfinished_sweep_says_so(tmp_path):
    (tmp_path / "program-0").mkdir()
    (tmp_path / "program-0" / "config.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="a sweep that has not ended"):
        jaxrl.load(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.one_of(JSON, st.fixed_dictionaries({"format": st.just(1)}, optional={"configs": JSON, "best": JSON}))
TRIALS = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {
            "settings": st.dictionaries(st.text(max_size=2), JSON),
            "ended": st.just("finished"),
            "returns": st.lists(JSON),
        },
        optional={"number": JSON},
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


@given(record=RECORDS, row=JSON, best=st.sampled_from(["/etc", "../x", "a/../../x", 3, None, [], {}]))
def test_whatever_lies_in_a_sweeps_files_is_read_or_refused(record, row, best, folder):
    if isinstance(record, dict) and isinstance(record.get("best"), dict):
        record["best"]["run"] = best
    (folder / "sweep.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    hash(sweep_directory.place_of(folder / "best"))
    for read in (sweep_directory.read_curves, sweep_directory.best_run, to_pandas):
        try:
            found = read(folder)
        except JaxrlError:
            continue
        if read is sweep_directory.best_run:
            assert found.is_relative_to(folder) and ".." not in found.parts


@given(trial=TRIALS)
def test_whatever_lies_in_a_search_is_read_or_refused(trial, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "search"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"format": 1, "tune": {}}')
    (path / "study.journal").write_text(json.dumps(trial) + "\n")
    try:
        _, trials = sweep_directory.read_trials(path)
        importance(*zip(*((one.settings, one.score) for one in read_records([path])), strict=True))
    except RunDirectoryError:
        return
    assert len(trials) == 1
