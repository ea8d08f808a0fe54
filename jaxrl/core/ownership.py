"""Recognition of files that jaxrl wrote, by name and content, so that it never replaces or deletes other files."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.core import files
from jaxrl.core.errors import ConfigError, RunDirectoryError

MARK = "written by jaxrl"  # text in files whose format does not identify the program that wrote them

# Patterns of the first bytes of each kind of file. Files that are appended to may be empty. PNGs and GIFs of versions
# without `MARK` are recognized by their sizes, resolution, palette and last delay. Files of other kinds contain `MARK`.
_KINDS = {
    "brax": rb"\s*<.*(?:written by jaxrl|brax)",
    "config": rb'\s*\{(?=.*"(?:format": ?\d|type": ?"algorithm:))(?=.*"(?:algorithm|sweep|tune)": ?\{)',
    "curves": rb"configuration,[^\n]*\bseed,step\b",
    "description": rb'\{\s*"[gt]pu": \{.*"source": "read on the device',
    "evaluations": rb'\{"step": \d+(?:, "evaluation/|[^\n]*[^\n}]\Z)|\Z',
    "events": rb".*\n\x07seconds",
    "gif": rb"GIF89a(?:.{4}\x85.*\x21\xf9\x04.d\0.\0,|.*written by jaxrl)",
    "journal": rb'\{"settings": |\Z',
    "lineage": rb"step,member,parent,score",
    "lock": rb"process \d+ on |\Z",
    "log": rb"(?:.*\n)?[-\d]{10} [:\d]{8} [^\n]+, seed \d+, [\d,]+ steps\n|(?:[-\d]{10} [:\d]{8} | {20}).{400000}|\Z",
    "manifest": rb'\{\s*"step": \d+,\s*"config": ',
    "metrics": rb'\{"step": \d+(?:, "(?:seconds"|[^"/]+/)|\}|[^\n]*[^\n}]\Z)|\Z',
    "metrics of a sweep": rb'\{"configuration": \d+, "seed": ',
    "numpy": rb'PK.*"operations": \[',
    "onnx": rb".*jax2onnx",
    "png": rb"\x89PNG.{12}\0\0(?:.*?Software\0written by jaxrl|(?:\x03H|\x04\xb0|\x06\x18).{,30}Matplotlib.{,60}pHYs\0\0\x12t)",  # noqa: E501
    "probe": rb"\0*\Z",
    "py": rb".*Runs a policy that `jaxrl export",
    "report": rb"\s*<.*Written by jaxrl ",
    "result": rb'\{(?=.*"evaluation": \{)(?=.*"stopped": ")(?=.*"wall_seconds": )',
    "rows": rb'\{"step": \d+(?:(?:, "(?:\\.|[^"\\\n])*": [^,"{\[\n]+)*\}|[^\n]*[^\n}]\Z)|\Z',
    "stablehlo": rb".*ActFunction",
    "sweep": rb'\{\s*"format": \d+,\s*"configurations": \[',
    "table": (
        rb"[^\n]*\b(?:IQM(?:\W+(?:low|high|mean|std|min|max|training))*\W+(?:failed|no score)|score\W+copies\W+failed|"
        rb"return\W+evaluations\W+ended)\b"
    ),
    "table of metrics": rb"step(?:,seconds\b|,[^,/\n]+/|\r?\n)",
    "wandb": rb'\{\s*"id": "[\w-]+"',
}
# Files that a run, a search or a sweep's program writes to its directory; they are deleted in reverse order.
OF_RUNS = {
    "config.json": "config",
    ".lock": "lock",
    "metrics.jsonl": "metrics",
    "metrics.csv": "table of metrics",
    "result.json": "result",
    "learning_curve.png": "png",
    "wandb_run.json": "wandb",
    "log.txt": "log",
    "evaluations.jsonl": "evaluations",
    "study.journal": "journal",
    "trials.csv": "table",
    "trials.md": "table",
    "trials.png": "png",
    "checkpoints": "folder",
    "tensorboard": "folder",
    "videos": "folder",
    "checkpoints/[0-9]*": "step",
    "checkpoints/.saving-[0-9]*": "step",
    "checkpoints/.saving-probe": "probe",
    "checkpoints/.replaced-[0-9]*": "step",
    "videos/[0-9]*.gif": "gif",
    "videos/[0-9]*.html": "brax",
    "tensorboard/events.out.tfevents.*": "events",
}
OF_SWEEPS = {
    "metrics.jsonl": "metrics of a sweep",
    "curves.csv": "curves",
    "table.csv": "table",
    "table.md": "table",
    "curves.png": "png",
    "lineage.csv": "lineage",
    "lineage.png": "png",
    "sweep.json": "sweep",
}
_SWEEPS = ("a sweep", "a population")


def is_own(path: Path, kind: str) -> bool:
    """Return whether jaxrl wrote the file at `path`; False for links, and for missing or unreadable files.

    Args:
      path: path of the file.
      kind: a key of `_KINDS`; files of other kinds must contain `MARK`. For a directory, "folder", or "step" if it is a
        checkpoint.
    """
    if path.is_symlink():
        return False
    if kind == "folder":
        return path.is_dir()
    try:
        if kind == "step":
            return _is_step(path)
        with files.open_to_read(path) as file:
            return bool(re.match(_KINDS.get(kind, rb".*written by jaxrl"), file.read(files.LARGEST), re.DOTALL))
    except OSError:
        return False


def check_output(path: Path, kind: str) -> None:
    """Check that a file can be written without replacing one that jaxrl did not write.

    Args:
      path: the path of the file.
      kind: see `is_own`.

    Raises:
      ConfigError: the path exists, but jaxrl did not write a file of this kind there.
    """
    if os.path.lexists(path) and not is_own(path, kind):
        raise ConfigError(
            f"{path} exists, and jaxrl did not write it with this command; choose another name, or delete it"
        )


def check_folder(path: Path, kind: str) -> None:
    """Check that jaxrl can store `kind` in a folder without replacing or deleting other files.

    Args:
      path: the path of the folder, which may be missing.
      kind: "a run", "a search", "a sweep", "a population", "a program of a sweep", or "the best policy of a sweep or a
        search".

    Raises:
      RunDirectoryError: the folder contains another kind, or a foreign file with a name that jaxrl uses.
    """
    found = folder_kind(path)
    if found not in (None, kind):
        raise RunDirectoryError(f"{path} contains {found}, but {kind} needs its own directory; use another --run-dir")
    # Foreign event files cannot collide, because jaxrl's event files have unique names.
    named = [(one, what) for one, what in _named(path, kind) if what != "events"]
    others = [one for one, what in named if not is_own(one, what)]
    if not found and kind not in _SWEEPS:  # without a configuration, the folder's contents cannot be resumed
        others += [one for one, what in named if what not in ("folder", "lock")]
    if others:
        raise RunDirectoryError(
            f"{', '.join(map(str, others[:5]))}: not written by jaxrl for {kind}; move it away, or use "
            "another --run-dir"
        )


def remove(path: Path, kind: str) -> None:
    """Delete only the files that jaxrl wrote into the directory of a run or a sweep.

    Raises:
      OSError: a file cannot be deleted.
    """
    for one, what in reversed(_named(path, kind)):
        if what == "folder":
            if not any(one.iterdir()):
                one.rmdir()
        elif what != "lock" and is_own(one, what):
            shutil.rmtree(one) if one.is_dir() else one.unlink()


def folder_kind(path: Path) -> str | None:
    """Return the kind of a folder's contents: "a run", "a sweep", "a dataset", ...; None for anything else."""
    if config := _read(path / "config.json", "config"):
        exported = (path / "model.safetensors").exists() and not (path / "checkpoints").exists()
        return "an exported policy" if exported else config_kind(config)
    if found := _read(path / "sweep.json", "sweep") or _read(path / "program-0" / "config.json", "config").get("sweep"):
        return "a population" if found.keys() & {"lineage", "population"} else "a sweep"
    datasets = ("recording.json", "dataset_info.json", "data/main_data.hdf5", "data/metadata.json")
    return "a dataset" if any((path / name).exists() for name in datasets) else None


def config_kind(config: Mapping[str, Any]) -> str:
    """Return the kind of a directory with this configuration."""
    if "tune" in config:
        return "a search"
    if "sweep" in config:
        return "the best policy of a sweep or a search" if "algorithm" in config else "a program of a sweep"
    return "a run"


def _named(path: Path, kind: str) -> list[tuple[Path, str]]:
    """Return the path and the kind of each file in a directory that has one of the names that `kind` uses."""
    names = OF_SWEEPS if kind in _SWEEPS else OF_RUNS
    return [(found, what) for pattern, what in names.items() for found in path.glob(pattern)]


def _is_step(path: Path) -> bool:
    """Return whether a folder is a checkpoint, even if it is damaged or only partly written or deleted."""
    record = path / "manifest.json"
    known = all(one.name.startswith(("state", "manifest.json", ".manifest.json.")) for one in path.iterdir())
    return known and (is_own(record, "manifest") or not record.exists() or (path / "state" / "_METADATA").exists())


def _read(path: Path, kind: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty if jaxrl did not write the file or it cannot be read."""
    try:
        found = files.read_json(path) if is_own(path, kind) else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
