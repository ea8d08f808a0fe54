"""What a dataset's description may name, checked before another library builds what it names.

TFDS imports the module of every feature that `features.json` names, and Minari builds the environment of a dataset
whose `metadata.json` has no spaces: both would run whatever code a file asks for. So the files are read here first, as
JSON, and only what stands in the tables below passes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl.core.errors import DatasetError

_KIND_KEYS = ("pythonClassName", "python_class_name", "type")  # the last: as TFDS wrote it before 4.5
_JSON_KEYS = ("jsonFeature", "json_feature", "type")  # whose content TFDS hands to the class as it stands

_TFDS = "tensorflow_datasets.core.features"
# The features that RLDS datasets are made of. Not Audio and Video, which start ffmpeg, nor any class outside of TFDS.
FEATURE_KINDS = frozenset(
    f"{_TFDS}.{name}"
    for name in (
        "bounding_boxes.BBoxFeature",
        "class_label_feature.ClassLabel",
        "dataset_feature.Dataset",
        "feature.Tensor",
        "features_dict.FeaturesDict",
        "image_feature.Image",
        "labeled_image.LabeledImage",
        "scalar.Scalar",
        "sequence_feature.Sequence",
        "tensor_feature.Tensor",
        "text_feature.Text",
    )
)
# Those that take no more of such content than sizes and types; others would open the files that it names.
_FROM_JSON = frozenset(
    f"{_TFDS}.{name}"
    for name in (
        "dataset_feature.Dataset",
        "feature.Tensor",
        "features_dict.FeaturesDict",
        "image_feature.Image",
        "sequence_feature.Sequence",
        "tensor_feature.Tensor",
        "text_feature.Text",
    )
)

DATA_FORMATS = ("hdf5", "arrow", "parquet")
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
SPACE_KINDS = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")


def check_features(path: Path) -> None:
    """Whether every feature that a `features.json` names is one of `FEATURE_KINDS`.

    Raises:
      DatasetError: one is not (named), or the file is no JSON.
    """
    if problem := _first(_feature_problems(_parsed(path))):
        raise DatasetError(f"{path} {problem}; it is not opened")


def read_minari(path: Path) -> Mapping[str, Any]:
    """A Minari dataset's `metadata.json`, which says how it is stored and has both of its spaces.

    Raises:
      DatasetError: a space is missing or of a kind that Minari does not have, so that Minari would build the
        environment that the file names; or the file is no such JSON.
    """
    found = _parsed(path)
    if not isinstance(found, dict) or found.get("data_format") not in DATA_FORMATS:
        said = found.get("data_format") if isinstance(found, dict) else found
        raise DatasetError(f"{path} cannot be read: its data_format is {said!r:.80}, not {' or '.join(DATA_FORMATS)}")
    for name in ("observation_space", "action_space"):
        text = found.get(name)
        if not isinstance(text, str):
            raise DatasetError(
                f"{path} has no {name}, so Minari would build the environment that it names, and run any code with it; "
                "it is not opened"
            )
        if problem := _first(_space_problems(_parsed(path, text), name)):
            raise DatasetError(f"{path}: {problem}; it is not opened")
    return found


def _parsed(path, text=None):
    try:
        return json.loads(path.read_text() if text is None else text)
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read: {error!r}") from error


def _first(problems: Iterator[str]) -> str | None:
    try:
        return next(problems, None)
    except RecursionError:
        return "is nested too deeply"


def _feature_problems(node: Any) -> Iterator[str]:
    """Why TFDS must not see this, wherever in the file it would look for a class."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _feature_problems(child)
    if not isinstance(node, dict):
        return
    for key in _KIND_KEYS:
        kind = node.get(key)
        if isinstance(kind, str) and kind not in FEATURE_KINDS:
            yield f"names the feature {kind!r:.200}, and TFDS would import its module"
        elif isinstance(kind, str) and kind not in _FROM_JSON and any(name in node for name in _JSON_KEYS):
            yield f"describes the feature {kind!r} by free JSON, which may name other files"
    # JSON within JSON, in which TFDS looks for features too.
    for key in ("json", "content"):
        if isinstance(node.get(key), str):
            try:
                inner = json.loads(node[key])
            except ValueError:
                yield f"has a feature whose {key!r} is no JSON"
            else:
                yield from _feature_problems(inner)


def _space_problems(space: Any, where: str) -> Iterator[str]:
    kind = space.get("type") if isinstance(space, dict) else space
    if kind not in SPACE_KINDS:
        yield f"{where} is {kind!r:.80}; spaces of Minari are {', '.join(SPACE_KINDS)}"
        return
    if "dtype" in space and space["dtype"] not in DTYPES:
        yield f"{where} has dtype {space['dtype']!r:.80}; allowed are {', '.join(DTYPES)}"
    children = space.get("subspaces")
    named = (
        children.items() if isinstance(children, dict) else enumerate(children if isinstance(children, list) else ())
    )
    for name, child in named:
        yield from _space_problems(child, f"{where}[{name!r:.80}]")
