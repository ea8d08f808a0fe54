"""Valid files of every kind, changed by hypothesis: each is read right or refused in jaxrl's own words.

What can still be loaded is played, exported, drawn and filmed too. `make faults` tries many more of them:
FAULTS_MUTATIONS of each kind of file.
"""

import copy
import json
import os
import shutil

import hypothesis
import pytest
from helpers import hostile
from helpers.readers import PLAYERS, READERS, made, newest, outcome
from helpers.tiers import one_quick
from hypothesis import strategies as st

# Orbax's event loop complains after an error that is expected here.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("tensorflow_datasets")
pytest.importorskip("minari")
pytest.importorskip("h5py")
pytest.importorskip("pyarrow")

MANY = int(os.environ.get("FAULTS_MUTATIONS") or 300)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    with made(tmp_path_factory.mktemp("mutations")) as root:
        yield root


# --- what hypothesis draws -------------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.floats() | st.integers(-3, 3)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.sampled_from(hostile.VALUES),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=8), part, max_size=4),
    max_leaves=6,
)


@st.composite
def of_json(draw, data, signed=False):
    """A JSON file with one to three of its parts replaced, removed, renamed, moved or made alike."""
    value = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        places = list(hostile.places(value))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(["near", "any", "any", "remove", "rename", "like another"]))
        if how == "near" and type(holder[key]) in (int, float):
            holder[key] = holder[key] + draw(st.sampled_from([1, -1, 0.5, -0.5, 2**31, 2**63, -(2**63)]))
        elif how == "like another":
            there, other = places[draw(st.integers(0, len(places) - 1))]
            holder[key] = json.loads(json.dumps(there[other]))
        elif how == "remove":
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=12))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw(VALUES))  # which may be changed in its turn
    return (hostile.checksummed(value) if signed else json.dumps(value)).encode(errors="surrogatepass")


@st.composite
def of_bytes(draw, data):
    """A file with bytes flipped, overwritten, inserted, repeated or cut away."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        to = draw(st.integers(at, min(at + 64, len(data))))
        how = draw(st.sampled_from(["flip", "write", "insert", "repeat", "remove", "cut"]))
        if how == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif how == "write":
            data = data[:at] + draw(st.binary(min_size=to - at, max_size=to - at)) + data[to:]
        elif how == "insert":
            data = data[:at] + draw(st.binary(max_size=32)) + data[at:]
        elif how == "repeat":
            data = data[:to] + data[at:to] * draw(st.integers(1, 4)) + data[to:]
        elif how == "remove":
            data = data[:at] + data[to:]
        else:
            data = data[:at]
    return data


@st.composite
def of_lines(draw, data):
    """A file of JSON lines with some of them changed, moved or repeated."""
    lines = data.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["json", "bytes", "repeat", "move"]))
        if how == "json":
            lines[at] = draw(of_json(lines[at])) if _is_json(lines[at]) else draw(of_bytes(lines[at]))
        elif how == "bytes":
            lines[at] = draw(of_bytes(lines[at]))
        elif how == "repeat":
            lines.insert(at, lines[at])
        else:
            lines.append(lines.pop(at))
        lines = [line for line in b"\n".join(lines).splitlines() if line.strip()] or [b"{}"]
    return b"\n".join(lines) + b"\n"


def _is_json(line):
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@st.composite
def either(draw, data, signed=False):
    return draw(of_bytes(data)) if draw(st.integers(0, 3)) == 0 else draw(of_json(data, signed))


def signed(data):
    return either(data, True)


# By kind: the folder that is read, the file in it, who reads it, and how it is changed.
KINDS = {
    "config.json": ("run", lambda run: run / "config.json", "config", either),
    "metrics.jsonl": ("run", lambda run: run / "metrics.jsonl", "metrics", of_lines),
    "result.json": ("run", lambda run: run / "result.json", "result", either),
    "manifest.json": ("run", lambda run: newest(run) / "manifest.json", "manifest", signed),
    "a policy's config.json": ("policy", lambda run: run / "config.json", "policy", either),
    "a policy's manifest.json": ("policy", lambda run: newest(run) / "manifest.json", "policy", signed),
    "a replay's manifest.json": ("replay", lambda run: newest(run) / "manifest.json", "replay", signed),
    "a replay's config.json": ("replay", lambda run: run / "config.json", "replay", either),
    "recording.json": ("recording", lambda folder: folder / "recording.json", "recording", either),
    "array_record": ("recording", lambda folder: next(folder.glob("part-*/*.array_record*")), "recording", of_bytes),
    "features.json": ("rlds", lambda folder: folder / "features.json", "rlds", either),
    "dataset_info.json": ("rlds", lambda folder: folder / "dataset_info.json", "rlds", either),
    "tfrecord": ("rlds", lambda folder: next(folder.glob("*.tfrecord*")), "rlds", of_bytes),
    "metadata.json": ("made-v0", lambda folder: folder / "data" / "metadata.json", "minari", either),
    "hdf5": ("made-v0", lambda folder: folder / "data" / "main_data.hdf5", "minari", of_bytes),
    "arrow": ("arrow/made-v0", lambda folder: next(folder.rglob("*.arrow")), "minari", of_bytes),
    "parquet": ("parquet/made-v0", lambda folder: next(folder.rglob("*.parquet")), "minari", of_bytes),
}
# One compiles little.
QUICK = ("config.json", "metrics.jsonl", "features.json")


def mutate(valid, tmp_path, kind, count, players=()):
    """Reads so many mutations of a file; asserts that each was read or refused, and that nothing else happened."""
    folder, place, readers, strategy = KINDS[kind]
    whole, outside = valid / "valid" / folder, valid / "outside"
    own = tmp_path / "own" / whole.name
    # What is needed to read at all is imported by the first time; nothing more may be because of a file.
    shutil.copytree(whole, own, symlinks=True)
    for read in (*READERS[readers], *players):
        assert outcome(read, own) is None, "the valid file"
    file = place(own).relative_to(own)
    before, played = hostile.snapshot(outside), []

    @hypothesis.settings(
        max_examples=count,
        phases=(hypothesis.Phase.generate,),  # what fails is small enough
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy((own / file).read_bytes()))
    def each(data):
        shutil.rmtree(own.parent)
        shutil.copytree(whole, own, symlinks=True)
        (own / file).write_bytes(data)
        for read in (*READERS[readers], *players):
            with hostile.Watch(own.parent) as watch:
                told = outcome(read, own)
            assert told is None and watch.found == [], (kind, data, told, watch.found)
        played.append((own.parent / "drawn.png").exists())

    each()
    assert hostile.snapshot(outside) == before
    return sum(played)


@pytest.mark.long
@pytest.mark.parametrize("kind", one_quick(KINDS, *QUICK, rest=list(KINDS)[::4]))
def test_mutations_are_read_or_refused(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, 15)


@pytest.mark.long
def test_what_can_be_loaded_is_played_exported_drawn_and_filmed(valid, tmp_path):
    played = mutate(valid, tmp_path, "config.json", 30, PLAYERS)
    assert played >= 5, "most were refused: nothing was tried"


@pytest.mark.endurance
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_are_read_or_refused(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, MANY)


@pytest.mark.endurance
@pytest.mark.parametrize("kind", ["config.json", "metrics.jsonl", "manifest.json"])
def test_many_that_can_be_loaded_are_played(kind, valid, tmp_path):
    mutate(valid, tmp_path, kind, MANY, PLAYERS)
