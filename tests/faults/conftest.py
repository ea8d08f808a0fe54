import pytest

from jaxrl.run.loop import run_loop


@pytest.fixture
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)
