"""Files are read within bounds and written in one piece, and nothing is followed out of their place."""

import json
import os

import pytest

from jaxrl.core import files


def test_json_is_written_in_one_piece(tmp_path):
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} == files.read_json(path)
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_what_killed_writers_left_is_cleared_away(tmp_path):
    left = tmp_path / ".result.json.0123456789abcdef.tmp"
    left.write_text("{")
    (tmp_path / ".mine.tmp").write_text("kept")
    files.clear_temporaries(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [".mine.tmp"]


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        files.open_to_append(tmp_path / "link")
    with files.replacing(tmp_path / "link", "wb") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "link").read_bytes() == b"new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(OSError):
        files.read_json(tmp_path / "file")
    with pytest.raises(OSError):
        files.open_to_append(tmp_path / "file")


def test_nothing_is_passed_over_behind_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "folder").mkdir(parents=True)
    (tmp_path / "data" / "file").write_text("")
    files.check_regular(tmp_path / "data")
    (tmp_path / "whole").symlink_to("data")
    files.check_regular(tmp_path / "whole")
    (tmp_path / "data" / "folder" / "link").symlink_to("../../elsewhere")
    with pytest.raises(OSError, match="a link to a folder"):
        files.check_regular(tmp_path / "data")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300])
def test_nesting_is_bounded(tmp_path, text):
    with pytest.raises(ValueError, match="nested too deeply"):
        files.parse_json(text)
    assert files.parse_json("[" * 100 + "]" * 100) is not None


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    (tmp_path / "file").write_text(" " * (1 << 20) + "1")
    with pytest.raises(ValueError, match="more than 1 MiB"):
        files.read_json(tmp_path / "file")
