"""The notebooks run from the first cell to the last, and lie in the repository without their outputs.

Without, because outputs go stale unseen, swell every diff (an episode is 100 KB) and name the machine that made them.
These tests run every cell instead, with little training.
"""

import base64
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
TIMEOUT = 300  # seconds a cell; one that waits on a busy machine is no failure


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_paths(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert re.findall(r"(?<![\w.:/])/(?:home|root|work|Users|tmp)\b", path.read_text()) == []


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    notebook = read(next(path for path in NOTEBOOKS if path.stem == "quickstart"))
    environment = os.environ | {"JAXRL_FAST": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("MPLBACKEND", None)  # pictures are to land in the notebook
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    return notebook, folder


def outputs_of(notebook, start):
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and start in cell.source]
    return cell.outputs


def test_quickstart_trains_and_draws(quickstart):
    notebook, folder = quickstart
    run = folder / "runs" / "quickstart"
    assert {"config.json", "metrics.jsonl", "result.json", "checkpoints", "learning_curve.png"} <= {
        path.name for path in run.iterdir()
    }
    (chart,) = [o.data["image/png"] for o in outputs_of(notebook, "result.plot()") if o.output_type != "stream"]
    assert base64.b64decode(chart).startswith(b"\x89PNG")
    shown = outputs_of(notebook, "jaxrl.render(")[-1]
    assert base64.b64decode(shown.data["image/gif"]).startswith(b"GIF8")


def test_quickstart_shows_what_it_says(quickstart):
    notebook, _ = quickstart
    table = "".join(o.text for o in outputs_of(notebook, "sweep.table()") if o.output_type == "stream")
    assert "learning_rate" in table and "best:" in table
    assert outputs_of(notebook, "jaxrl.make_train(")[-1].data["text/plain"].startswith("(2, 2, ")
    assert float(outputs_of(notebook, "jaxrl.load(")[-1].data["text/plain"]) > 0
    own = "".join(o.text for o in outputs_of(notebook, "from_nnx") if o.output_type == "stream")
    assert "the best possible is 0.97" in own
