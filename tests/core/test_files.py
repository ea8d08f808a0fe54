"""Files are read within bounds and written in one piece, and nothing is followed out of their place."""

import ast
import json
import math
import os
from pathlib import Path

import pytest
from helpers.refused import raises, refused
from helpers.strict_json import parse_strictly
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.core import files

# Text that no file holds: messages between processes, hashes, and what refuses NaN by itself.
NOT_TO_FILES = {
    "core/files.py",
    "export/numpy_file.py",
    "parallel/multihost/distributed.py",
    "parallel/multihost/local.py",
    "run/callbacks.py",
    "run/recording/dataset_export.py",
    "run/directory/manifest.py",
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def test_json_is_written_in_one_piece(tmp_path):
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} == files.read_json(path)
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def same(value, read):
    """Whether `read` is `value`, with lists for tuples and None for what is not finite."""
    if isinstance(value, dict):
        return value.keys() == read.keys() and all(same(item, read[key]) for key, item in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(read) and all(map(same, value, read))
    if isinstance(value, float) and not math.isfinite(value):
        return read is None
    return type(value) is type(read) and value == read


@pytest.mark.long
@given(VALUES)
def test_json_is_strict_and_loses_nothing_that_it_can_hold(value):
    assert same(value, parse_strictly(files.to_json(value))) and same(value, files.as_read_back(value))
    assert parse_strictly(files.to_json(value, indent=2)) == files.as_read_back(value)


@pytest.mark.long
def test_one_function_writes_the_json_of_all_files():
    root = Path(jaxrl.__file__).parent
    for path in root.rglob("*.py"):
        calls = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json"
        }
        allowed = {"dumps"} if path.relative_to(root).as_posix() in NOT_TO_FILES else set()
        assert calls & {"dump", "dumps"} <= allowed, f"{path} writes JSON of its own"


def test_what_killed_writers_left_is_cleared_away(tmp_path):
    left = tmp_path / ".result.json.0123456789abcdef.tmp"
    left.write_text("{")
    (tmp_path / ".mine.tmp").write_text("kept")
    files.clear_temporaries(tmp_path, ["result.json"])
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
    raises(OSError, "a symbolic link to a folder", files.check_regular, tmp_path / "data")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300])
def test_nesting_is_bounded(tmp_path, text):
    raises(ValueError, "nested too deeply", files.parse_json, text)
    assert files.parse_json("[" * 100 + "]" * 100) is not None


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    (tmp_path / "file").write_text(" " * (1 << 20) + "1")
    raises(ValueError, "larger than the limit of 1 MiB", files.read_json, tmp_path / "file")


@pytest.mark.parametrize("kind", [str, Path])
def test_the_home_directory_is_put_in_place_of_a_tilde(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.chdir(tmp_path)
    for written, meant in (("~", tmp_path), ("~/a/b", tmp_path / "a" / "b"), ("a/~", Path("a/~")), ("a~", Path("a~"))):
        assert files.expand(kind(written)) == meant == files.expand(files.expand(kind(written)))
    refused(lambda: files.expand(kind("~nobody-of-this-name/x")), "~nobody-of-this-name/x")
    assert files.expand(files.expand("./~/a")) == tmp_path / "~" / "a"
