"""Every kind of write of a run that goes wrong: what was learned is not lost, it is told, and the run goes on later."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
from helpers import programs
from helpers.disks import Disk, nothing_fits, refuse
from helpers.events import read_events
from helpers.processes import environment, python
from helpers.programs import ENV, ROWS, At, Interrupt, assert_equal
from helpers.refused import raises
from helpers.tiers import one_quick

import jaxrl
from jaxrl.core.errors import CheckpointError, DatasetError, JaxrlError, RecordingError, RunDirectoryError
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.directory.run_status import is_finished
from jaxrl.run.loggers import read_metrics
from jaxrl.run.loop import run_loop

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_iteration_chunks")]

ITERATIONS = 6
# By what is written: what its path holds, and the words in which a run tells that it cannot be.
KINDS = {
    "configuration": ("config.json", "cannot write to the run directory"),
    "metrics": ("metrics.jsonl", "JSONLLogger failed; training continues"),
    "table": ("metrics.csv", "CSVLogger failed; training continues"),
    "events": ("tfevents", "TensorBoardLogger failed; training continues"),
    "arrays": ("/state", "could not be saved"),
    "manifest": ("manifest.json", "could not be saved"),
    "result": ("result.json", "the result could not be written"),
    "picture": ("learning_curve.png", "the result could not be written"),
}
# What happens once, when a run begins; only events come later, after the first row.
AT_THE_START = [("configuration", "made"), ("configuration", "written"), ("metrics", "made"), ("events", "made")]
ERRORS = {"disk full": errno.ENOSPC, "quota": errno.EDQUOT, "read-only": errno.EROFS}
WAYS = ("made", "written")


def train(run_dir, *loggers, **settings):
    fixed = {"evaluate_every": 0, "evaluation_episodes": 8, "checkpoint_every": 2 * ROWS}
    return programs.train(run_dir, loggers=loggers, **{"total_steps": ITERATIONS * ROWS} | fixed | settings)


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)
        return train(None)


def assert_it_goes_on(run_dir, reference):
    """Assert that the same call, once all is well again, ends as the reference and leaves every file."""
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        result = train(run_dir)
    assert result.stopped == "finished"
    assert_equal(reference.state, result.state)
    np.testing.assert_array_equal(reference.evaluation.returns, result.evaluation.returns)
    for name in ("config.json", "metrics.jsonl", "metrics.csv", "result.json", "learning_curve.png"):
        assert (run_dir / name).stat().st_size, name
    assert checkpoint.complete_steps(run_dir / "checkpoints")[-1] == ITERATIONS * ROWS
    left = [path.name for path in run_dir.iterdir() if path.name.endswith(".tmp")]
    left += [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not left
    steps = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert steps == sorted(steps)


def told_of(run_dir, *loggers, **settings):
    """Return the result or the error of a run, and its warnings."""
    with warnings.catch_warnings(record=True, action="always", category=RuntimeWarning) as caught:
        try:
            ended = train(run_dir, *loggers, **settings)
        except JaxrlError as error:
            ended = error
    return ended, [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


# One in three errors for each kind and way.
CASES = [(*case, error) for case, error in zip(itertools.product(KINDS, WAYS), itertools.cycle(ERRORS))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "how", "error"),
    CASES,
)
def test_what_cannot_be_written_from_half_of_the_run_on(kind, how, error, reference, tmp_path, monkeypatch):
    words, told = KINDS[kind]
    disk = Disk(monkeypatch, tmp_path, [words], how, refuse(ERRORS[error]))
    disk.on = (kind, how) in AT_THE_START
    ended, lines = told_of(tmp_path / "run", At(3 * ROWS, lambda: setattr(disk, "on", True)))
    disk.on = False
    assert disk.count, "nothing of this kind was written"
    if (kind, how) in AT_THE_START and kind != "events":
        assert isinstance(ended, RunDirectoryError) and re.search(
            r"(?i)cannot.* be written to|cannot write to", str(ended)
        )
        assert lines == []
    else:
        assert_equal(reference.state, ended.state)
        np.testing.assert_array_equal(reference.evaluation.returns, ended.evaluation.returns)
        assert ended.stopped == ("unsaved" if told == "could not be saved" else "finished")
        assert len([line for line in lines if told in line]) == 1, lines
        assert len([line for line in lines if "the result has the state" in line]) == (ended.stopped == "unsaved")
        others = ("which are lost", "the result has the state")
        assert all(told in line or any(other in line for other in others) for line in lines), lines
        assert (tmp_path / "run" / "result.json").exists() == (kind != "result")
    assert_it_goes_on(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("kind", "how"),
    one_quick(list(itertools.product(KINDS, WAYS)), ("result", "made")),
)
def test_the_directory_is_deleted_at_a_write(kind, how, reference, tmp_path, monkeypatch):
    """Just before it happens; then the result is there, and nothing comes to be where the run was."""
    run_dir, once = tmp_path / "run", threading.Lock()

    def delete():
        if once.acquire(blocking=False):
            run_dir.rename(tmp_path / "moved")  # at once, where a save under way would come between
            shutil.rmtree(tmp_path / "moved", ignore_errors=True)

    disk = Disk(monkeypatch, tmp_path / "run", [KINDS[kind][0]], how, delete)
    disk.on = (kind, how) in AT_THE_START
    ended, lines = told_of(run_dir, At(3 * ROWS, lambda: setattr(disk, "on", True)))
    disk.on = False
    assert once.locked(), "nothing of this kind was written"
    assert not run_dir.exists(), sorted(run_dir.rglob("*"))
    if isinstance(ended, RunDirectoryError):
        assert (kind, how) in AT_THE_START and lines == []
    else:
        in_vain = ("failed; training continues", "could not be", "which are lost", "was deleted or moved during")
        assert all(any(told in line for told in in_vain) for line in lines) and 1 <= len(lines) <= 2, lines
        assert ended.stopped == ("finished" if kind in ("result", "picture") else "unsaved")
        assert ended.total_steps >= ROWS and ended.policy([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
        ended.save(tmp_path / "elsewhere")
        assert jaxrl.load(tmp_path / "elsewhere")([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    assert_it_goes_on(run_dir, reference)


@pytest.mark.long
def test_a_run_whose_directory_is_moved_ends_and_goes_on_from_there(reference, tmp_path):
    path, moved = tmp_path / "run", tmp_path / "moved"
    ended, lines = told_of(path, At(3 * ROWS, lambda: path.rename(moved)))
    assert ended.stopped == "unsaved" and ended.total_steps == 4 * ROWS and not path.exists()
    assert len([line for line in lines if "was deleted or moved" in line]) == 1
    assert_it_goes_on(moved, reference)


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_nothing_but_a_warning(tmp_path, monkeypatch):
    """Every write of a resumed run fails from the third iteration on, until the fifth."""
    run_dir = tmp_path / "run"
    train(run_dir, total_steps=2 * ROWS)
    disks = [Disk(monkeypatch, tmp_path, ["run/"], how, refuse(errno.ENOSPC)) for how in WAYS]

    def fill(full):
        for disk in disks:
            disk.on = full

    ended, lines = told_of(run_dir, At(3 * ROWS, lambda: fill(True)), At(5 * ROWS, lambda: fill(False)))
    assert ended.stopped == "finished" and ended.total_steps == ITERATIONS * ROWS
    for told in ("JSONLLogger failed", "TensorBoardLogger failed", "could not be saved"):
        assert len([line for line in lines if told in line]) == 1, lines
    assert not any("lost" in line for line in lines)
    written = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert sorted(set(written)) == [number * ROWS for number in range(1, ITERATIONS + 1)]
    steps, hidden = read_events(run_dir / "tensorboard")
    assert steps == written
    assert hidden == [2 * ROWS + 1], "what the resumed run wrote before the disk was full stays visible"
    assert checkpoint.complete_steps(run_dir / "checkpoints")[-1] == ITERATIONS * ROWS


@pytest.mark.long
def test_three_checkpoints_in_a_row_that_fail_end_the_run_with_what_it_learned(reference, tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, ["checkpoints/"], "made", refuse(errno.ENOSPC))
    ended, lines = told_of(tmp_path / "run", At(ROWS, lambda: setattr(disk, "on", True)), checkpoint_every=ROWS)
    disk.on = False
    assert ended.stopped == "unsaved" and "3 saves in a row failed" in ended.problem
    assert 3 * ROWS <= ended.total_steps < ITERATIONS * ROWS
    assert "could not be saved" in lines[0] and len(lines) == 2
    assert "resume from the last checkpoint" in lines[1] and "could not" not in lines[1]
    assert_it_goes_on(tmp_path / "run", reference)


@pytest.mark.long
def test_a_disk_without_room_for_what_libraries_write(reference, tmp_path, monkeypatch):
    """TensorStore writes arrays in C++: no file may grow while a checkpoint is written."""
    write, full = Checkpointer._write, [False]

    def write_in_vain(self, *arguments):
        with nothing_fits() if full[0] else contextlib.nullcontext():
            write(self, *arguments)

    monkeypatch.setattr(Checkpointer, "_write", write_in_vain)
    save = Checkpointer.save  # nothing else may be written meanwhile
    monkeypatch.setattr(Checkpointer, "save", lambda self, *a, **named: (save(self, *a, **named), self.wait())[0])
    ended, lines = told_of(tmp_path / "run", At(3 * ROWS, lambda: full.__setitem__(0, True)))
    full[0] = False
    assert ended.stopped == "unsaved" and "could not be saved" in lines[0] and len(lines) == 2, lines
    assert_equal(reference.state, ended.state)
    assert_it_goes_on(tmp_path / "run", reference)


def test_a_clock_that_is_set_back_changes_nothing(reference, tmp_path, monkeypatch, hears_ctrl_c):
    """It is set back by a year in the middle of a run that is interrupted, and by another one when that is resumed."""
    now, back = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() - back[0])
    year = 365 * 86400.0

    def set_back():
        back[0] += year
        for path in (tmp_path / "run").rglob("*"):
            if path.is_file():  # written before: from now on of the future, as in a copy from elsewhere
                os.utime(path, (now() + year, now() + year))

    ended, lines = told_of(tmp_path / "run", At(3 * ROWS, set_back), Interrupt(4 * ROWS))
    assert ended.stopped == "interrupted" and lines == [] and is_finished(tmp_path / "run")
    set_back()
    assert_it_goes_on(tmp_path / "run", reference)
    assert is_finished(tmp_path / "run")
    steps, _ = read_events(tmp_path / "run" / "tensorboard")
    assert sorted(set(steps)) == [number * ROWS for number in range(1, ITERATIONS + 1)]
    set_back()
    assert is_finished(tmp_path / "run"), "whatever the files' times say"


# --- beside runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["made", "written"])
def test_a_policy_that_cannot_be_saved_is_an_error(how, reference, tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, ["policy/checkpoints"], how, refuse(errno.ENOSPC))
    disk.on = True
    raises(CheckpointError, "not be saved|cannot save", reference.save, tmp_path / "policy")
    disk.on = False
    reference.save(tmp_path / "policy")
    assert jaxrl.load(tmp_path / "policy")([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "most"), [("array_record", 2000), ("tfrecord", 0), ("hdf5", 0)])
def test_a_dataset_that_does_not_fit_is_an_error_and_leaves_nothing(kind, most, reference, tmp_path):
    suite, data = "rlds" if "record" in kind else "minari", tmp_path / "data"
    pytest.importorskip("tensorflow_datasets" if suite == "rlds" else "minari")
    given = {"episodes": 40, "num_envs": 4, "progress": False}

    def export():
        if suite == "rlds":
            return jaxrl.export_rlds(reference.policy, ENV, data / "it", file_format=kind, **given)
        return jaxrl.export_minari(reference.policy, ENV, "it-v0", data_dir=data, **given)

    with nothing_fits(most), pytest.raises(DatasetError, match="the dataset .*it"):
        export()
    assert not list(data.glob("*it*"))
    assert len(jaxrl.load_dataset(f"{suite}:{export()}")) == 40


@pytest.mark.long
def test_a_recording_that_does_not_fit_ends_the_run_which_goes_on_later(reference, tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    disk = Disk(monkeypatch, tmp_path / "recording", ["part-"], "made", refuse(errno.ENOSPC))
    ended, _ = told_of(tmp_path / "run", At(3 * ROWS, lambda: setattr(disk, "on", True)), record=tmp_path / "recording")
    disk.on = False
    assert isinstance(ended, RecordingError) and "the recording in" in str(ended)
    again = train(tmp_path / "run", record=tmp_path / "recording")
    assert_equal(reference.state, again.state)
    assert len(jaxrl.load_dataset(f"rlds:{tmp_path / 'recording'}"))


CACHED = """
import errno, os, sys, warnings
import jax, jax.numpy as jnp
from helpers.disks import Disk, refuse
import pytest
from jaxrl.run.compile_cache import keep_compiled_programs
folder = keep_compiled_programs()
words, then = ["-cache", "-atime", ".tmp"], refuse(int(sys.argv[2]))
disk = Disk(pytest.MonkeyPatch(), os.environ["JAXRL_CACHE"], words, sys.argv[1], then)
disk.on = True
print(float(jax.jit(lambda x: jnp.sin(x) + 1)(0.0)))
disk.on = False
print(disk.count > 0, float(jax.jit(lambda x: jnp.cos(x) + 1)(0.0)))
print(any(name.endswith("-cache") for name in os.listdir(folder)))
"""


@pytest.mark.long
@pytest.mark.parametrize("how", WAYS)
def test_programs_that_cannot_be_kept_are_compiled_and_nothing_is_said(how, tmp_path):
    env = environment("JAX_", "JAXRL_", JAXRL_CACHE=str(tmp_path / "cache"))
    ended = python("-c", CACHED, how, errno.ENOSPC, env=env)
    assert (ended.stdout.split(), ended.stderr) == (["1.0", "True", "2.0", "True"], "")
