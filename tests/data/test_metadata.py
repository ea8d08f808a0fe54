"""Descriptions of datasets that ask for code: none of it runs, whoever opens the dataset."""

import contextlib
import importlib
import json
import os
import sys

import pytest
from helpers.programs import ENV
from helpers.recorded import episode, spaces_of

import jaxrl
from jaxrl.algos import CQL
from jaxrl.cli import main
from jaxrl.core.errors import DatasetError
from jaxrl.data import MinariWriter, RldsWriter, metadata

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


def openers(source):
    """Everything that opens a dataset by its name."""
    yield "load_dataset", lambda: jaxrl.load_dataset(source)
    yield "train", lambda: jaxrl.train(CQL(), ENV, total_steps=64, dataset=source, progress=False)
    yield "info", lambda: exits(["dataset", "info", source])
    yield (
        "jaxrl train",
        lambda: exits(["train", "cql", "--env", "probe:Constant", "--total-steps", "64", "--dataset", source]),
    )


def exits(argv):
    """The command with its error as an exception."""
    code = main.main(argv)
    raise DatasetError(f"exit code {code}")


def refused(source, marker, words, capsys):
    for name, open_it in openers(source):
        with pytest.raises(DatasetError) as caught:
            open_it()
        said = str(caught.value)
        if said.startswith("exit code"):
            assert said in ("exit code 1", "exit code 2"), name
            said = capsys.readouterr().err.strip()
        assert words in said and "\n" not in said and "Traceback" not in said, (name, said)
        assert not marker.exists(), f"{name} ran what the file named"


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


def rlds(path):
    with RldsWriter(path, "made") as writer:
        writer.write(episode(0, 3, dtypes=["float32"]))
        return writer.close()


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_classes_that_features_name_are_not_imported(tmp_path, marker, capsys, change):
    path = rlds(tmp_path / "data")
    file = path / "features.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    refused(f"rlds:{path}", marker, f"names the feature '{EVIL}', and TFDS would import its module", capsys)
    with contextlib.suppress(Exception):
        tfds.builder_from_directory(os.fspath(path))
    assert marker.exists(), "TFDS itself would not have run it: the test tries nothing"


def test_parts_of_a_recording_are_no_way_around(tmp_path, marker, capsys):
    rlds(tmp_path / "data" / "part-000000000000")
    file = rlds(tmp_path / "data" / "part-000000000100") / "features.json"
    file.write_text(json.dumps(HOSTILE["the whole"](json.loads(file.read_text()))))
    refused(f"rlds:{tmp_path / 'data'}", marker, "part-000000000100/features.json names the feature", capsys)


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
def test_other_features_that_are_refused(tmp_path, features, words):
    path = rlds(tmp_path / "data")
    (path / "features.json").write_text(json.dumps(features))
    with pytest.raises(DatasetError, match=words) as caught:
        jaxrl.load_dataset(f"rlds:{path}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_nesting_without_end_is_an_error(tmp_path):
    file = tmp_path / "features.json"
    for depth in (3_000, 100_000):
        file.write_text('{"a":' * depth + "1" + "}" * depth)
        with pytest.raises(DatasetError, match="too deeply|RecursionError"):
            metadata.check_features(file)


def test_every_kind_in_the_table_is_one_of_tfds():
    registered = tfds.features.FeatureConnector._registered_features
    assert metadata.FEATURE_KINDS <= set(registered)


# --- Minari ----------------------------------------------------------------------------------------------------------


def hostile_spec(marker):
    return json.dumps(
        {
            "id": "Evil-v0",
            "entry_point": "os:system",
            "reward_threshold": None,
            "nondeterministic": False,
            "max_episode_steps": None,
            "order_enforce": False,
            "disable_env_checker": True,
            "kwargs": {"command": f"touch {marker}"},
            "additional_wrappers": [],
            "vector_entry_point": None,
        }
    )


@pytest.mark.parametrize(
    "spaces",
    [
        {"observation_space": None, "action_space": None},
        {"observation_space": None},
        {"action_space": None},
    ],
    ids=["neither", "no observations", "no actions"],
)
@pytest.mark.parametrize("by", ["path", "id"])
def test_the_environment_that_minari_would_build_is_not(tmp_path, marker, monkeypatch, capsys, spaces, by):
    one = episode(0, 3, dtypes=["float32"])
    with MinariWriter("evil-v0", *spaces_of(one), data_dir=tmp_path) as writer:
        writer.write(one)
        path = writer.close()
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.fspath(tmp_path))
    file = path / "data" / "metadata.json"
    whole = json.loads(file.read_text()) | {"env_spec": hostile_spec(marker)}
    file.write_text(json.dumps({name: x for name, x in whole.items() if name not in spaces}))
    source = f"minari:{path}" if by == "path" else "minari:evil-v0"
    refused(source, marker, f"has no {next(iter(spaces))}, so Minari would build the environment", capsys)
    with contextlib.suppress(Exception):
        minari.MinariDataset(path / "data")
    assert marker.exists(), "Minari itself would not have run it: the test tries nothing"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"observation_space": {"type": "Box"}}, "has no observation_space"),
        ({"observation_space": '{"type": "Graph"}'}, "observation_space is 'Graph'; spaces of Minari are Box, Dict"),
        ({"action_space": '{"type": "Tuple", "subspaces": [{"type": "Evil"}]}'}, r"action_space\[0\] is 'Evil'"),
        ({"action_space": '{"type": "Box", "dtype": "U400000000"}'}, "action_space has dtype 'U400000000'"),
        ({"action_space": "{"}, "cannot be read"),
        ({"data_format": "evil"}, "its data_format is 'evil', not hdf5 or arrow or parquet"),
        ({"data_format": ["hdf5"]}, "its data_format is"),
    ],
)
def test_other_metadata_that_is_refused(tmp_path, changes, words):
    one = episode(0, 3, dtypes=["float32"])
    with MinariWriter("made-v0", *spaces_of(one), data_dir=tmp_path) as writer:
        writer.write(one)
        path = writer.close()
    file = path / "data" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(DatasetError, match=words) as caught:
        jaxrl.load_dataset(f"minari:{path}")
    assert "\n" not in str(caught.value)
