"""Hostile files: they are read or refused in jaxrl's own words, and never executed.

Valid files of every kind are changed by chance, and in ways that were found by trying. Those that can still be loaded
are played, exported, drawn and filmed too. `make faults` tries many more: FAULTS_MUTATIONS of each kind of file.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
import zlib

import pytest
from helpers import hostile
from helpers.hostile import bytes_mutated, checksummed, json_mutated, lines_mutated
from helpers.readers import PLAYERS, READERS, draw, made, newest, outcome

from jaxrl.core.errors import JaxrlError

# Orbax's event loop complains after an error that is expected here.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("tensorflow_datasets")
pytest.importorskip("minari")
pytest.importorskip("h5py")

MANY = int(os.environ.get("FAULTS_MUTATIONS") or 300)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Make one file of each kind, in a folder next to the evil module and precious files."""
    with made(tmp_path_factory.mktemp("hostile")) as root:
        yield root


# --- by chance -------------------------------------------------------------------------------------------------------

signed_mutated = functools.partial(json_mutated, write=checksummed)  # whose checksum fits again
# By kind: the folder that is read, the file in it, of several the last, who reads it, and how it is changed.
KINDS = {
    "config.json": ("run", "config.json", "config", json_mutated),
    "metrics.jsonl": ("run", "metrics.jsonl", "metrics", lines_mutated),
    "result.json": ("run", "result.json", "result", json_mutated),
    "manifest.json": ("run", "checkpoints/0*/manifest.json", "manifest", signed_mutated),
    "state": ("run", "checkpoints/0*/state/_METADATA", "manifest", json_mutated),
    "arrays": ("run", "checkpoints/0*/state/ocdbt*/d/*", "manifest", bytes_mutated),
    "a policy's config.json": ("policy", "config.json", "policy", json_mutated),
    "a policy's manifest.json": ("policy", "checkpoints/0*/manifest.json", "policy", signed_mutated),
    "a replay's manifest.json": ("replay", "checkpoints/0*/manifest.json", "replay", signed_mutated),
    "a replay's config.json": ("replay", "config.json", "replay", json_mutated),
    "recording.json": ("recording", "recording.json", "recording", json_mutated),
    "a part's features.json": ("recording", "part-*/features.json", "recording", json_mutated),
    "array_record": ("recording", "part-*/*.array_record*", "recording", bytes_mutated),
    "features.json": ("rlds", "features.json", "rlds", json_mutated),
    "dataset_info.json": ("rlds", "dataset_info.json", "rlds", json_mutated),
    "tfrecord": ("rlds", "*.tfrecord*", "rlds", bytes_mutated),
    "metadata.json": ("made-v0", "data/metadata.json", "minari", json_mutated),
    "hdf5": ("made-v0", "data/main_data.hdf5", "minari", bytes_mutated),
}
# Those that stand for their readers, and how often each is changed; others are changed 15 times.
OFTEN = {"config.json": 75, "metrics.jsonl": 45, "manifest.json": 45, "features.json": 40, "dataset_info.json": 40}
OFTEN |= {"metadata.json": 40, "result.json": 24, "arrays": 20, "array_record": 15}
OFTEN |= {"recording.json": 6}


def mutate(valid, tmp_path, kind, count, players=()):
    """Assert that mutations of a file are read or refused, and nothing else happens; return how many are drawn."""
    folder, pattern, readers, mutated = KINDS[kind]
    whole, outside = valid / "valid" / folder, valid / "outside"
    own = tmp_path / "own" / whole.name
    # What is needed to read at all is imported by the first time; nothing more may be because of a file.
    shutil.copytree(whole, own, symlinks=True)
    for read in (*READERS[readers], *players):
        assert outcome(read, own) is None, "the valid file"
    file = max(whole.glob(pattern)).relative_to(whole)
    before, played = hostile.snapshot(outside), 0
    for what, data in mutated((whole / file).read_bytes(), count, zlib.crc32(kind.encode())):
        shutil.rmtree(own.parent)
        shutil.copytree(whole, own, symlinks=True)
        (own / file).write_bytes(data)
        for read in (*READERS[readers], *players):
            with hostile.Watch(own.parent) as watch:
                told = outcome(read, own)
            assert told is None and watch.found == [], (what, data, told, watch.found)
        played += (own.parent / "drawn.png").exists()
    assert hostile.snapshot(outside) == before
    return played


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_mutations_are_read_or_refused(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, OFTEN.get(kind, 15))


@pytest.mark.long
def test_what_can_be_loaded_is_played_exported_drawn_and_filmed(valid, tmp_path):
    played = mutate(valid, tmp_path, "config.json", 20, PLAYERS)
    assert played >= 3, "most were refused: nothing was tried"


@pytest.mark.endurance
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_are_read_or_refused(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, MANY)


@pytest.mark.endurance
@pytest.mark.parametrize("kind", ["config.json", "metrics.jsonl", "manifest.json"])
def test_many_that_can_be_loaded_are_played(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, MANY, PLAYERS)


# --- one by one ------------------------------------------------------------------------------------------------------


def _json(change):
    return lambda file: file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _set(*keys, to):
    def change(value):
        at = value
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to
        return value

    return _json(change)


def _signed(**changes):
    def write(file):
        file.write_text(hostile.checksummed(json.loads(file.read_text()) | changes))

    return write


def _instead(make):
    def replace(file):
        file.unlink()
        make(file)

    return replace


