"""The table of the command line: flags, algorithms, presets and environments, available before JAX is imported.

The table is generated from the code by `jaxrl.cli.describe`, during set-up and when the wheel is built (`python -m
jaxrl.cli.table`), otherwise at first use, and stored as a JSON file with a hash of the code. Objects that the user
registered in this process are not in it; if there can be any, JAX is already imported, and the code is used instead.
"""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxrl.cli.flags import Flag
from jaxrl.cli.values import Kind, Part
from jaxrl.core import files, suite_modules, suites
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.versions import installed_version

FILE = Path(__file__).with_name("table.json")
_PACKAGE = Path(__file__).parents[1]


@functools.cache
def load() -> dict[str, Any]:
    """Return the table from a file that matches the code; otherwise generate it and store it in the user's cache.

    Raises:
      subprocess.CalledProcessError: the code cannot be imported.
    """
    source, places = _source(), [FILE]
    in_checkout = (_PACKAGE.parent / "pyproject.toml").exists()  # files of a checkout may change, installed ones do not
    with contextlib.suppress(RuntimeError, ConfigError):  # there is no home directory
        if (folder := files.cache_folder()) is not None:
            places.append(folder / f"cli-{_hash(os.fspath(_PACKAGE))}.json")
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            with files.open_to_read(place) as file:
                head, body = file.read().decode().split("\n", 1)
            sizes, times, checksum = head.split()
            if (sizes, times if in_checkout else source[1], checksum) == (*source, _hash(body)):
                return json.loads(body)
    body = _made()
    for place in places[1:]:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, source, body)
    return json.loads(body)


def _source() -> tuple[str, str]:
    """Return a hash of the names and sizes of the code files, and one that includes modification times."""
    sizes, times = [], []
    for folder, _, names in os.walk(_PACKAGE):
        for name in names:
            if name.endswith((".py", ".toml")):
                path = os.path.join(folder, name)
                about = os.stat(path)
                sizes.append((os.path.relpath(path, _PACKAGE), about.st_size))
                times.append((path, about.st_mtime_ns))
    return _hash(repr(sorted(sizes))), _hash(repr(sorted(sizes + times)))


def _made() -> str:
    """Generate the table in a separate process, without registered objects and without an accelerator."""
    code = "import json; from jaxrl.cli import describe; print(json.dumps(describe.table()))"
    paths = os.pathsep.join([os.fspath(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


def _write(place, source, body):
    with files.replacing(place) as file:
        file.write(f"{' '.join(source)} {_hash(body)}\n{body}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def command_flags(command: str) -> list[Flag]:
    """Return the flags of "train", "compile", "sweep", "tune" or "pbt" that do not belong to the algorithm."""
    return [_flag(written) for written in load()["commands"][command]]


# --- algorithms and presets --------------------------------------------------------------------------------------


def preset(name: str) -> Mapping[str, Any]:
    """Return the preset of this name: "algorithm", "source", and "defaults" (the text of each flag that it changes).

    Raises:
      ConfigError: the preset is unknown; suggests similar names.
    """
    presets = load()["presets"]
    if name not in presets:
        raise unknown("preset", name, presets, "jaxrl algos lists them")
    return presets[name]


def algorithms(command: str = "train") -> list[str]:
    """Return the sorted names of the algorithms that a command accepts; sweeps and searches do not accept datasets."""
    names = {*load()["algorithms"], *_registered_algorithms()}
    return sorted(names - {*load()["from_datasets"]} if command in ("sweep", "tune", "pbt") else names)


def algorithm_flags(name: str) -> tuple[list[Flag], dict[str, str]]:
    """Return the flags of an algorithm, and a description of each help section, starting with the algorithm's.

    Raises:
      ConfigError: the algorithm is unknown; suggests similar names.
    """
    known = name.lower()
    if known in load()["algorithms"]:
        flags, helps = load()["algorithms"][known]
        return [_flag(written) for written in flags], dict(helps)
    if known not in _registered_algorithms():
        raise unknown("algorithm", name, algorithms(), "jaxrl algos lists them; use --import MODULE for your own")
    from jaxrl.cli import fields

    return fields.algorithm_flags(_registered_algorithms()[known]())


def algorithms_accepting(flag: str, part: str) -> list[str]:
    """Return the built-in algorithms that accept this part as a value of this flag."""
    return [
        name
        for name, (flags, _) in load()["algorithms"].items()
        for written in flags
        if written["name"] == flag and any(known["name"] == part for known in written["kind"].get("parts", ()))
    ]


def _registered_algorithms() -> Mapping[str, Any]:
    """Return built-in and user-defined algorithms, or an empty dict if the code that registers them is not imported."""
    base = sys.modules.get("jaxrl.algos.base")
    return {} if base is None else base.ALGORITHMS


# --- environments ------------------------------------------------------------------------------------------------


def environments(suite: str | None = None) -> list[str]:
    """Return the names of `jaxrl.environments()`, or those of one suite, without importing other suites.

    Raises:
      ConfigError: the suite is unknown or not installed.
    """
    return suites.environments(_names) if suite is None else suites.environments_of(suite, _names)


def environment_problems(name: str) -> list[str]:
    """Return the problems with the name of an environment that can be found without JAX.

    Raises:
      MissingExtraError: the suite's package is not installed.
    """
    try:
        found = suites.suite_of(name, _names)
        if found is not None and not _may_be(*found):
            raise suites.unknown_name(*found, _names(found[0]))
    except ConfigError as error:
        return error.problems
    return []


def _may_be(suite: str, name: str) -> bool:
    """Return whether the suite may have this environment; also True for names whose rejection its module explains."""
    if suite != "gymnasium":
        return name in _names(suite) or name in load()["environments"].get(suite, {"refused": ()})["refused"]
    if ":" in name:
        return True  # registered by the module before the colon
    import gymnasium

    try:
        return gymnasium.spec(name) is not None
    except gymnasium.error.UnregisteredEnv:
        return False
    except (gymnasium.error.Error, ImportError):
        return True  # the adapter reports the reason


def _names(suite: str) -> Iterable[str]:
    if suite in suites.INSTALLED_NAMES:
        return suites.INSTALLED_NAMES[suite]()
    if suite not in suite_modules.SUITES:
        return suite_modules.load(suite).names()
    module, known = suite_modules.SUITES[suite].module, load()["environments"].get(suite)
    package = known and known["package"]
    if known is None or module in sys.modules or known["version"] != (package and installed_version(package)):
        return import_module(module).names()  # the package has another version, or the user may have registered names
    return known["names"]


# --- from JSON ---------------------------------------------------------------------------------------------------


def _flag(written: dict[str, Any]) -> Flag:
    read: dict[str, Any] = {"kind": _kind(written["kind"]), "choices": tuple(written.get("choices", ()))}
    return Flag(**written | read)


def _kind(written: dict[str, Any]) -> Kind:
    read: dict[str, Any] = {"parts": tuple(map(_part, written.get("parts", ())))}
    return Kind(**written | read)


def _part(written: dict[str, Any]) -> Part:
    read: dict[str, Any] = {"fields": {name: _kind(kind) for name, kind in written.get("fields", {}).items()}}
    return Part(**written | read)


if __name__ == "__main__":
    _write(FILE, _source(), _made())
