"""Published settings by name, each with its source.

A preset writes every field that its source fixes, also where that is the default today: no change of a default moves a
preset (`tests/golden/presets.json` holds them).
"""

from jaxrl.core.errors import unknown
from jaxrl.run.presets import (
    batchppo,
    cleanrl,
    craftax,
    dqn,
    dreamer,
    impala,
    many_environments,
    purejaxrl,
    reppo,
    rlpyt,
    sac_parts,
    zoo,
)
from jaxrl.run.presets.description import Preset

__all__ = ["PRESETS", "Preset", "preset"]

_SOURCES = (
    purejaxrl,
    cleanrl,
    zoo,
    batchppo,
    craftax,
    dqn,
    dreamer,
    impala,
    reppo,
    rlpyt,
    sac_parts,
    many_environments,
)
PRESETS: dict[str, Preset] = {preset.name: preset for source in _SOURCES for preset in source.PRESETS}


def preset(name: str) -> Preset:
    """Published settings by name; `jaxrl algos` lists them.

    Raises:
      ConfigError: there is no such preset; suggests the close names.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "jaxrl algos lists them")
    return PRESETS[name]
