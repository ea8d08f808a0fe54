"""The notebooks run from the first cell to the last; in the repository they have no outputs, or those of their code.

The stored outputs are of whole trainings (`scripts/run_notebooks.py`). With them lies the digest of the code that made
them, so that neither changes without the other; and the tests, which run every cell with little training, compare which
kinds of output each cell has.
"""

import base64
import re

import nbformat
import pytest
from helpers.notebooks import NOTEBOOKS, code_cells, executed, shown, source_digest

LARGEST = 400_000  # bytes of a notebook with its pictures


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_the_code_small_and_of_no_machine(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert re.search(r'find_spec\("jaxrl"\) is None.*\n +%pip .*git\+<repository>', code_cells(notebook)[0].source)
    if not any(cell.outputs for cell in code_cells(notebook)):
        assert all(cell.execution_count is None for cell in code_cells(notebook)) and "jaxrl" not in notebook.metadata
        return
    assert notebook.metadata.get("jaxrl", {}).get("code") == source_digest(notebook), "run scripts/run_notebooks.py"
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size <= LARGEST
    assert re.findall(r"(?<![\w.:/])/(?:home|root|work|Users|tmp)\b", path.read_text()) == []


def run(name, folder):
    """A notebook run with little training, whose cells show what they show in the repository."""
    path = next(path for path in NOTEBOOKS if path.stem == name)
    notebook = executed(path, folder, {"JAXRL_FAST": "1", "JAX_PLATFORMS": "cpu"})
    before = code_cells(read(path))
    if any(cell.outputs for cell in before):
        for cell, as_stored in zip(code_cells(notebook), before, strict=True):
            assert shown(cell) == shown(as_stored), cell.source
    return notebook


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return run("quickstart", folder), folder


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


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_runs_and_prints_what_it_found(name, tmp_path):
    if name == "offline":
        pytest.importorskip("tensorflow_datasets")
    notebook = run(name, tmp_path)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert re.search(PRINTED[name], text), text
    if name == "watching":
        assert sum("image/gif" in output.get("data", {}) for output in outputs) == 3


@pytest.mark.long
def test_datasets_go_out_and_in_and_are_learnt_from(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    notebook = run("datasets", tmp_path)

    def printed(start):
        return "".join(o.text for o in outputs_of(notebook, start) if o.output_type == "stream" and o.name == "stdout")

    assert (tmp_path / "data" / "cartpole" / "1.0.0" / "dataset_info.json").is_file()
    report = printed("dataset.report()")
    assert "40 episodes" in report and "no errors found" in report
    assert base64.b64decode(outputs_of(notebook, "views.return_to_go(")[-1].data["image/png"]).startswith(b"\x89PNG")
    assert "36 episodes to train on, 4 held out" in printed("dataset.split(")
    assert "(4, 32, 3)" in printed("loader.take(")
    assert float(re.search(r"student's return: ([\d.]+)", printed("student = jaxrl.train("))[1]) > 0
    assert 0 < int(re.search(r"(\d+)% of", printed("held-out actions"))[1]) <= 100
