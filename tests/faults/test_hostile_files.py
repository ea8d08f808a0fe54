"""Whatever lies in a file: it is read right or refused in jaxrl's own words, and nothing of it is ever executed."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from helpers import hostile
from helpers.readers import READERS, draw, load_run, made, newest, outcome

from jaxrl.core.errors import JaxrlError

# Orbax's event loop complains after an error that is expected here.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("tensorflow_datasets")
pytest.importorskip("minari")
pytest.importorskip("h5py")


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """One of everything that can be read, in a folder beside which the evil module and precious files lie."""
    with made(tmp_path_factory.mktemp("hostile")) as root:
        yield root


# By kind of file: where it is, who reads it, and its mutations.
def _corpus(whole):
    run, rlds, minari, recording = whole / "run", whole / "rlds", whole / "made-v0", whole / "recording"
    part = next(recording.glob("part-*"))
    step = newest(run)
    for name, folder, file, reader, count in (
        ("config.json", run, run / "config.json", "config", 75),
        ("result.json", run, run / "result.json", "result", 24),
        ("features.json", rlds, rlds / "features.json", "rlds", 40),
        ("dataset_info.json", rlds, rlds / "dataset_info.json", "rlds", 40),
        ("metadata.json", minari, minari / "data" / "metadata.json", "minari", 40),
        ("recording.json", recording, recording / "recording.json", "recording", 6),
        ("a part's features.json", recording, part / "features.json", "recording", 9),
    ):
        seed = sum(name.encode())
        yield name, folder, file, READERS[reader], hostile.mutations(file.read_bytes(), count, seed)
    file = step / "manifest.json"
    yield "manifest.json", run, file, READERS["manifest"], hostile.mutations(file.read_bytes(), 45, 7, signed=True)
    file = run / "metrics.jsonl"
    yield "metrics.jsonl", run, file, READERS["metrics"], hostile.lines_mutated(file.read_bytes(), 45, 8)
    for number, file in enumerate(sorted(path for path in (step / "state").rglob("*") if path.is_file())):
        data = file.read_bytes()
        found = ((f"bytes {i}", hostile.spoiled(data, np.random.default_rng([number, i]))) for i in range(4))
        yield f"state/{file.name}", run, file, [load_run], found
    for name, folder, file in (
        ("tfrecord", rlds, next(rlds.glob("*.tfrecord*"))),
        ("hdf5", minari, minari / "data" / "main_data.hdf5"),
        ("array_record", recording, next(part.glob("*.array_record*"))),
    ):
        data, reader = file.read_bytes(), READERS["minari" if name == "hdf5" else "rlds"]
        found = ((f"bytes {i}", hostile.spoiled(data, np.random.default_rng([9, i]))) for i in range(12))
        yield name, folder, file, reader, found


@pytest.mark.long  # those found by trying, below, stand for it
def test_every_reader_reads_or_refuses_and_executes_nothing(valid, tmp_path):
    whole, outside = valid / "valid", valid / "outside"
    # What is needed to read at all is imported by now; nothing more may be because of a file.
    for name, folder, _, readers, _ in _corpus(whole):
        own = tmp_path / "valid" / folder.name
        if not own.exists():
            shutil.copytree(folder, own, symlinks=True)
        for read in readers:
            assert outcome(read, own) is None, name
    before, wrong, count = hostile.snapshot(outside), [], 0
    for name, folder, file, readers, found in _corpus(whole):
        own = tmp_path / "cases" / folder.name
        for what, data in found:
            count += 1
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(folder, own, symlinks=True)
            (own / file.relative_to(folder)).write_bytes(data)
            for read in readers:
                with hostile.Watch(own.parent) as watch:
                    told = outcome(read, own)
                wrong += [f"{name}, {what}: {problem}" for problem in [*watch.found, *([told] if told else [])]]
    assert wrong == []
    assert count >= 200, count
    assert hostile.snapshot(outside) == before


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
SPEC = json.dumps({"id": "Evil-v0", "entry_point": "os:system", "kwargs": {"command": f"touch {EVIL}"}})
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
    "a huge type": (
        CONFIG,
        _set("environment", "observation_space", "low", to={"array": ["x"], "shape": [1], "dtype": "U400000000"}),
    ),
    "a huge type as text": (CONFIG, _set("environment", "observation_space", "dtype", to="U400000000")),
    "a huge network": (CONFIG, _set("algorithm", "network", "torso", "widths", to=[10**6, 10**6])),
    "nested deeply": (CONFIG, lambda file: file.write_text("[" * 200_000)),
    "a configuration that is a pipe": (CONFIG, _instead(os.mkfifo)),
    "a configuration without end": (CONFIG, _instead(lambda file: file.symlink_to("/dev/zero"))),
    "a manifest with one key more": (MANIFEST, _signed(more=1)),
    "a manifest without a key": (MANIFEST, _signed(leaves=[{"name": "x"}])),
    "a manifest of another step": (MANIFEST, _signed(step="many", format="one")),
    "a manifest nested deeply": (MANIFEST, lambda file: file.write_text("[" * 200_000)),
    "a manifest of arrays that are a pipe": (MANIFEST, lambda file: os.mkfifo(file.parent / "state" / "pipe")),
    "a shape of many sizes": (
        CONFIG,
        _set("algorithm", "learning_rate", to={"array": [0.0], "shape": [10**9 - 1] * 80_000, "dtype": "float32"}),
    ),
    "a manifest that is a pipe": (MANIFEST, _instead(os.mkfifo)),
    "metrics that are a pipe": (METRICS, _instead(os.mkfifo)),
    "metrics without end": (METRICS, _instead(lambda file: file.symlink_to("/dev/zero"))),
    "a result that is a pipe": (RESULT, _instead(os.mkfifo)),
    "a result nested deeply": (RESULT, lambda file: file.write_text("[" * 200_000)),
    "a class in features.json": (FEATURES, _set("pythonClassName", to=f"{EVIL}.Evil")),
    "a class in dataset_info.json": (INFO, _set("features", to={"pythonClassName": f"{EVIL}.Evil"})),
    "shards elsewhere": (INFO, _set("splits", 0, "filepathTemplate", to="../made-v0/data/{SPLIT}.{FILEFORMAT}")),
    "shards elsewhere, by their name": (INFO, _set("name", to="../../outside/precious/file")),
    "a name of endless width": (INFO, _set("splits", 0, "filepathTemplate", to="{SPLIT:>9999999999}")),
    "a huge shard": (INFO, _set("splits", 0, "shardLengths", to=[str(10**15)])),
    "a shard of less than nothing": (INFO, _set("splits", 0, "shardLengths", to=["-5"])),
    "endless shards": (INFO, _set("splits", 0, "shardLengths", to=["1"] * 200_000)),
    "features that are a pipe": (FEATURES, _instead(os.mkfifo)),
    "a pipe beside the features": (FEATURES, lambda file: os.mkfifo(file.with_name("action.labels.txt"))),
    "splits that are none": (INFO, _set("splits", to=True)),
    "an environment of Minari's": (
        MINARI,
        _json(lambda x: {k: v for k, v in x.items() if "space" not in k} | {"env_spec": SPEC}),
    ),
    "endless episodes": (MINARI, _set("total_episodes", to=10**12)),
    "a space of endless size": (
        MINARI,
        _set(
            "action_space", to=json.dumps({"type": "Box", "dtype": "float32", "shape": [10**10], "low": 0, "high": 1})
        ),
    ),
    "metadata that are a pipe": (MINARI, _instead(os.mkfifo)),
}
BOX = {"type": "space:box", "low": 0.0, "high": 1.0, "shape": [1 << 26], "dtype": {"dtype": "float32"}}
EVERY |= {
    "very many huge spaces": (
        CONFIG,
        _set("environment", "observation_space", to={"type": "space:dict", "items": [[str(i), BOX] for i in range(9)]}),
    ),
}


READ_ANYWAY = ("a result", "metrics", "a manifest")  # there is an older checkpoint, and a run can be loaded without


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
    if not name.startswith(READ_ANYWAY):
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
