"""Reads JSON as RFC 8259 defines it, without Python's NaN and Infinity."""

import json
from pathlib import Path
from typing import Any


def parse_strictly(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
      ValueError: it is not JSON.
    """

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_json(path: Path) -> Any:
    """Return the value of a file of JSON.

    Raises:
      ValueError: it is not JSON.
    """
    return parse_strictly(path.read_text())


def check_folder(folder: Path) -> set[str]:
    """Parse every file of JSON and of JSON lines below a folder, and return their names.

    Raises:
      ValueError: one is not JSON.
    """
    names = set()
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".journal"):
            lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
            for line in lines:
                parse_strictly(line)
            names.add(path.name)
    return names
