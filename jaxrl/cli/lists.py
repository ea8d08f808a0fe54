"""Tables of the algorithms and presets, for `jaxrl algos`."""

import inspect
from collections.abc import Sequence

from jaxrl.algos import ALGORITHMS
from jaxrl.core.spaces import Box, Discrete
from jaxrl.core.types import Algorithm, EnvSpec, Replay
from jaxrl.run.presets import PRESETS

_OBSERVATION = Box(-1.0, 1.0, (4,))
_ACTIONS = {"discrete": Discrete(2), "continuous": Box(-1.0, 1.0, (2,))}


def algorithm_table() -> str:
    """Name, one line, actions and source of experience of every algorithm; the actions are tried, not claimed."""
    rows = []
    for name, cls in sorted(ALGORITHMS.items()):
        algo = cls()
        actions = [kind for kind, space in _ACTIONS.items() if not _problems(algo, space)]
        replays = any(isinstance(source, Replay) for source in algo.experience.values())
        summary = (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".")
        rows.append((name, "off-policy" if replays else "on-policy", ", ".join(actions), summary))
    return _table(("algorithm", "experience", "actions", ""), rows)


def preset_table() -> str:
    """Name, algorithm, environment and source of every preset."""
    rows = [
        (preset.name, type(preset.algorithm).__name__.lower(), preset.env, preset.source) for preset in PRESETS.values()
    ]
    return _table(("preset", "algorithm", "environment", "source"), rows)


def _problems(algo: Algorithm, actions):
    return algo.validate(EnvSpec("probe", _OBSERVATION, actions), 64, 1)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    widths[-1] = 0  # nothing is to the right of it
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)
