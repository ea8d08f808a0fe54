import pytest

from jaxrl.run import loop


@pytest.fixture
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(loop, "_CHUNK_SECONDS", 0.0)
