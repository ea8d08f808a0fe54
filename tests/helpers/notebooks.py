"""Run notebooks, and cut their outputs down to what lies in the repository.

`scripts/run_notebooks.py` stores whole trainings; `tests/test_notebooks.py` runs the cells with little training.
"""

import hashlib
import os
import pathlib
from collections.abc import Mapping

import nbclient
import nbformat
from nbformat import NotebookNode

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 3600  # seconds a cell; one that waits on a busy machine is no failure


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells of code of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path: pathlib.Path, folder: pathlib.Path, more: Mapping[str, str] | None = None) -> NotebookNode:
    """Run a notebook from its first cell to its last.

    Args:
      path: of the notebook, which stays as it is.
      folder: where it runs.
      more: of the kernel's environment variables.

    Returns:
      The notebook with its new outputs.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | dict(more or {})
    environment.pop("MPLBACKEND", None)  # pictures are to land in the notebook
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources)
    client.execute(env=environment)
    return notebook


def source_digest(notebook: NotebookNode) -> str:
    """Return a digest of a notebook's code, which its stored outputs belong to."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def stored(notebook: NotebookNode, folder: str) -> NotebookNode:
    """Return an executed notebook as it is stored: without progress, times and paths, and with its code's digest.

    Args:
      notebook: executed; it is changed.
      folder: where it ran, whose path is cut from its outputs.
    """
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if not _is_progress(output)]
        for output in cell.outputs:
            if "text" in output:
                output.text = output.text.replace(f"{folder}/", "")
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = value.replace(f"{folder}/", "")
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
        "jaxrl": {"code": source_digest(notebook)},
    }
    return notebook


def _is_progress(output: NotebookNode) -> bool:
    return output.get("name") == "stderr" or " steps/s" in output.get("data", {}).get("text/plain", "")


def shown(cell: NotebookNode) -> set[str]:
    """Return the kinds of output of a cell that are stored: "stdout", and types such as "image/png"."""
    outputs = [output for output in cell.outputs if not _is_progress(output)]
    streams = {output.name for output in outputs if output.output_type == "stream"}
    return streams | {kind for output in outputs for kind in output.get("data", {})}
