"""Writes jaxrl/cli/table.json anew, from the code: run it after a flag, a field, a preset, or a help text changed.

.venv/bin/python scripts/update_cli_table.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from jaxrl.cli import describe, table  # noqa: E402  needs the path above


def main():
    table.FILE.write_text(as_text(describe.table()))
    print(table.FILE.relative_to(ROOT))


def as_text(value):
    """JSON with a line for each flag, part and preset, so that a change is read line by line."""
    return _lines(value, "") + "\n"


def _lines(value, indent):
    flat = json.dumps(value, ensure_ascii=False)
    nested = isinstance(value, dict | list | tuple) and len(flat) > 100 and any(map(_is_nested, _values(value)))
    if not nested and len(flat) <= 1000 or not isinstance(value, dict | list | tuple):
        return flat
    deeper = indent + " "
    if isinstance(value, dict):
        inner = [f"{deeper}{json.dumps(key)}: {_lines(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    inner = [deeper + _lines(item, deeper) for item in value]
    return "[\n" + ",\n".join(inner) + f"\n{indent}]"


def _values(value):
    return value.values() if isinstance(value, dict) else value


def _is_nested(value):
    return isinstance(value, dict | list | tuple) and len(value) > 2


if __name__ == "__main__":
    main()
