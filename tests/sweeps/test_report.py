"""Sweeps and searches as tables of pandas, and the report on runs as one HTML file."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.refused import refused
from helpers.results import made
from helpers.strict_json import read_json

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.plots.curves import EVALUATION, TRAINING
from jaxrl.plots.lineage import Lineage
from jaxrl.run import plotting
from jaxrl.run.directory import sweep_directory
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.directory.sweep_directory import Trial
from jaxrl.sweeps.records import read_records
from jaxrl.sweeps.tune import TuneResult

HOSTILE = "<script>alert(1)</script><img src=http://x onerror=y>\"'&$a$"
ENVIRONMENT = {"suite": "gymnax", "name": "CartPole-v1", "parameters": {}}


def config(rate, seed=0, name="CartPole-v1", **others):
    algorithm = {"type": "algorithm:ppo", "learning_rate": rate} | others
    return {"algorithm": algorithm, "environment": ENVIRONMENT | {"name": name}, "seed": seed, "total_steps": 200}


def run(path, rate, seed=0, score=5.0, name="CartPole-v1", **result):
    with RunDirectory(path, config(rate, seed, name)) as directory:
        rows = [{"step": step, TRAINING: (score or 1.0) * step / 200} for step in (100, 200)]
        rows.append({"step": 200, EVALUATION: score} if score is not None else {"step": 200})
        directory.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = {"stopped": "finished", "problem": None, "evaluation": {"return_mean": score}} | result
        directory.result.write_text(json.dumps(record))
    return path


RATES, SEEDS = [1e-4, 1e-3, 1e-2, 1e-1], [0, 4]
SCORES = np.array([[1.0, 2.0], [3.0, 4.0], [8.0, 9.0], [math.nan, 0.0]])


def sweep(path):
    """The directory of a sweep, one of whose runs failed."""
    path.mkdir()
    rows = [
        {"configuration": number, "seed": seed, "step": step, TRAINING: float(step + number)}
        for number in range(len(RATES))
        for seed in SEEDS
        for step in (100, 200)
    ]
    record = {"configs": [config(rate) for rate in RATES], "seeds": SEEDS, "scores": SCORES.tolist(), "best": None}
    record["origin"] = {"command": "jaxrl sweep ppo", "machine": "another machine", "versions": "jax 2"}
    sweep_directory.write(path, record, rows, [{"learning_rate": rate} for rate in RATES])
    return path


def search(path):
    path.mkdir()
    trials = [
        {"settings": {"learning_rate": rate, "clip": 0.1 + rate}, "returns": [1.0, 10 * rate], "ended": "finished"}
        for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    ]
    trials.append({"settings": {"learning_rate": 0.9, "clip": 0.3}, "returns": [0.5], "ended": "pruned"})
    trials.append({"settings": {"learning_rate": 1.0, "clip": 0.3}, "returns": [None], "ended": "failed"})
    tuned = {key: value for key, value in config(None).items() if key != "seed"} | {"seeds": [0, 1]}
    (path / "config.json").write_text(json.dumps({"format": 1, "tune": tuned}))
    (path / "study.journal").write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    return path


# --- tables of pandas ----------------------------------------------------------------------------------------------


def result():
    return made(SCORES, configurations=[{"learning_rate": rate} for rate in RATES], seeds=SEEDS)


def test_a_sweep_is_a_table_with_a_row_for_each_run():
    pytest.importorskip("pandas")
    table = result().to_pandas()
    assert list(table["learning_rate"]) == [rate for rate in RATES for _ in SEEDS] and list(table["seed"]) == SEEDS * 4
    np.testing.assert_array_equal(table[EVALUATION], SCORES.ravel())
    np.testing.assert_array_equal(table["ended"] == "failed", np.isnan(SCORES).ravel())
    np.testing.assert_array_equal(table[TRAINING][:6], SCORES.ravel()[:6])
    assert set(table["steps"]) == {128}
    assert 0.9 < result().importance()["learning_rate"] < 1 and len(result().plot_settings().axes) == 1


def test_a_search_is_a_table_with_a_row_for_each_trial():
    pytest.importorskip("pandas")
    trials = [Trial({"clip": 0.1 * n}, [0.0, float(n)], "finished") for n in range(1, 9)]
    trials += [Trial({"clip": 0.2}, [99.0], "pruned"), Trial({"clip": 0.3}, [], "failed", "a value was not finite")]
    found = TuneResult(trials, "PPO on it")
    table = found.to_pandas()
    assert list(table["clip"]) == [trial.settings["clip"] for trial in trials] and list(table["trial"]) == [*range(10)]
    assert list(table["return"][:9]) == [*map(float, range(1, 9)), 99.0] and math.isnan(table["return"][9])
    assert list(table["ended"][8:]) == ["pruned", "failed"] and table["problem"][9] == "a value was not finite"
    assert 0.5 < found.importance()["clip"] <= 1, "without the pruned one"


def test_saved_runs_sweeps_and_searches_are_one_table(tmp_path):
    pytest.importorskip("pandas")
    paths = [run(tmp_path / "a", 1e-3), run(tmp_path / "b", 1e-2, seed=3, score=7.0, name="Acrobot-v1")]
    table = jaxrl.to_pandas([*paths, sweep(tmp_path / "s"), search(tmp_path / "t")])
    assert len(table) == 2 + 8 + 10
    assert list(table["run"][:2]) == ["a", "b"] and list(table["environment"][:2]) == [
        "gymnax:CartPole-v1",
        "gymnax:Acrobot-v1",
    ]
    np.testing.assert_array_equal(table[EVALUATION][:10], [5.0, 7.0, *SCORES.ravel()])
    np.testing.assert_array_equal(table[EVALUATION][10:18], 10 * table["learning_rate"][10:18])
    assert list(table["learning_rate"][2:10]) == [rate for rate in RATES for _ in SEEDS]
    assert list(table["ended"][-2:]) == ["pruned", "failed"] and table["ended"][8] == "failed"
    assert list(table["steps"][10:19]) == [200] * 8 + [100]
    assert len(jaxrl.to_pandas(tmp_path / "a")) == 1, "a single path"


def test_pandas_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"jaxrl\[pandas\]"):
        result().to_pandas()


# --- the report ----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags, their attributes, and the rows of text of the tables of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.text, self.within = [], [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.within = True

    def handle_endtag(self, tag):
        self.within = self.within and tag not in ("td", "th")

    def handle_data(self, data):
        self.text.append(data)
        if self.within:
            self.rows[-1][-1] += data


def page(paths, out):
    return Page(jaxrl.report(paths, out).read_text())


def test_a_report_has_the_scores_of_every_configuration(tmp_path):
    runs = [run(tmp_path / f"{rate}-{seed}", rate, seed, 100 * rate + seed) for rate in (0.1, 0.2) for seed in range(4)]
    found = page(runs, tmp_path / "new" / "report.html")
    header = ["learning_rate", "IQM", "low", "high", "mean", "min", "max", "training"]
    assert found.rows[0] == header, "no setting in which none differ"
    assert any("steps: 200; runs: 4" in text for text in found.text), "what all share is said once"
    best, worst = (dict(zip(header, row, strict=True)) for row in found.rows[1:3])
    assert [best[name] for name in ("learning_rate", "IQM", "mean", "min")] == ["0.2", "21.500", "21.500", "20.000"]
    assert (worst["learning_rate"], worst["IQM"]) == ("0.1", "11.500")
    assert 20 <= float(best["low"]) < 21.5 < float(best["high"]) <= 23
    assert found.tags.count("img") == 1 and "PPO on gymnax:CartPole-v1" in found.text


def test_a_report_on_a_sweep_says_which_settings_matter(tmp_path):
    found = page([sweep(tmp_path / "s"), search(tmp_path / "t")], tmp_path / "report.html")
    assert ["Importance of settings" in found.text, found.tags.count("meter")] == [True, 3]
    assert found.tags.count("img") == 2 + 2
    columns = found.rows[0]
    rows = {row[columns.index("learning_rate")]: row for row in found.rows[: 1 + len(RATES)]}
    assert rows["0.1"][columns.index("no score")] == "1", "a run that failed"
    assert float(rows["0.1"][columns.index("IQM")]) == 0.0, "and counts as the worst of all"
    assert float(rows["0.1"][columns.index("mean")]) == 0.0
    assert sum("Trials" in text for text in found.text) == 1
    assert "jaxrl sweep ppo" in found.text and "another machine" in " ".join(found.text)
    runs = found.rows[-1 - SCORES.size - 10 :]
    assert len(set(runs[0])) == len(runs[0]) and "" not in runs[0], "each column has its name"
    assert all(len(set(cells)) > 1 for cells in zip(*runs[1:], strict=True)), "what all share is said once"


def test_runs_from_data_have_learning_curves_of_their_evaluations(tmp_path):
    path = run(tmp_path / "a", 0.1)
    rows = "".join(json.dumps({"step": step, EVALUATION: step / 10}) + "\n" for step in (100, 200))
    (path / "metrics.jsonl").write_text(rows)
    assert "Learning curves" in page([path], tmp_path / "report.html").text


def test_a_report_names_command_machine_and_versions(tmp_path):
    origin = {"command": "jaxrl train ppo", "machine": "a machine", "versions": "jax 1"}
    found = page([run(tmp_path / "a", 0.1, origin=origin, total_seconds=12.3)], tmp_path / "report.html")
    assert "jaxrl train ppo" in found.text
    [about] = [text for text in found.text if "seconds: 12" in text]
    assert "machine: a machine; versions: jax 1" in about


def test_the_same_runs_are_the_same_report(tmp_path):
    path = sweep(tmp_path / "s")
    one, two = (jaxrl.report(path, tmp_path / name).read_bytes() for name in ("1.html", "2.HTML"))
    assert re.sub(rb"base64,[^\"]*", b"", one) == re.sub(rb"base64,[^\"]*", b"", two)


def test_nothing_of_a_file_is_more_than_text_in_a_report(tmp_path):
    origin = {"command": f"jaxrl {HOSTILE}", "machine": HOSTILE, "versions": [HOSTILE]}
    name = re.sub("/", "", HOSTILE)
    paths = [run(tmp_path / f"{name}{n}", 0.1 * n, n, float(n), HOSTILE, origin=origin) for n in range(5)]
    for n, path in enumerate(paths):  # names and values of settings
        algorithm = {"type": HOSTILE, HOSTILE: f"{HOSTILE}{n}", "learning_rate": 0.1 * n}
        whole = read_json(path / "config.json") | {"algorithm": algorithm}
        (path / "config.json").write_text(json.dumps(whole))
        with (path / "result.json").open("r+") as file:
            record = json.loads(file.read()) | {"stopped": HOSTILE}
            file.seek(0)
            file.write(json.dumps(record))
    found = page(paths, tmp_path / "report.html")
    assert {"script", "iframe", "object", "link", "base", "form"} & set(found.tags) == set()
    allowed = ("meta", "html", "meter", "div", "p", "img", "th", "td")
    assert {tag for tag, *_ in found.attributes} <= set(allowed)
    assert all(not name.startswith("on") for _, name, _ in found.attributes)
    sources = [value for _, name, value in found.attributes if name in ("src", "href")]
    assert sources and all(value.startswith("data:image/svg+xml;base64,") for value in sources)
    policy = dict(pair[1:] for pair in found.attributes if pair[0] == "meta" and pair[1] == "content")["content"]
    assert policy is not None
    assert any(HOSTILE in text for text in found.text), "it is there, as text"
    assert ("meta", "http-equiv", "Content-Security-Policy") in found.attributes


def test_what_no_report_is_written_on(tmp_path):
    (tmp_path / "file").write_text("{}")
    for paths in ([tmp_path / "file"], [run(tmp_path / "a", 0.1), tmp_path / "none"]):
        refused(lambda paths=paths: jaxrl.report(paths, tmp_path / "report.html"), paths[-1].name)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["report.png", "report", "folder.html", "file/report.html"])
def test_where_no_report_is_written(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out='.*"):
        jaxrl.report([run(tmp_path / "a", 0.1)], tmp_path / name)


def test_a_run_without_metrics_has_a_report(tmp_path):
    with RunDirectory(tmp_path / "a", config(0.1)):
        pass
    found = page([tmp_path / "a"], tmp_path / "report.html")
    assert "PPO on gymnax:CartPole-v1" in found.rows[1]


def test_a_run_counts_once_and_what_looks_like_it_counts_too(tmp_path, monkeypatch):
    path = sweep(tmp_path / "s")
    record = read_json(path / "sweep.json")
    inside = [run(path / "a" / f"seed={seed}", RATES[0], seed) for seed in SEEDS]  # as of a sweep on Ray
    record |= {"best": {"configuration": 2, "seed": 4, "run": "best"}, "runs": [["a/seed=0", "a/seed=4"]]}
    (path / "sweep.json").write_text(json.dumps(record))
    best = run(path / "best", 1e-2, 4, 9.0)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    twice = [path, path, "link", "s/../s", best, *inside]
    assert len(read_records(twice)) == len(read_records(twice[::-1])) == SCORES.size
    assert len(read_records([search(tmp_path / "t"), tmp_path / "s" / ".." / "t"])) == 10
    copies = [run(tmp_path / name / "x", 1e-2, 4, 9.0) for name in "ab"]
    assert len(read_records([path, *copies])) == SCORES.size + 2
    found = read_records([best, *copies, best])
    assert [record.name for record in found] == ["best", "a/x", "b/x"]
    page_of_both = page(copies, tmp_path / "report.html")
    assert [row[0] for row in page_of_both.rows[-2:]] == ["a/x", "b/x"]
    assert any("runs: 2" in text for text in page_of_both.text)
    (axes,) = plotting.plot_runs([*copies, copies[0]], tmp_path / "x.png").axes
    assert [line.get_label() for line in axes.get_lines()] == ["PPO"]


def population(path):
    """The directory of a population of which two members look alike."""
    path.mkdir()
    values = [1e-3, 1e-3, 1e-2]
    lineage = Lineage(np.array([100, 200]), 10, np.ones((2, 3)), np.tile(np.arange(3), (2, 1)), {}, 0)
    lineage = dataclasses.replace(lineage, hyperparameters={"learning_rate": np.tile(values, (2, 1))})
    rows = [
        {"configuration": number, "seed": 0, "step": step, TRAINING: 1.0} for number in range(3) for step in (100, 200)
    ]
    record = {"configs": [config(rate) for rate in values], "seeds": [0], "scores": [[7.0]] * 3, "best": None}
    record["lineage"] = lineage.to_json()
    sweep_directory.write(path, record, rows, [{"learning_rate": rate} for rate in values])
    return path


def test_populations_and_searches_stand_beside_runs(tmp_path):
    runs = [run(tmp_path / f"{rate}", rate, 0, 100 * rate) for rate in RATES]
    paths = [*runs, population(tmp_path / "p"), search(tmp_path / "t")]
    assert len(read_records(paths)) == len(RATES) + 3 + 10
    found = page(paths, tmp_path / "report.html")
    assert found.text.count("Learning curves") == 1 and found.text.count("Importance of settings") == 2
    assert found.text.count("Lineage") == 1 and "PPO on gymnax:CartPole-v1 (p)" in found.text
    assert sum("last learning_rate" in row for row in found.rows) == 1, "of the members, whose settings changed"
    with pytest.warns(UserWarning, match="t is left out"):
        (axes,) = plotting.plot_runs(paths, tmp_path / "x.png").axes
    names = [line.get_label() for line in axes.get_lines()]
    assert names[-3:] == [f"PPO, p, member {number}" for number in range(3)]
    assert names[0] == "PPO, learning_rate=0.0001" and len(names) == len(RATES) + 3
    stars = [tuple(point) for one in axes.collections for point in one.get_offsets()]
    assert stars[:4] == [(200.0, pytest.approx(100 * rate)) for rate in RATES], "final evaluations"


def test_steps_that_no_float_holds_are_passed_over(tmp_path):
    path = search(tmp_path / "t")
    whole = read_json(path / "config.json")
    whole["tune"]["total_steps"] = 10**400
    (path / "config.json").write_text(json.dumps(whole))
    assert read_records(path)[0].steps == 2, "the number of evaluations"
    page(path, tmp_path / "report.html")


def test_the_command_writes_a_report(tmp_path, capsys):
    path, out = run(tmp_path / "a", 0.1), tmp_path / "report.html"
    assert main.main(["report", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and out.exists()


def test_the_evaluation_of_another_process_is_the_score(tmp_path):
    path = run(tmp_path / "a", 0.1, score=None, evaluation={"return_mean": 3.0})
    (record,) = read_records([path])
    assert record.score == 3.0 and record.steps == 200
