"""ONNX in the environment that docs/export.md describes, made from the registry: jax2onnx does not go beside ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.export import onnx_file

ROOT = Path(__file__).parents[2]


@pytest.mark.learning  # it installs packages
def test_in_an_environment_of_its_own_files_act_as_the_run_does(tmp_path):
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("needs uv")
    (tmp_path / "onnx.txt").write_text(onnx_file.OVERRIDE + "\n")
    python = tmp_path / "environment" / "bin" / "python"
    with_tests = ["jax2onnx", "onnxruntime", "pytest", "hypothesis"]
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment"],
        [uv, "pip", "install", "--quiet", "--python", python, "--overrides", tmp_path / "onnx.txt", ROOT, *with_tests],
        [python, "-m", "pytest", "-q", "-m", "long", "-k", "onnx_acts", ROOT / "tests" / "export" / "test_files.py"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout, done.stdout
