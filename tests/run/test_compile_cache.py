"""Compiled programs that are kept between processes."""

import json
import os
import shutil
import time
import warnings
import zlib
from pathlib import Path

import jax
import pytest
from helpers.processes import environment, python

from jaxrl.parallel.threads import VARIABLES
from jaxrl.run import compile_cache

# One command line in a process of its own: what it compiled and what it found in the cache.
COMMAND = """
import collections, json, os, signal, sys
import jax
import jaxrl
from jaxrl.run.callbacks import FunctionCallback
from helpers.programs import ALGORITHMS, ENV, ROWS

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))

def interrupt(moment):
    if sys.argv[2] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)

every = 2 * ROWS
result = jaxrl.train(
    ALGORITHMS["ppo"], ENV, total_steps=4 * ROWS, num_envs=8, seed=0, run_dir=sys.argv[1],
    callbacks=[FunctionCallback(interrupt)],
    evaluate_every=every, checkpoint_every=every, evaluation_episodes=8, progress=False,
)
print(json.dumps(events | {"stopped": result.stopped, "steps": result.total_steps // ROWS}))
"""


def run(folder, run_dir, how="whole", **more):
    more |= {"JAXRL_CACHE": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1.0"}
    variables = environment("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", **more)
    done = python("-c", COMMAND, run_dir, how, env=variables)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.long
def test_the_second_start_and_a_resume_compile_nothing(tmp_path):
    first, _ = run(tmp_path / "cache", tmp_path / "first")
    assert first["cache_misses"] > 3 and first["stopped"] == "finished"
    second, said = run(tmp_path / "cache", tmp_path / "second", "interrupted")
    assert second["stopped"] == "interrupted" and second["steps"] == 2
    assert "cache_misses" not in second, said
    resumed, said = run(tmp_path / "cache", tmp_path / "second")
    assert resumed["stopped"] == "finished" and resumed["steps"] == 4
    assert "cache_misses" not in resumed, said
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "others can read or write what this user runs"


def entries(folder, *names, content=b"a program"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}-cache").write_bytes(zlib.compress(content))
    return [folder / f"{name}-cache" for name in names]


def test_what_is_damaged_is_discarded_and_the_rest_is_looked_at_once(tmp_path, monkeypatch):
    whole, cut, garbage = entries(tmp_path, "whole", "cut", "garbage")
    cut.write_bytes(cut.read_bytes()[:-3])
    garbage.write_bytes(b"\0" * 100)
    time.sleep(0.02)  # so that the times of the files differ
    compile_cache._discard_damaged(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == [whole.name]
    read, decompresses = [], compile_cache._decompresses
    monkeypatch.setattr(compile_cache, "_decompresses", lambda path: read.append(path.name) or decompresses(path))
    (new,) = entries(tmp_path, "new")
    compile_cache._discard_damaged(tmp_path)
    assert read == [new.name]
    whole.write_bytes(b"\1" * len(whole.read_bytes()))
    os.utime(whole, ns=(1, 1))
    compile_cache._discard_damaged(tmp_path)
    assert [path.name for path in tmp_path.glob("*-cache")] == [new.name]


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    old, used, new = entries(tmp_path, "old", "used", "new")
    for seconds, path in ((1_000, old), (3_000, used), (2_000, new)):
        os.utime(path, (seconds, seconds))
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 2 * old.stat().st_size)
    compile_cache._discard_damaged(tmp_path)
    assert {path.name for path in tmp_path.glob("*-cache")} == {used.name, new.name}


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process in which nobody set anything; what is set is set back."""
    for name in (*compile_cache._JAX_VARIABLES, *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_tried", False)
    monkeypatch.setattr(compile_cache, "_root", None)
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    with warnings.catch_warnings():
        yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compile_cache.compilation_cache.reset_cache()


def test_it_is_for_this_processor_and_asked_for_once(fresh, monkeypatch):
    folder = compile_cache.keep_compiled_programs()
    assert folder.parent == fresh and jax.config.jax_compilation_cache_dir == str(folder)
    assert compile_cache.keep_compiled_programs() is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
    assert compile_cache._processor(threads=2) != folder.name


def test_programs_for_another_number_of_threads_are_kept_apart(fresh, monkeypatch):
    """JAX's key does not tell them apart, and XLA splits loops for the threads that it has."""
    compile_cache.keep_apart(threads=1)
    assert jax.config.jax_compilation_cache_dir is None and not fresh.exists(), "nothing is kept yet"
    monkeypatch.setenv("PJRT_NPROC", "3")
    three = compile_cache.keep_compiled_programs()
    compile_cache.keep_apart(threads=1)
    one = Path(jax.config.jax_compilation_cache_dir)
    assert one != three and one.parent == three.parent == fresh
    jax.jit(lambda x: x * 7.0)(2.0)
    assert list(one.glob("*-cache")) and not list(three.glob("*-cache"))
    compile_cache.keep_apart(threads=3)
    assert Path(jax.config.jax_compilation_cache_dir) == three
    full(fresh, monkeypatch)
    compile_cache.keep_apart(threads=1)
    assert jax.config.jax_compilation_cache_dir is None


def test_it_can_be_switched_off_and_leaves_what_the_user_set(fresh, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", "/tmp/mine")
    assert compile_cache.keep_compiled_programs() is None
    assert jax.config.jax_compilation_cache_dir == "/tmp/mine"
    jax.config.update("jax_compilation_cache_dir", None)
    for name, value in (("JAXRL_CACHE", "off"), ("JAX_ENABLE_COMPILATION_CACHE", "false")):
        with monkeypatch.context() as other:
            other.setenv(name, value)
            other.setattr(compile_cache, "_tried", False)
            assert compile_cache.keep_compiled_programs() is None
    assert jax.config.jax_compilation_cache_dir is None and not fresh.exists()


def unwritable(folder, monkeypatch):
    folder.write_text("a file where the folder should be")


def full(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10, 10))


def open_to_others(folder, monkeypatch):
    ours = folder / compile_cache._processor(compile_cache.cores())
    ours.mkdir(parents=True)
    ours.chmod(0o777)


def that_fails(folder, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", refuse)


def of_nobody(folder, monkeypatch):
    monkeypatch.delenv("JAXRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # which is none, and not the working directory

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compile_cache.Path, "home", home)


@pytest.mark.parametrize("spoil", [unwritable, full, open_to_others, that_fails, of_nobody])
def test_a_folder_that_cannot_be_used_costs_one_warning(fresh, spoil, monkeypatch):
    spoil(fresh, monkeypatch)
    with pytest.warns(RuntimeWarning, match="JAXRL_CACHE") as found:
        assert compile_cache.keep_compiled_programs() is None
    assert len(found) == 1 and jax.config.jax_compilation_cache_dir is None


@pytest.mark.long
def test_a_damaged_entry_is_compiled_again(fresh):
    folder = Path(compile_cache.keep_compiled_programs())
    assert float(jax.jit(lambda x: x * 3.0)(2.0)) == 6.0
    (kept,) = folder.glob("jit__lambda*-cache")
    kept.write_bytes(b"garbage")
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
        assert float(jax.jit(lambda x: x * 3.0)(2.0)) == 6.0
    assert said == []
