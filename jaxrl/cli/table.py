"""The table of the command line: flags, algorithms, presets and environments, known before JAX is imported.

It is made from the code (`jaxrl.cli.describe`), during set-up and when the wheel is built (`python -m
jaxrl.cli.table`), otherwise at first use, and stored as a JSON file with a hash of the code. Objects that a user
registered in this process are not in it: if there can be any, JAX has been imported, and the code is used.
"""

import contextlib
import dataclasses
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

from jaxrl.cli.flags import DefaultText, Flag, Group
from jaxrl.cli.values import Kind, Part
from jaxrl.core import files, suite_modules, suites
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.versions import installed_version

FILE = Path(__file__).with_name("table.json")
_PACKAGE = Path(__file__).parents[1]


@functools.cache
def load() -> dict[str, Any]:
    """Return the table, from a file for this code if there is one; otherwise make it and store it in the user's cache.

    Raises:
      subprocess.CalledProcessError: the code cannot be imported.
    """
    source, places = _source(), [FILE]
    in_checkout = (_PACKAGE.parent / "pyproject.toml").exists()  # files of a checkout change, installed ones do not
    with contextlib.suppress(RuntimeError, ConfigError):  # no home directory
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
    """Return a hash of names and sizes of the code files, and one that includes their times."""
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
    """Make the table in a separate process, without registered objects and without an accelerator."""
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
    """Return the own flags of "train", "sweep", "tune" or "pbt", or the common flags of "processes"."""
    return [_flag(written) for written in load()["commands"][command]]


# --- algorithms and presets --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Preset:
    """A preset as shown in the flags; `defaults` by option."""

    name: str
    algorithm: str
    env: str
    num_envs: int
    total_steps: int
    defaults: Mapping[str, Any]


def preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
      ConfigError: there is no such preset; suggests the close names.
    """
    presets = load()["presets"]
    if name not in presets:
        raise unknown("preset", name, presets, "jaxrl algos lists them")
    return Preset(name, **presets[name])


def preset_source(name: str) -> str:
    """Return the source of a preset's settings, and the differences from it."""
    return next(row[3] for row in load()["lists"]["presets"] if row[0] == name)


def algorithms(command: str = "train") -> list[str]:
    """Return the names of the algorithms that a command accepts, sorted; sweeps and searches accept no dataset."""
    names = {*load()["algorithms"], *_registered_algorithms()}
    return sorted(names - {*load()["from_datasets"]} if command in ("sweep", "tune", "pbt") else names)


def algorithm_groups(name: str, preset: Preset | None = None) -> list[Group]:
    """Return the flags of an algorithm, with the defaults of a preset if given.

    Raises:
      ConfigError: there is no such algorithm; suggests the close names.
    """
    known = name.lower()
    if known in load()["algorithms"]:
        groups = [_group(written) for written in load()["algorithms"][known]]
    elif known in _registered_algorithms():
        from jaxrl.cli import fields

        groups = fields.algorithm_groups(_registered_algorithms()[known]())
    else:
        raise unknown("algorithm", name, algorithms(), "jaxrl algos lists them; one of yours: --import MODULE")
    return groups if preset is None else [_with_defaults(group, preset.defaults) for group in groups]


def algorithms_accepting(option: str, part: str) -> list[str]:
    """Return jaxrl's algorithms whose flag `option` accepts the part of this name."""
    return [
        name
        for name, groups in load()["algorithms"].items()
        for group in map(_group, groups)
        for flag in group.flags
        if group.option(flag) == option and any(known.name == part for known in flag.kind.parts)
    ]


def _registered_algorithms() -> Mapping[str, Any]:
    """Return jaxrl's and the user's algorithms; empty if the code that registers them is not imported."""
    base = sys.modules.get("jaxrl.algos.base")
    return {} if base is None else base.ALGORITHMS


def _with_defaults(group, defaults):
    flags = [
        dataclasses.replace(flag, default=_default(defaults[group.option(flag)], flag.kind))
        if group.option(flag) in defaults
        else flag
        for flag in group.flags
    ]
    return dataclasses.replace(group, flags=flags)


# --- environments ------------------------------------------------------------------------------------------------


def environments(suite: str | None = None) -> list[str]:
    """Return the names of `jaxrl.environments()`, or those of one suite, without importing others.

    Raises:
      ConfigError: there is no such suite, or it is not installed.
    """
    return suites.environments(_names) if suite is None else suites.environments_of(suite, _names)


def environment_problems(name: str) -> list[str]:
    """Return why there is no environment of this name, as far as can be checked without JAX.

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
    """Return whether the suite has this environment, or refuses it for a reason that only its own module knows."""
    if suite != "gymnasium":
        return name in _names(suite) or name in load()["environments"].get(suite, {"refused": ()})["refused"]
    if ":" in name:
        return True  # the module before the colon registers it
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
    if known is None or module in sys.modules or known["version"] != _version(known["package"]):
        return import_module(module).names()  # another version, or with names that a user registered
    return known["names"]


def _version(package: str | None) -> str | None:
    return package and installed_version(package)


# --- from JSON ---------------------------------------------------------------------------------------------------


def _group(written: Mapping[str, Any]) -> Group:
    return Group(written["title"], [_flag(flag) for flag in written["flags"]], written["help"], written["prefix"])


def _flag(written: Mapping[str, Any]) -> Flag:
    kind = _kind(written["kind"])
    others: dict[str, Any] = {name: written[name] for name in ("help", "many", "limits") if name in written}
    others |= {"hint": written.get("shown"), "choices": tuple(written.get("choices", ()))}
    return Flag(written["name"], kind, _default(written["default"], kind), **others)


def _default(value: Any, kind: Kind) -> Any:
    if isinstance(value, dict):
        return DefaultText(value["written"])
    if isinstance(value, list):
        return tuple(value)
    return files.expand(value) if kind.name == "path" and value is not None else value


@functools.cache
def _kind(text: str) -> Kind:
    name, _, none = text.partition("|")
    name, _, parts = name.partition(":")
    return Kind(name, tuple(map(_part, parts.split(","))) if parts else (), bool(none))


@functools.cache
def _part(name: str) -> Part:
    described = load()["parts"][name]
    return Part(name, {field: _kind(kind) for field, kind in described["fields"].items()}, described["made_by"])


if __name__ == "__main__":
    _write(FILE, _source(), _made())
