"""Run the notebooks with their full training, and store their outputs.

.venv/bin/python scripts/run_notebooks.py [NAME ...]
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import nbformat  # noqa: E402  needs the path above
from helpers.notebooks import NOTEBOOKS, executed, stored  # noqa: E402

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for path in NOTEBOOKS:
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = stored(executed(path, Path(folder)), folder)
        path.write_text(nbformat.writes(notebook) + "\n")
        print(path.relative_to(ROOT), f"{path.stat().st_size / 1e3:.0f} kB", flush=True)
