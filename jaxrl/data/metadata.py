"""Checks of the class names in a dataset's metadata files, before another library imports and builds these classes.

TFDS imports the module of every feature named in `features.json`, and Minari builds the environment of a dataset whose
`metadata.json` has no spaces: both could run arbitrary code from an untrusted file. So this module reads the files
first, as JSON, and accepts only the names in the tables below.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.core.errors import DatasetError
from jaxrl.core.spaces import MOST_NUMBERS, is_bounded_shape

_KIND_KEYS = ("pythonClassName", "python_class_name", "type")  # TFDS wrote "type" before 4.5
_JSON_KEYS = ("jsonFeature", "json_feature", "type")  # TFDS passes the content of these keys to the class unchanged

_TFDS = "tensorflow_datasets.core.features"
# Features that read only sizes and types from the content of `_JSON_KEYS`; others would open files named in it.
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
# The features allowed in RLDS datasets. Audio and Video, which start ffmpeg, and classes outside TFDS are excluded.
FEATURE_KINDS = _FROM_JSON | {
    f"{_TFDS}.bounding_boxes.BBoxFeature",
    f"{_TFDS}.class_label_feature.ClassLabel",
    f"{_TFDS}.labeled_image.LabeledImage",
    f"{_TFDS}.scalar.Scalar",
}

_MOST_SHARDS = 100_000  # maximum number of shards of a split; TFDS numbers them with five digits
_LONGEST_NAME = 200
# Allowed file name templates. TFDS passes a template to `str.format`, which would accept attributes and widths.
_TEMPLATE = re.compile(r"(?:[\w.+=@ -]|\{[A-Z_]+\}|/(?!\.\./))*")

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
SPACE_KINDS = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")


def check_files(directory: Path) -> None:
    """Check that a dataset's directory contains only regular files, before a library opens them.

    Raises:
      DatasetError: the directory contains a pipe, a device or a broken link.
    """
    try:
        files.check_regular(directory)
    except OSError as error:
        raise DatasetError(f"{error.filename}: {error.strerror}; the dataset is not opened") from error


def check_tfds(directory: Path) -> None:
    """Check the description of a dataset in TFDS's layout.

    Every feature named in `features.json` and `dataset_info.json` must be one of `FEATURE_KINDS`. `dataset_info.json`
    may only name files within the dataset, and its number of shards is limited.

    Raises:
      DatasetError: a file names something else, which the message states, or is not valid JSON of this kind.
    """
    for name, problems in (("features.json", _feature_problems), ("dataset_info.json", _info_problems)):
        path = directory / name
        if problem := _first(problems(_parsed(path))):
            raise DatasetError(f"{path} {problem}; the dataset is not opened")


def _info_problems(found):
    from google.protobuf import json_format
    from tensorflow_datasets.core.proto import dataset_info_pb2

    try:
        # The type checker does not know the classes that protobuf generates.
        info = json_format.ParseDict(found, dataset_info_pb2.DatasetInfo())  # ty: ignore[missing-attribute]
    except Exception as error:  # protobuf raises errors of many types
        yield f"cannot be read: {' '.join(str(error).split()):.300}"
        return
    yield from _feature_problems(found.get("features"))
    for text in (info.name, info.file_format, *(split.name for split in info.splits)):
        if len(text) > _LONGEST_NAME or "/" in text or text in (".", ".."):
            yield f"has the name {text!r:.80}, which points outside the dataset"
    for split in info.splits:
        template = split.filepath_template
        outside = len(template) > _LONGEST_NAME or template.startswith(("/", "../")) or template == ".."
        if outside or not _TEMPLATE.fullmatch(template):
            yield f"has the template of file names {template!r:.80}, which points outside the dataset"
        if len(split.shard_lengths) > _MOST_SHARDS:
            yield f"has more than {_MOST_SHARDS:,} shards"


def read_minari(path: Path) -> Mapping[str, Any]:
    """Read a Minari dataset's `metadata.json`, and check its data format, its spaces and its number of episodes.

    Raises:
      DatasetError: a space is missing or of a kind that Minari does not have, so that Minari would build the
        environment named in the file; the number of episodes is larger than the dataset's files could hold; or the file
        is not valid JSON of this kind.
    """
    found = _parsed(path)
    data_format = found.get("data_format") if isinstance(found, dict) else found
    if data_format != "hdf5":
        raise DatasetError(
            f"{path} cannot be read: its data_format is {data_format!r:.80}, not 'hdf5', Minari's default; write the "
            "episodes again with Minari in this format"
        )
    for name in ("observation_space", "action_space"):
        text = found.get(name)
        if not isinstance(text, str):
            raise DatasetError(
                f"{path} has no {name}, so Minari would build the environment that the file names, which could run any "
                "code; the dataset is not opened"
            )
        if problem := _first(_space_problems(_parsed(path, text), name)):
            raise DatasetError(f"{path}: {problem}; the dataset is not opened")
    episodes, held = found.get("total_episodes", 0), sum(x.lstat().st_size for x in path.parent.rglob("*"))
    if not isinstance(episodes, int) or not 0 <= episodes <= held:
        raise DatasetError(f"{path} declares {episodes!r:.80} episodes, but has {held:,} bytes of data")
    return found


def _parsed(path, text=None):
    try:
        return files.read_json(path) if text is None else files.parse_json(text)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _first(problems: Iterator[str]) -> str | None:
    try:
        return next(problems, None)
    except RecursionError:
        return "is nested too deeply"


def _feature_problems(node: Any) -> Iterator[str]:
    """Yield reasons why TFDS must not read this JSON: forbidden classes under any key where TFDS looks for a class."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _feature_problems(child)
    if not isinstance(node, dict):
        return
    for key in _KIND_KEYS:
        kind = node.get(key)
        if isinstance(kind, str) and kind not in FEATURE_KINDS:
            yield f"names the feature {kind!r:.200}, and TFDS would import its module"
        elif isinstance(kind, str) and kind not in _FROM_JSON and any(name in node for name in _JSON_KEYS):
            yield f"describes the feature {kind!r} in unrestricted JSON, which may name other files"
    # Strings that contain JSON, in which TFDS also looks for features.
    for key in ("json", "content"):
        if isinstance(node.get(key), str):
            try:
                inner = files.parse_json(node[key])
            except ValueError:
                yield f"has a feature whose {key!r} is not JSON"
            else:
                yield from _feature_problems(inner)


def _space_problems(space: Any, where: str) -> Iterator[str]:
    kind = space.get("type") if isinstance(space, dict) else space
    if kind not in SPACE_KINDS:
        yield f"{where} is {kind!r:.80}; Minari's spaces are {', '.join(SPACE_KINDS)}"
        return
    if "dtype" in space and space["dtype"] not in DTYPES:
        yield f"{where} has dtype {space['dtype']!r:.80}; supported dtypes: {', '.join(DTYPES)}"
    for key in ("shape", "n") if kind != "Discrete" else ():
        sizes = space.get(key, [])
        sizes = sizes if isinstance(sizes, list) else [sizes]
        if not all(type(n) is int and n >= 0 for n in sizes) or not is_bounded_shape(sizes):
            yield f"{where} has {key} {sizes!r:.80}; spaces have at most {MOST_NUMBERS:,} numbers"
    children = space.get("subspaces")
    named = (
        children.items() if isinstance(children, dict) else enumerate(children if isinstance(children, list) else ())
    )
    for name, child in named:
        yield from _space_problems(child, f"{where}[{name!r:.80}]")
