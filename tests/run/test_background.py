"""What is made ready in threads while a run begins."""

import dataclasses
import sys
import threading

import jax
import pytest
from helpers import programs
from helpers.patience import PATIENCE
from helpers.programs import PPO, ROWS, assert_equal
from helpers.refused import raises

from jaxrl.parallel.program import Program
from jaxrl.run.loop import background, evaluating
from jaxrl.run.loop.background import BackgroundTask, import_later_modules

OURS = ("_chunk", "_init", "play", "policy_at")


def train(**settings):
    return programs.train(total_steps=2 * ROWS, evaluate_every=0, evaluation_episodes=8, **settings)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "background"]


@pytest.fixture
def compiled():
    """The name of every whole program that is compiled, and whether in a background thread."""
    found = []

    def took(event, seconds, *, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            name = fun_name.removeprefix("jit(").removesuffix(")")
            found.extend([(name, threading.current_thread().name == "background")] if name in OURS else [])

    jax.monitoring.register_event_duration_secs_listener(took)
    yield found
    jax.monitoring.unregister_event_duration_listener(took)


def test_it_works_in_a_thread_and_keeps_its_errors():
    names, go = [], threading.Event()
    first = BackgroundTask(lambda: go.wait(PATIENCE) and names.append(threading.current_thread().name))
    assert not names and len(threads()) == 1
    go.set()
    first.wait()
    first.wait()
    assert names == ["background"] and not threads()
    failed = BackgroundTask(lambda: 1 // 0)
    failed.wait()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert BackgroundTask(lambda: 3).result() == 3


def test_imports_that_are_missing_are_left_to_who_needs_them(monkeypatch):
    monkeypatch.setattr(background, "_LATER", ("no_such_module", "this"))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    import_later_modules()
    assert "this" in sys.modules and "no_such_module" not in sys.modules


@pytest.mark.long
def test_what_a_run_compiles_is_compiled_once_and_side_by_side(compiled, tmp_path):
    train(algo=dataclasses.replace(PPO, epochs=3), run_dir=tmp_path / "run")
    assert sorted(compiled) == [("_chunk", True), ("_init", False), ("play", True), ("policy_at", True)]
    assert not threads()


@pytest.mark.long
def test_an_evaluation_beside_the_run_compiles_there(compiled):
    train(algo=dataclasses.replace(PPO, epochs=5), async_evaluation=True)
    assert sorted(name for name, _ in compiled) == sorted(OURS)
    assert not threads()


def test_what_fails_in_the_background_is_done_where_it_is_needed(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no")

    whole = train()
    monkeypatch.setattr(Program, "compile_chunk", fail)
    monkeypatch.setattr(evaluating, "compile_evaluation", fail)
    assert_equal(train().state, whole.state)


def test_nothing_is_left_where_the_beginning_fails(monkeypatch):
    begun = threading.Event()

    def slow(*_, **__):
        begun.wait(PATIENCE)

    def fail(*_, **__):
        begun.set()
        raise ValueError("no beginning")

    monkeypatch.setattr(Program, "compile_chunk", slow)
    monkeypatch.setattr(Program, "start", fail)
    raises(ValueError, "no beginning", train)
    assert not threads()
