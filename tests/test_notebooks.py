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


def executed(name, folder):
    notebook = read(next(path for path in NOTEBOOKS if path.stem == name))
    environment = os.environ | {"JAXRL_FAST": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("MPLBACKEND", None)  # pictures are to land in the notebook
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    return notebook


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return executed("quickstart", folder), folder


def outputs_of(notebook, start):
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and start in cell.source]
    return cell.outputs


@pytest.mark.long
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


@pytest.mark.long
def test_quickstart_shows_what_it_says(quickstart):
    notebook, _ = quickstart
    table = "".join(o.text for o in outputs_of(notebook, "sweep.table()") if o.output_type == "stream")
    assert "learning_rate" in table and "best:" in table
    assert outputs_of(notebook, "jaxrl.make_train(")[-1].data["text/plain"].startswith("(2, 2, ")
    assert float(outputs_of(notebook, "jaxrl.load(")[-1].data["text/plain"]) > 0
    own = "".join(o.text for o in outputs_of(notebook, "from_nnx") if o.output_type == "stream")
    assert "the best possible is 0.97" in own


# What a notebook prints, by its name.
PRINTED = {
    "own_environment": r"\[0, 1\] are the actions|\[1, 0\] are|\[0, 0\] are|\[1, 1\] are",
    "own_network": r"linen Policy\(PPO on gymnax:CartPole-v1\)",
    "sweep": r"best: ",
    "recurrent": r"size of its memory: \[\(32,\)",
    "offline": r"online: return \d+\.\d after \d+ steps",
    "host_environments": r"one episode: \d+",
    "watching": r"\['000000002048.gif', '000000004096.gif'\]",
}


def test_every_notebook_is_executed_by_a_test():
    assert {path.stem for path in NOTEBOOKS} == {*PRINTED, "quickstart", "datasets"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_says_how_to_install(path):
    assert "pip install" in read(path).cells[0].source


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_runs_and_prints_what_it_found(name, tmp_path):
    if name == "offline":
        pytest.importorskip("tensorflow_datasets")
    notebook = executed(name, tmp_path)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert re.search(PRINTED[name], text), text
    if name == "watching":
        assert sum("image/gif" in output.get("data", {}) for output in outputs) == 3


@pytest.mark.long
def test_datasets_go_out_and_in_and_are_learnt_from(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    notebook = executed("datasets", tmp_path)

    def printed(start):
        return "".join(o.text for o in outputs_of(notebook, start) if o.output_type == "stream" and o.name == "stdout")

    assert (tmp_path / "data" / "cartpole" / "1.0.0" / "dataset_info.json").is_file()
    report = printed("dataset.report()")
    assert "40 episodes" in report and "no faults found" in report
    assert base64.b64decode(outputs_of(notebook, "views.return_to_go(")[-1].data["image/png"]).startswith(b"\x89PNG")
    assert "36 episodes to train on, 4 held out" in printed("dataset.split(")
    assert "(4, 32, 3)" in printed("loader.take(")
    assert float(re.search(r"student's return: ([\d.]+)", printed("student = jaxrl.train("))[1]) > 0
    assert 0 < int(re.search(r"(\d+)% of", printed("held-out actions"))[1]) <= 100
