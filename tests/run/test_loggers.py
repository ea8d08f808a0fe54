import csv
import errno
import json
import math
import os
import sys
import types
import warnings

import numpy as np
import pytest
from helpers.events import all_events, read_events
from PIL import Image

from jaxrl.core.errors import MissingExtraError, RunDirectoryError
from jaxrl.plots.curves import plot_run
from jaxrl.run import loggers as loggers_module
from jaxrl.run.loggers import (
    CSVLogger,
    JSONLLogger,
    Loggers,
    TensorBoardLogger,
    WandbLogger,
    read_metrics,
    write_csv,
)
from jaxrl.run.plotting import as_run


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
    logger.close()
    logger = JSONLLogger(logger.path, last=2)
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


def test_tensorboard_is_told_hyperparameters_once_and_shows_videos(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    config = {"seed": 3, "algorithm": {"type": "algorithm:ppo", "gamma": 0.5, "widths": [64, 64], "shared": True}}
    gif = tmp_path / "000000000004.gif"
    frames = [Image.new("P", (5, 3), color) for color in (0, 1)]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], duration=20)
    for step in (4, 8):
        logger = TensorBoardLogger(tmp_path / "tensorboard", config=config, resumed_at=step - 4 or None)
        logger.write(step, {"train/return_mean": 1.0})
        logger.show(step, gif)
        logger.close()
    first, second = all_events(tmp_path / "tensorboard")
    told = [value for event in first for value in event.summary.value if value.metadata.plugin_data.content]
    experiment, begins = (HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in told)
    values = dict(begins.session_start_info.hparams.items())
    assert {name: value.number_value for name, value in values.items() if value.HasField("number_value")} == {
        "seed": 3.0,
        "algorithm.gamma": 0.5,
    }
    assert values["algorithm.type"].string_value == "algorithm:ppo" and values["algorithm.shared"].bool_value
    assert {info.name.tag for info in experiment.experiment.metric_infos} >= {"evaluation/return_mean"}
    assert not any(value.metadata.plugin_data.content for event in second for value in event.summary.value)
    for events, step in ((first, 4), (second, 8)):
        (image,) = (
            value.image
            for event in events
            if event.step == step
            for value in event.summary.value
            if value.tag == "video"
        )
        assert (image.width, image.height, image.encoded_image_string) == (5, 3, gif.read_bytes())
    assert read_events(tmp_path / "tensorboard")[0] == [4, 8]


@pytest.fixture
def wandb_calls(monkeypatch):
    """What is asked of wandb, in order."""
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=calls.append,
        finish=lambda: calls.append("end"),
    )
    video = lambda path, format: (path, format)  # noqa: E731, A002
    fake = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run, Video=video)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_goes_on_with_the_run_whose_id_lies_in_the_directory(tmp_path, wandb_calls):
    def asked():
        return [call["id"] for call in wandb_calls if "id" in call]

    for resume in (True, True, False):
        logger = WandbLogger("project", directory=tmp_path, resume=resume)
        logger.write(1, {"a": 1.0})
        logger.close()
    first, second, third = asked()
    assert first == second != third and len(first) == 16
    for hostile in ("[" * 500_000, '{"id": "../../x"}', '{"id": 3}', "[]"):
        (tmp_path / "wandb_run.json").write_text(hostile)
        WandbLogger("project", directory=tmp_path)
        assert asked()[-1] not in asked()[:-1]
    assert not (tmp_path / "elsewhere").exists()
    WandbLogger("project", directory=tmp_path / "elsewhere")  # nothing is written before the run begins
    assert not (tmp_path / "elsewhere").exists()
    loggers = Loggers([logger, JSONLLogger(tmp_path / "metrics.jsonl")])  # which takes no videos
    loggers.show(2, tmp_path / "x.gif")
    assert wandb_calls[-1] == {"step": 2, "video": (str(tmp_path / "x.gif"), "gif")}


def test_a_video_that_is_not_taken_holds_no_row_back(tmp_path):
    class NoVideos(JSONLLogger):
        def show(self, step, video):
            raise ValueError("no such codec")

    loggers = Loggers([NoVideos(tmp_path / "metrics.jsonl")])
    with pytest.warns(RuntimeWarning, match="NoVideos .*no such codec") as told:
        for step in range(3):
            loggers.show(step, tmp_path / "x.gif")
            loggers.write(step, {"a": 1.0})
    loggers.close()
    assert len(told) == 1 and len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_wandb_without_the_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'jaxrl\[wandb\]'"):
        WandbLogger("project")


