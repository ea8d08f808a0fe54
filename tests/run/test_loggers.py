import csv
import json
import math
import sys
import types
import warnings

import numpy as np
import pytest

from jaxrl.core.errors import MissingExtraError
from jaxrl.run.loggers import CSVLogger, JSONLLogger, Loggers, TensorBoardLogger, WandbLogger, read_metrics


def test_jsonl_rows_come_back(tmp_path):
    logger = JSONLLogger(tmp_path / "run" / "metrics.jsonl")
    logger.write(1, {"loss": np.float32(0.5), "count": np.int32(3), "bad": math.nan, "worse": -math.inf})
    assert read_metrics(logger.path) == [{"step": 1, "loss": 0.5, "count": 3, "bad": None, "worse": None}]  # unclosed
    logger.close()
    assert type(read_metrics(logger.path)[0]["count"]) is int


def test_a_resumed_run_appends_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a"')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    logger = JSONLLogger(path)
    logger.write(3, {"a": 3})
    logger.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3, 4):
        logger.write(step, {"a": 1.0})
    logger.truncate_after(2)
    logger.write(3, {"a": 2.0})
    logger.close()
    assert [(row["step"], row["a"]) for row in read_metrics(logger.path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_csv_grows_columns(tmp_path):
    jsonl = JSONLLogger(tmp_path / "metrics.jsonl")
    loggers = Loggers([jsonl, CSVLogger(tmp_path / "metrics.csv", jsonl.path)])
    loggers.write(1, {"a": 1.0})
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,a", "1,1.0"]
    loggers.write(2, {"a": 2.0, "evaluation/return_mean": 5.0})
    loggers.write(3, {"b": 3.0})
    loggers.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"step": "1", "a": "1.0", "evaluation/return_mean": "", "b": ""}
    assert rows[2] == {"step": "3", "a": "", "evaluation/return_mean": "", "b": "3.0"}


def test_tensorboard_events_are_written_and_a_resumed_run_adds_a_file(tmp_path):
    for resumed_at, loss in ((None, "first"), (5, "second")):
        logger = TensorBoardLogger(tmp_path, resumed_at=resumed_at)
        logger.write(6, {loss: 0.25, "none": None})
        logger.close()
    first, second = sorted(tmp_path.glob("events.out.tfevents.*"))
    assert b"first" in first.read_bytes()
    assert b"second" in second.read_bytes()


def test_wandb_without_the_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'jaxrl\[wandb\]'"):
        WandbLogger("project")


def test_wandb_gets_rows_and_is_finished(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=calls.append,
        finish=lambda: calls.append("end"),
    )
    fake = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger("project", config={"seed": 0}, run_id="cartpole")
    logger.write(2, {"a": 1.0})
    logger.write(1, {"evaluation/a": 3.0})  # of an evaluation beside the run
    logger.close()
    assert (calls[0]["id"], calls[0]["resume"], calls[0]["config"]) == ("cartpole", "allow", {"seed": 0})
    assert calls[1:] == [("*", "step"), {"step": 2, "a": 1.0}, {"step": 1, "evaluation/a": 3.0}, "end"]


class Broken:
    def __init__(self):
        self.writes = self.closes = 0

    def write(self, step, metrics):
        self.writes += 1
        raise ConnectionError("the server is down")

    def close(self):
        self.closes += 1
        raise ConnectionError("still down")


def test_a_failing_logger_warns_once_and_is_switched_off(tmp_path):
    broken, jsonl = Broken(), JSONLLogger(tmp_path / "metrics.jsonl")
    loggers = Loggers([broken, jsonl])
    with pytest.warns(RuntimeWarning, match="Broken failed and is disabled.*ConnectionError: the server is down"):
        loggers.write(1, {"a": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loggers.write(2, {"a": 1.0})
        loggers.close()
    assert (broken.writes, broken.closes) == (1, 1)
    assert len(read_metrics(jsonl.path)) == 2


def test_a_logger_that_fails_to_close_warns(tmp_path):
    loggers = Loggers([Broken()])
    with pytest.warns(RuntimeWarning, match="still down"):
        loggers.close()
    loggers.close()


@pytest.mark.faults
def test_a_full_disk_does_not_stop_training(tmp_path):
    jsonl = JSONLLogger(tmp_path / "metrics.jsonl")
    jsonl._file = open("/dev/full", "w")
    csv_logger = CSVLogger(tmp_path / "metrics.csv", jsonl.path)
    loggers = Loggers([jsonl, csv_logger])
    with pytest.warns(RuntimeWarning, match="JSONLLogger failed.*No space left"):
        loggers.write(1, {"a": 1.0})
    assert loggers.active == [csv_logger]
