"""Descriptions of datasets that ask for code: none of it runs."""

import contextlib
import importlib
import json
import os
import sys

import pytest
from helpers.recorded import episode, write_minari, write_rlds
from helpers.strict_json import read_json

import jaxrl
from jaxrl.core.errors import DatasetError
from jaxrl.data import metadata

tfds = pytest.importorskip("tensorflow_datasets")
minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

TFDS = "tensorflow_datasets.core.features"
EVIL = "evil_features.Evil"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that appears when the module `evil_features`, which can be found, is imported."""
    found = tmp_path / "was-here"
    (tmp_path / "evil_features.py").write_text(f"open({os.fspath(found)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield found
    sys.modules.pop("evil_features", None)


def refused(source, marker, words):
    with pytest.raises(DatasetError, match=words) as caught:
        jaxrl.load_dataset(source)
    assert "\n" not in str(caught.value) and not marker.exists(), "it ran what the file named"


# --- RLDS ------------------------------------------------------------------------------------------------------------


def as_json(kind, **content):
    return {"type": kind, "content": content}


DICT, SEQUENCE = f"{TFDS}.features_dict.FeaturesDict", f"{TFDS}.sequence_feature.Sequence"
HOSTILE = {
    "the whole": lambda whole: whole | {"pythonClassName": EVIL},
    "protobuf's own spelling": lambda whole: {"python_class_name": EVIL, "features_dict": {"features": {}}},
    "a field of the steps": lambda whole: (
        whole["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"].update(
            reward={"pythonClassName": EVIL, "tensor": {}}
        )
        or whole
    ),
    "as older TFDS wrote it": lambda whole: as_json(DICT, steps=as_json(EVIL)),
    "older, within a sequence": lambda whole: as_json(SEQUENCE, feature=as_json(EVIL), length=None),
    "JSON within protobuf": lambda whole: {
        "pythonClassName": DICT,
        "jsonFeature": {"json": json.dumps({"steps": as_json(EVIL)})},
    },
    "protobuf within JSON": lambda whole: {
        "type": DICT,
        "proto_cls": "tensorflow_datasets.FeaturesDict",
        "content": json.dumps({"features": {"steps": {"pythonClassName": EVIL, "tensor": {}}}}),
    },
}


ONE = [episode(0, 3, dtypes=["float32"])]


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_classes_that_features_name_are_not_imported(tmp_path, marker, change):
    path = write_rlds(tmp_path / "data", ONE)
    file = path / "features.json"
    file.write_text(json.dumps(change(read_json(file))))
    refused(f"rlds:{path}", marker, f"names the feature '{EVIL}'")
    with contextlib.suppress(Exception):
        tfds.builder_from_directory(os.fspath(path))
    assert marker.exists(), "TFDS itself would not have run it: the test tries nothing"


def test_parts_of_a_recording_are_no_way_around(tmp_path, marker):
    write_rlds(tmp_path / "data" / "part-000000000000", ONE)
    file = write_rlds(tmp_path / "data" / "part-000000000100", ONE) / "features.json"
    file.write_text(json.dumps(HOSTILE["the whole"](read_json(file))))
    refused(f"rlds:{tmp_path / 'data'}", marker, "part-000000000100/features.json")


@pytest.mark.parametrize(
    "features, words",
    [
        (
            {
                "pythonClassName": f"{TFDS}.class_label_feature.ClassLabel",
                "jsonFeature": {"json": '{"names_file": "/x"}'},
            },
            "in unrestricted JSON",
        ),
        ({"pythonClassName": f"{TFDS}.video_feature.Video", "video": {}}, "video_feature.Video'"),
        ({"pythonClassName": DICT, "jsonFeature": {"json": "{"}}, "'json' is not JSON"),
        ({"pythonClassName": EVIL + "\n" + "x" * 9999}, "names the feature"),
    ],
)
def test_other_features_that_are_refused(tmp_path, marker, features, words):
    path = write_rlds(tmp_path / "data", ONE)
    (path / "features.json").write_text(json.dumps(features))
    refused(f"rlds:{path}", marker, words)


def test_nesting_without_end_is_an_error(tmp_path):
    file = tmp_path / "features.json"
    for depth in (3_000, 100_000):
        file.write_text('{"a":' * depth + "1" + "}" * depth)
        with pytest.raises(DatasetError, match="too deeply|RecursionError"):
            metadata.check_tfds(tmp_path)


# --- Minari ----------------------------------------------------------------------------------------------------------


def hostile_spec(marker):
    spec = {"id": "Evil-v0", "entry_point": "os:system", "kwargs": {"command": f"touch {marker}"}}
    spec |= dict.fromkeys(("reward_threshold", "max_episode_steps", "vector_entry_point"))
    spec |= {"nondeterministic": False, "order_enforce": False, "disable_env_checker": True, "additional_wrappers": []}
    return json.dumps(spec)


def made(folder, change):
    """A dataset of Minari's whose metadata are changed."""
    path = write_minari(folder, ONE)
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(change(read_json(file))))
    return path


@pytest.mark.parametrize("absent", [("observation_space", "action_space"), ("action_space",)])
@pytest.mark.parametrize("by", ["path", "id"])
def test_the_environment_that_minari_would_build_is_not(tmp_path, marker, monkeypatch, absent, by):
    spec = {"env_spec": hostile_spec(marker)}
    path = made(tmp_path, lambda whole: {name: x for name, x in (whole | spec).items() if name not in absent})
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(tmp_path))
    refused(f"minari:{path}" if by == "path" else "minari:made-v0", marker, f"has no {absent[0]}")
    with contextlib.suppress(Exception):
        minari.MinariDataset(path / "data")
    assert marker.exists(), "Minari itself would not have run it: the test tries nothing"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"observation_space": {"type": "Box"}}, "observation_space"),
        ({"observation_space": '{"type": "Graph"}'}, "observation_space is 'Graph'"),
        ({"action_space": '{"type": "Tuple", "subspaces": [{"type": "Evil"}]}'}, r"action_space\[0\] is 'Evil'"),
        ({"action_space": '{"type": "Box", "dtype": "U400000000"}'}, "action_space has dtype 'U400000000'"),
        ({"action_space": "{"}, "cannot be read"),
        ({"data_format": "arrow"}, "data_format is 'arrow'"),
        ({"data_format": ["hdf5"]}, "data_format is"),
    ],
)
def test_other_metadata_that_is_refused(tmp_path, marker, changes, words):
    refused(f"minari:{made(tmp_path, lambda whole: whole | changes)}", marker, words)
