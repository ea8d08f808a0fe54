"""Writes `presets.json`: every field of every preset. Not run by the tests, which hold the presets to it.

    .venv/bin/python tests/golden/make_presets.py

A change of a default must not show up here: write the field into the preset instead. A field that is new does.
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).parent / "presets.json"
sys.path.insert(0, str(FILE.parents[2]))

from jaxrl.core.config import encode  # noqa: E402  needs the path above
from jaxrl.run.presets import PRESETS, Preset  # noqa: E402


def encoded(preset: Preset) -> dict:
    """All that a preset fixes, as JSON values."""
    whole = {"algorithm": encode(preset.algorithm), "environment": preset.env, "total_steps": preset.total_steps}
    return whole | {"topology": dict(preset.topology)}


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: encoded(preset) for name, preset in sorted(PRESETS.items())}, indent=1) + "\n")
