"""The records of benchmarks: their commits are in the history, and what their commands name is in the tree."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from helpers.shortest import ZOO

from jaxrl.algos import ALGORITHMS
from jaxrl.run.presets import PRESETS

ROOT = Path(__file__).parents[1]
RECORDS = {path.name: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
ROWS = " ".join(f"{row.kind}-{row.name}" for row in ZOO.rows.values())


def values(record, *names):
    """Yield what a record holds under one of the names, at any depth."""
    for name, value in record.items():
        if name in names:
            yield value
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from values(part, *names)


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def test_every_commit_is_in_the_history():
    """Not one that was rebased after the measurement, or that had changes beside it."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("the history is not here")
    history = set(git("rev-list", "HEAD"))
    assert not {name for name, record in RECORDS.items() if {*values(record, "commit")} - history}


def absent(command):
    """Return what a command names that is not in the tree: scripts, tests, algorithms, presets and whole paths."""
    named = re.findall(r"^jaxrl \w+ (\w+)|--preset (\S+)| (/\S+)", command)
    missing = {"".join(found) for found in named} - {*ALGORITHMS, *PRESETS}
    chosen = " ".join(re.findall(r"(?:::| -k )(.+?)(?= -|$)", command))
    for path in re.findall(r"(?:tests|benchmarks)/\S+?\.py", command):
        names = (ROOT / path).read_text() + ROWS if (ROOT / path).is_file() else ""
        words = {*re.findall(r"[\w-]+", chosen)} - {"and", "or"} if names else {path}
        missing |= {word for word in words if word.lower() not in names.lower()}
    return missing


def test_every_command_names_what_is_there():
    commands = {command for record in RECORDS.values() for command in values(record, "command", "run")}
    assert {command: words for command in commands if (words := absent(command))} == {}
