"""Whether a run has ended, from its files."""

import pytest
from helpers.refused import raises

from jaxrl.core import files, ownership
from jaxrl.core.errors import RunDirectoryError
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.directory.run_status import is_finished, is_of_launch


@pytest.mark.parametrize("name", ["missing", "file", "loop", "n" * 300], ids=lambda name: name[:8])
def test_what_cannot_be_looked_at_has_not_ended(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert not is_finished(tmp_path / name)


def test_a_run_that_was_not_started_again_remains_finished(tmp_path):
    with RunDirectory(tmp_path, {"algorithm": {}, "seed": 0}) as run:
        assert not is_finished(tmp_path)
        files.write_json(run.result, {"evaluation": {}, "stopped": "finished", "wall_seconds": 1.0, "start": run.start})
    for _ in range(2):
        raises(RunDirectoryError, "another configuration", RunDirectory, tmp_path, {"algorithm": {}, "seed": 1})
        assert is_finished(tmp_path)
    with RunDirectory(tmp_path, {"algorithm": {}, "seed": 0}):
        assert not is_finished(tmp_path)


def test_a_run_is_of_a_launch_once_the_directory_is_its_own(tmp_path, monkeypatch):
    first, second = "1" * 16, "2" * 16
    assert not is_of_launch(tmp_path, first)
    RunDirectory(tmp_path, {"algorithm": {}, "seed": 0}, launch=first).close()
    assert is_of_launch(tmp_path, first) and not is_of_launch(tmp_path, second)
    delete = ownership.remove

    def deleted(path, kind):
        assert not is_of_launch(path, first) and not is_of_launch(path, second), "another run's files are still there"
        delete(path, kind)

    monkeypatch.setattr(ownership, "remove", deleted)
    RunDirectory(tmp_path, {"algorithm": {}, "seed": 1}, overwrite=True, launch=second).close()
    assert is_of_launch(tmp_path, second)
    with pytest.raises(RunDirectoryError):
        RunDirectory(tmp_path, {"algorithm": {}, "seed": 2}, launch=first)
    assert not is_of_launch(tmp_path, first)
    RunDirectory(tmp_path, {"algorithm": {}, "seed": 1}).close()
    assert not is_of_launch(tmp_path, second), "this process was not launched"
