import signal

import pytest

from jaxrl.run.loop import run_loop


@pytest.fixture
def one_iteration_chunks(monkeypatch):
    monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 0.0)


@pytest.fixture
def hears_ctrl_c():
    """Let SIGINT interrupt, which a shell's background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
