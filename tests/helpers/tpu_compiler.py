"""The compiler for TPUs, where `make test-rest` has installed it."""

import os
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / ".venv" / "libtpu" / "libtpu" / "libtpu.so"


@pytest.fixture
def tpu_compiler(monkeypatch):
    """Lets JAX find it; nothing of it stays in the environment of other tests' processes."""
    if not LIBRARY.exists() and "TPU_LIBRARY_PATH" not in os.environ:
        pytest.skip("the compiler for TPUs is not installed; make test-rest installs it")
    if "TPU_LIBRARY_PATH" not in os.environ:
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(LIBRARY))
