"""Disks and directories that go wrong under a run: nothing of it is silent, and nothing new appears where a run was."""

import os
import re
import shutil
import warnings

import pytest
from helpers import programs
from helpers.disks import At
from helpers.events import read_events
from helpers.programs import ROWS

from jaxrl.core.errors import RunDirectoryError
from jaxrl.run import checkpoint, loop
from jaxrl.run.loggers import read_metrics

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(loop, "_CHUNK_SECONDS", 0.0)


def train(run_dir, *loggers, iterations=6):
    settings = {"evaluate_every": 0, "evaluation_episodes": 8, "checkpoint_every": 2 * ROWS}
    return programs.train(run_dir, total_steps=iterations * ROWS, loggers=loggers, **settings)


@pytest.mark.long
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_whose_directory_disappears_ends_and_leaves_nothing_there(tmp_path, how):
    path, steps = tmp_path / "run", []

    def then():
        path.rename(tmp_path / "moved")  # at once, where a save under way would come between
        if how == "deleted":
            shutil.rmtree(tmp_path / "moved")

    watching = At(0, lambda: None)
    watching.write = lambda step, metrics: steps.append(step)
    with warnings.catch_warnings(record=True) as told:  # a save may have been under way
        warnings.simplefilter("always", RuntimeWarning)
        result = train(path, At(3 * ROWS, then), watching)
    assert result.stopped == "unsaved" and result.total_steps == 4 * ROWS and steps[-1] == 3 * ROWS
    assert len([one for one in told if re.search("run directory .* was deleted or moved", str(one.message))]) == 1
    assert result.policy([0.0, 0.0, 0.0, 0.0])[0] in (0, 1), "what was learned is there"
    assert steps[-1] <= 4 * ROWS, "it is noticed when the next row is written"
    assert not path.exists(), sorted(path.rglob("*"))
    if how == "moved":
        assert train(tmp_path / "moved").total_steps == 6 * ROWS, "and goes on from there"


@pytest.mark.long
def test_a_run_whose_checkpoints_were_deleted_is_refused_and_keeps_its_metrics(tmp_path):
    train(tmp_path, iterations=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RunDirectoryError, match="its checkpoints are gone"):
        train(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_nothing_but_a_warning(tmp_path, monkeypatch):
    """Every write of metrics and checkpoints fails from the third iteration on, until the fifth."""
    full, write, open_events, save = [False], os.write, loggers_opened(), checkpoint.Checkpointer._write

    def failing(real):
        def write_or_not(*arguments):
            if full[0]:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        return write_or_not

    monkeypatch.setattr(os, "write", failing(write))
    monkeypatch.setattr("jaxrl.run.loggers.TfRecordWriter.flush", failing(open_events))
    monkeypatch.setattr("jaxrl.run.loggers.write_csv", failing(lambda *_: None))
    monkeypatch.setattr(checkpoint.Checkpointer, "_write", failing(save))
    fill, empty = (At(n * ROWS, lambda state=state: full.__setitem__(0, state)) for n, state in ((3, True), (5, False)))
    train(tmp_path, iterations=2)
    with pytest.warns(RuntimeWarning) as warned:
        train(tmp_path, fill, empty)
    told = [str(one.message) for one in warned]
    assert len([line for line in told if "JSONLLogger failed" in line]) == 1
    assert len([line for line in told if "could not be saved" in line]) == 1
    assert not any("lost" in line for line in told)
    written = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert sorted({*written}) == [step * ROWS for step in range(1, 7)]
    steps, hidden = read_events(tmp_path / "tensorboard")
    assert steps == written
    assert hidden == [2 * ROWS + 1], "what the resumed run wrote before the disk was full stays visible"
    assert checkpoint.complete_steps(tmp_path / "checkpoints")[-1] == 6 * ROWS


def loggers_opened():
    from jaxrl.data.tfrecord import TfRecordWriter

    return TfRecordWriter.flush