def test_wandb_gets_rows_and_is_finished(wandb_calls):
    logger = WandbLogger("project", config={"seed": 0}, run_id="cartpole")
    logger.write(2, {"a": 1.0})
    logger.write(1, {"evaluation/a": 3.0})  # of an evaluation beside the run
    logger.close()
    made, *calls = wandb_calls
    assert (made["id"], made["resume"], made["config"]) == ("cartpole", "allow", {"seed": 0})
    assert made["reinit"] == "create_new", "neither the user's run nor that of another logger"
    assert calls == [("*", "step"), {"step": 2, "a": 1.0}, {"step": 1, "evaluation/a": 3.0}, "end"]


@pytest.mark.long
def test_wandb_runs_of_several_loggers_and_of_the_user_are_their_own(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    mine = wandb.init(project="notes")
    one, other, unclosed = (WandbLogger("agents", name=name, run_id=name) for name in ("one", "other", "unclosed"))
    assert len({mine.id, *(logger._run.id for logger in (one, other, unclosed))}) == 4
    other.close()
    one.write(1, {"a": 1.0})
    again = WandbLogger("agents", run_id="unclosed")
    again.write(2, {"a": 1.0})
    for logger in (again, one, unclosed):
        logger.close()
    mine.log({"figure": 1.0})
    mine.finish()


class Broken:
    """Fails until it is repaired."""

    def __init__(self):
        self.rows, self.attempts, self.closes, self.repaired = [], 0, 0, False

    def write(self, step, metrics):
        self.attempts += 1
        if not self.repaired:
            raise ConnectionError("the server is down")
        self.rows.append(step)

    def close(self):
        self.closes += 1
        if not self.repaired:
            raise ConnectionError("still down")


def test_a_failing_logger_warns_once_and_gets_its_rows_when_it_works_again(tmp_path):
    broken, jsonl = Broken(), JSONLLogger(tmp_path / "metrics.jsonl")
    loggers = Loggers([broken, jsonl])
    with pytest.warns(RuntimeWarning, match="Broken .*ConnectionError"):
        loggers.write(1, {"a": 1.0})
    with warnings.catch_warnings(action="error"):
        for step in range(2, 40):
            loggers.write(step, {"a": 1.0})
        assert broken.attempts <= 6, "it is tried less and less often"
        broken.repaired = True
        loggers.close()
        loggers.close()
    assert broken.rows == list(range(1, 40)) and broken.closes == 1
    assert len(read_metrics(jsonl.path)) == 39


def test_rows_that_are_lost_are_counted(monkeypatch):
    monkeypatch.setattr(loggers_module, "_MOST_WAITING", 5)
    loggers = Loggers([Broken()])
    with pytest.warns(RuntimeWarning) as warned:
        for step in range(8):
            loggers.write(step, {"a": 1.0})
        loggers.close()
    told = [str(one.message) for one in warned]
    assert len(told) == 2 and "Broken could not write 8 rows of metrics" in told[1]


class Picky(Broken):
    """Never takes some rows."""

    def __init__(self, refused, error):
        super().__init__()
        self.refused, self.error, self.repaired = refused, error, True

    def write(self, step, metrics):
        if step in self.refused:
            raise self.error
        super().write(step, metrics)


@pytest.mark.parametrize("steps", [9, 200])
def test_rows_that_a_logger_never_takes_are_lost_alone(steps):
    picky = Picky({2, 3, 7}, KeyError("train/return_mean"))
    loggers = Loggers([picky])
    with pytest.warns(RuntimeWarning) as warned:
        for step in range(1, steps):
            loggers.write(step, {"a": 1.0})
        assert steps < 100 or picky.rows[-1] == steps - 1, "the later ones do not wait for the end"
        loggers.close()
    assert picky.rows == [step for step in range(1, steps) if step not in picky.refused]
    assert "Picky could not write 3 rows of metrics" in str(warned[-1].message) and len(warned) == 2


def test_a_row_too_long_for_a_full_disk_is_not_passed_over(monkeypatch):
    picky = Picky({2}, OSError(errno.ENOSPC, "No space left on device"))
    loggers = Loggers([picky])
    with pytest.warns(RuntimeWarning, match="No space left"):
        for step in range(1, 200):
            loggers.write(step, {"a": 1.0})
    picky.refused = set()
    loggers.close()
    assert picky.rows == list(range(1, 200))


def test_a_logger_that_fails_to_close_warns(tmp_path):
    loggers = Loggers([Broken()])
    with pytest.warns(RuntimeWarning, match="still down"):
        loggers.close()
    loggers.close()


@pytest.mark.faults
def test_a_disk_that_was_full_costs_no_row(tmp_path, monkeypatch):
    jsonl = JSONLLogger(tmp_path / "metrics.jsonl")
    tensorboard = TensorBoardLogger(tmp_path / "tensorboard", resumed_at=0)
    disk, jsonl._file = jsonl._file, open("/dev/full", "w")
    (tmp_path / "tensorboard").symlink_to("/dev/full")  # no folder can be there
    loggers = Loggers([jsonl, tensorboard, CSVLogger(tmp_path / "metrics.csv", jsonl.path)])
    with pytest.warns(RuntimeWarning) as warned:
        loggers.write(1, {"a": 1.0})
    told = sorted(str(one.message) for one in warned)
    assert len(told) == 2 and "JSONLLogger failed" in told[0] and "No space left" in told[0]
    assert "TensorBoardLogger failed" in told[1]
    jsonl._file.close()
    jsonl._file = disk
    (tmp_path / "tensorboard").unlink()
    loggers.write(2, {"a": 2.0})
    loggers.write(3, {"a": 3.0})
    assert read_events(tmp_path / "tensorboard") == ([1, 2, 3], [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(loggers_module.TfRecordWriter, "flush", full)
        for step in range(4, 12):  # attempts at the open file, and at new ones
            loggers.write(step, {"a": float(step)})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "an attempt that fails leaves no file"
    loggers.close()
    assert [row["a"] for row in read_metrics(jsonl.path)] == list(range(1, 12))
    assert read_events(tmp_path / "tensorboard") == (list(range(1, 12)), [1]), "hides what came before the resume only"


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.faults
def test_a_first_event_file_that_fails_leaves_none_and_the_next_hides_what_is_older(tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path, resumed_at=4)
    with monkeypatch.context() as patch:
        patch.setattr(loggers_module.TfRecordWriter, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            logger.write(5, {"a": 1.0})
    assert not list(tmp_path.iterdir())
    logger.write(5, {"a": 1.0})
    logger.close()
    assert read_events(tmp_path) == ([5], [5])


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    """As a disk that is full after some bytes leaves it."""
    logger, write = JSONLLogger(tmp_path / "metrics.jsonl"), os.write
    sizes = iter([5])

    def full(descriptor, data):
        if (size := next(sizes, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:size])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            logger.write(1, {"a": 1.0})
    logger.write(1, {"a": 1.0})
    logger.close()
    assert logger.path.read_text() == '{"step": 1, "a": 1.0}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "a": "text"}',
        b'{"step": 2, "a": {"b": [1]}}',
        b'{"step": 2, "a": ' + b"9" * 400 + b"}",
        b'{"step": 2, "a": true}',
        b'{"step": 2, "a": NaN}',
        b'{"step": true, "a": 1}',
        b'{"step": ' + b"9" * 30 + b', "a": 1}',
        b'{"step": -3, "a": 1}',
        b'{"step": 2, "a": ' + b"[" * 100_000,
        b"\xff\xfe\x00",
        b"\x80" * 10,
        b"null",
    ],
    ids=lambda line: repr(line[:24]),
)
def test_lines_that_jaxrl_did_not_write_are_passed_over(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1.0}\n' + line + b'\n{"step": 3, "a": 3.0}\n')
    assert [row["a"] for row in read_metrics(path) if "a" in row] == [1.0, 3.0]
    plot_run(as_run("run", {}, read_metrics(path)), tmp_path / "curve.png")
    logger = JSONLLogger(path)
    logger.write(4, {"a": 4.0})
    logger.close()
    assert [row["a"] for row in read_metrics(path) if "a" in row] == [1.0, 3.0, 4.0]


def test_a_line_is_read_up_to_a_limit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = b'{"step": 2, "a": 2.0}'
    long = row.ljust(1 << 20) + b"\n" + row.rjust((1 << 20) + 1) + b"\n"  # in pieces, each would be a row
    path.write_bytes(b'{"step": 1, "a": 1.0}\n' + long + b'{"step": 3, "a": 3.0}')
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    JSONLLogger(path).close()
    assert path.read_text() == '{"step": 1, "a": 1.0}\n{"step": 3, "a": 3.0}\n'


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunDirectoryError, match="metrics cannot be written"):
        JSONLLogger(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_links_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(RunDirectoryError, match="metrics cannot be written"):
        JSONLLogger(tmp_path / "metrics.jsonl")
    for name in ("metrics.csv", "metrics.csv.tmp"):
        (tmp_path / name).symlink_to(precious)
    write_csv(tmp_path / "metrics.csv", [{"step": 1}])
    assert precious.read_text() == '{"step": 1}\n' and not (tmp_path / "metrics.csv").is_symlink()