EVIL = hostile.EVIL
CONFIG, MANIFEST, METRICS, RESULT = "run/config.json", "run/MANIFEST", "run/metrics.jsonl", "run/result.json"
INFO, FEATURES, MINARI = "rlds/dataset_info.json", "rlds/features.json", "made-v0/data/metadata.json"
LAZY = {"type": "jaxrl.checkpoint:ocp.checkpoint_manager.epy.lazy_imports_utils.LazyModule", "module_name": EVIL}
EVERY = {
    "a module by a walk of attributes": (CONFIG, _set("algorithm", "learning_rate", to=LAZY)),
    "a class of the standard library": (CONFIG, _set("algorithm", "type", to="subprocess:Popen")),
    "a module of Gymnasium's": (
        CONFIG,
        _set("environment", to={"suite": "gymnasium", "name": f"{EVIL}:CartPole-v1", "parameters": {}, "wrappers": []}),
    ),
    "a function as a task of dm_control's": (
        CONFIG,
        _set("environment", to={"suite": "dm_control", "name": f"{EVIL}:Evil", "parameters": {}, "wrappers": []}),
    ),
    "half a pair of characters in a name": (CONFIG, _set("environment", "name", to="\ud800")),
    "a recipe where a number should be": (
        CONFIG,
        _set("algorithm", "gamma", to={"type": "suite:gymnasium", "id": f"{EVIL}:CartPole-v1", "options": {}}),
    ),
    "a wrapper that is none": (CONFIG, _set("environment", "wrappers", to=[{"type": f"{EVIL}:Evil"}])),
    "a huge type": (CONFIG, _set("environment", "observation_space", "dtype", to="U400000000")),
    "a huge network": (CONFIG, _set("algorithm", "network", "torso", "widths", to=[10**6, 10**6])),
    "a manifest with one key more": (MANIFEST, _signed(more=1)),
    "a manifest without a key": (MANIFEST, _signed(leaves=[{"name": "x"}])),
    "a manifest of another step": (MANIFEST, _signed(step="many", format="one")),
    "a manifest of arrays that are a pipe": (MANIFEST, lambda file: os.mkfifo(file.parent / "state" / "pipe")),
    "a shape of many sizes": (
        CONFIG,
        _set("algorithm", "learning_rate", to={"array": [0.0], "shape": [10**9 - 1] * 80_000, "dtype": "float32"}),
    ),
    "a class in dataset_info.json": (INFO, _set("features", to={"pythonClassName": f"{EVIL}.Evil"})),
    "shards elsewhere": (INFO, _set("splits", 0, "filepathTemplate", to="../made-v0/data/{SPLIT}.{FILEFORMAT}")),
    "shards elsewhere, by their name": (INFO, _set("name", to="../../outside/precious/file")),
    "a name of endless width": (INFO, _set("splits", 0, "filepathTemplate", to="{SPLIT:>9999999999}")),
    "a huge shard": (INFO, _set("splits", 0, "shardLengths", to=[str(10**15)])),
    "a shard of less than nothing": (INFO, _set("splits", 0, "shardLengths", to=["-5"])),
    "endless shards": (INFO, _set("splits", 0, "shardLengths", to=["1"] * 200_000)),
    "a pipe beside the features": (FEATURES, lambda file: os.mkfifo(file.with_name("action.labels.txt"))),
    "splits that are none": (INFO, _set("splits", to=True)),
    "endless episodes": (MINARI, _set("total_episodes", to=10**12)),
    "a space of endless size": (
        MINARI,
        _set(
            "action_space", to=json.dumps({"type": "Box", "dtype": "float32", "shape": [10**10], "low": 0, "high": 1})
        ),
    ),
}
DAMAGES = {
    "a pipe": _instead(os.mkfifo),
    "without end": _instead(lambda file: file.symlink_to("/dev/zero")),
    "nested deeply": lambda file: file.write_text("[" * 200_000),
}
FILES = (CONFIG, METRICS, FEATURES, MINARI, MANIFEST, RESULT, INFO)
EVERY |= {f"{file} {how}": (file, damage) for file in FILES for how, damage in DAMAGES.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_what_was_found_by_trying(valid, tmp_path, name):
    where, spoil = EVERY[name]
    folder, _, file = where.partition("/")
    own = tmp_path / folder
    shutil.copytree(valid / "valid" / folder, own)
    spoil(newest(own) / "manifest.json" if file == "MANIFEST" else own / file)
    before = hostile.snapshot(valid / "outside")
    kind = {"run": "config", "rlds": "rlds", "made-v0": "minari"}[folder]
    of_runs = [*READERS["metrics"], *READERS["result"], *READERS["manifest"], draw]
    for read in READERS[kind] + (of_runs if folder == "run" else []):
        with hostile.Watch(tmp_path) as watch:
            assert outcome(read, own) is None
        assert watch.found == []
    assert hostile.snapshot(valid / "outside") == before
    if where not in (METRICS, MANIFEST, RESULT):  # there is an older checkpoint, and a run can be loaded without
        with pytest.raises(JaxrlError), warnings.catch_warnings(action="ignore"):
            READERS[kind][0](own)


@pytest.mark.long
def test_the_watch_sees(tmp_path, monkeypatch):
    (tmp_path / f"{EVIL}.py").write_text("import os\nos.system('true')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with hostile.Watch(tmp_path / "own") as watch:
        __import__(EVIL)
        (tmp_path / "written").write_text("x")
        subprocess.run(["true"], check=True)
    del sys.modules[EVIL]
    for what in (f"import ('{EVIL}'", "exec (<code", "os.system", "open (", "subprocess.Popen", f"module {EVIL}"):
        assert any(line.startswith(what) for line in watch.found), what
