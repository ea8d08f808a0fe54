"""Presets: published settings with a name and a source, in the TOML files of this folder (one file per source).

A table is a preset or, if its name begins with "_", the shared part of several presets. `base` names the tables that it
extends: nested tables are merged, unless their `type` differs, and other values are replaced. `unset` lists settings
that are None, as paths in `algorithm`. In a `source`, `{base}` stands for the source of the base. A preset contains
every field that its source specifies, even if the value is the default, so that presets do not depend on defaults
(`tests/golden/presets.json`).
"""

import dataclasses
import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

from jaxrl.core import config
from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.types import Algorithm
from jaxrl.run.directory.run_directory import difference

__all__ = ["PRESETS", "Preset", "preset", "presets_of"]

_KEYS = {"algorithm", "base", "env", "source", "topology", "total_steps", "unset"}


@dataclasses.dataclass(frozen=True)
class Preset:
    """The settings of a run.

        preset = jaxrl.preset("purejaxrl-cartpole")
        topology = jaxrl.Anakin(**preset.topology)
        result = jaxrl.train(preset.algorithm, preset.env, total_steps=preset.total_steps, topology=topology)

    Attributes:
      name: name for `jaxrl.preset` and `--preset`.
      algorithm: the algorithm with all its fields.
      env: the environment of the source, as "suite:name"; similar environments may be used instead.
      total_steps: environment steps of the source's training.
      topology: arguments of `Anakin` or `Sebulba`, including "num_envs".
      source: source of the settings, and the differences from this source.
    """

    name: str
    algorithm: Algorithm
    env: str
    total_steps: int
    topology: Mapping[str, Any]
    source: str


class _Presets(Mapping[str, Preset]):
    """A mapping from names to the presets in TOML files; each preset is decoded at its first use."""

    def __init__(self, texts: Iterable[str]):
        self._tables: dict[str, dict[str, Any]] = {}
        for text in texts:
            tables = tomllib.loads(text)
            if twice := sorted(set(tables) & set(self._tables)):
                raise ConfigError(f"two files define the preset {twice[0]!r}; rename one of them")
            self._tables |= tables
        self._made: dict[str, Preset] = {}

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tables if not name.startswith("_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Preset:
        if name not in self._tables or name.startswith("_"):
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _decoded(name, self._merged(name, ()))
        return self._made[name]

    def _merged(self, name, extending):
        if name in extending or not isinstance(self._tables.get(name), dict):
            preset = (*extending, name)[0]
            raise ConfigError(f"the preset {preset!r} extends {name!r}, which extends itself or is not a table")
        table, whole = self._tables[name], {}
        bases = table.get("base", [])
        for base in [bases] if isinstance(bases, str) else bases:
            whole = _merge(whole, self._merged(base, (*extending, name)))
        own = {key: value for key, value in table.items() if key not in ("base", "unset")}
        if "source" in table and "source" in whole:
            own["source"] = table["source"].replace("{base}", whole["source"])
        for path in ("algorithm." + path for path in table.get("unset", [])):
            own = _merge(own, functools.reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), None))
        return _merge(whole, own)


def _merge(base, own):
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    if "type" in base and own.get("type", base["type"]) != base["type"]:
        return own
    return base | {key: _merge(base.get(key), value) for key, value in own.items()}


def _decoded(name, table):
    for key in sorted(set(table) ^ (_KEYS - {"base", "unset"})):
        if key in table:
            raise unknown(f"entry of the preset {name}:", key, _KEYS)
        raise ConfigError(f"the preset {name!r} lacks the entry {key!r}")
    algorithm = config.decode(table["algorithm"])
    made = config.encode(algorithm)  # decoding ignores or changes some values, for the configurations of older runs
    if ignored := difference(_merge(made, table["algorithm"]), made, prefix="algorithm."):
        raise ConfigError(
            f"the preset {name!r} has an invalid value (in the preset -> in {type(algorithm).__name__}): {ignored[0]}"
        )
    return Preset(name, **table | {"algorithm": algorithm})


def presets_of(texts: Iterable[str]) -> Mapping[str, Preset]:
    """Return the presets in TOML texts by name; each is checked when it is looked up.

    Raises:
      ConfigError: a name is in two texts; or, when a preset is looked up, a base is missing, or a key, type or value of
        the preset is missing or invalid.
      tomllib.TOMLDecodeError: a text is not TOML.
    """
    return _Presets(texts)


PRESETS = presets_of(
    file.read_text("utf-8")
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    if file.name.endswith(".toml")
)


def preset(name: str) -> Preset:
    """Return published settings by name; `jaxrl algos` lists them.

    Raises:
      ConfigError: there is no such preset; the message suggests similar names.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "jaxrl algos lists them")
    return PRESETS[name]
