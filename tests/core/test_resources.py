"""Cores and memory of the parts of a run: how they are written, what is refused, and what threads and processes get."""

import json
import os
import subprocess
import sys
import threading

import pytest
from helpers.refused import raises

import jaxrl
from jaxrl.core import resources
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.resources import Resources

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has it")


@pytest.fixture
def last():
    """The last core that this process may use: its index, as text, and its number."""
    here = sorted(os.sched_getaffinity(0))
    return str(len(here) - 1), {here[-1]}


@pytest.mark.parametrize(
    ("text", "indices"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("1,3", [1, 3]), ("0-1,4-5", [0, 1, 4, 5])]
)
def test_cores_as_text(text, indices):
    assert resources._indices(text) == indices


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Resources(learner="x"), "learner='x' is not a list of cores; write them as 0-3,8"),
        (Resources(actors=""), "actors='' is not a list of cores"),
        (Resources(actors="3-1"), "actors='3-1': this process may use 4 cores, numbered 0 to 3"),
        (Resources(environments="2-4"), "environments='2-4': this process may use 4 cores, numbered 0 to 3"),
        (Resources(evaluator="0"), "evaluator='0': none there"),
        (Resources(own_cores=0), "own_cores=0 must be a number from 1 to 4, the cores of this process"),
        (Resources(own_cores=5), "own_cores=5 must be a number from 1 to 4"),
        (Resources(own_cores=2, learner="1-2"), "learner='1-2': this process may use 2 cores, numbered 0 to 1"),
        (Resources(worker_memory=0.0), "worker_memory=0.0 must be more than 0 GiB"),
        (Resources(worker_memory=2.0), "worker_memory=2 GiB for each of 3 workers is more than the 4.0 GiB"),
    ],
)
def test_what_is_refused(asked, words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 9})
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**20}[name])
    (found,) = resources.problems(asked, {"evaluator": "none there"}, workers=3)
    assert words in found


def test_what_fits(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 9})
    assert resources.problems(Resources("0-3", "2,3", "0", "1", 0.1), {}, workers=3) == []
    assert resources.problems(Resources(), {"actors": "none there"}, workers=0) == []


def test_elsewhere_than_on_linux_it_is_refused(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    (found,) = resources.problems(Resources(learner="0"), {}, 0)
    assert "cores and memory can be limited only on Linux" in found
    assert resources.problems(Resources(), {}, 0) == []


def seen_in_a_thread(part):
    """The cores of a thread that is started as this part, and of a thread that this one starts."""
    seen = []

    def look():
        seen.append(os.sched_getaffinity(0))
        if len(seen) == 1:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    with resources.on(part):
        thread = threading.Thread(target=look)
        thread.start()
    thread.join()
    return seen


def test_threads_have_the_cores_of_their_part_and_all_have_their_own_again(last):
    index, core = last
    before = os.sched_getaffinity(0)
    go, waiting = threading.Event(), threading.Thread(target=lambda: go.wait())
    waiting.start()
    try:
        assert waiting.native_id is not None
        with resources.applied(Resources(learner="0", actors=index)):
            assert os.sched_getaffinity(0) == os.sched_getaffinity(waiting.native_id) == {min(before)}
            assert seen_in_a_thread("actors") == [core, core]
            assert seen_in_a_thread("evaluator") == [{min(before)}] * 2, "of which nothing was said"
            assert os.sched_getaffinity(0) == {min(before)}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(waiting.native_id) == before
        assert seen_in_a_thread("actors") == [before] * 2
    finally:
        go.set()
        waiting.join()


# Takes a core for itself, says in PLACE.json on which cores its threads may be, and keeps it until its input ends.
ALONE = """
import json, re, sys
from pathlib import Path
from jaxrl.core.errors import ConfigError
from jaxrl.core.resources import Resources, applied
import jax
jax.numpy.ones(3).block_until_ready()  # XLA has threads of its own
try:
    with applied(Resources(own_cores=1)):
        status = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
        cores = {found for text in status for found in re.findall("Cpus_allowed_list:\\t(.*)", text)}
        print(json.dumps([len(status), sorted(cores)]), flush=True)
        sys.stdin.read()
except ConfigError as error:
    print(error, flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif("len(os.sched_getaffinity(0)) < 2", reason="each of two processes has a core")
def test_no_two_processes_have_a_core_of_their_own_in_common(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    two = sorted(os.sched_getaffinity(0))[:2]
    started = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        with resources.on_cores(two):
            started.append(subprocess.Popen([sys.executable, "-c", ALONE], **pipes))
        return started[-1]

    try:
        said = [json.loads(start().stdout.readline()) for _ in range(2)]
        assert sorted(cores for _, cores in said) == [[str(core)] for core in two]
        assert min(threads for threads, _ in said) > 2, "all threads are there"
        words = "own_cores=1: only 0 of 2 cores are not reserved by other runs with own_cores"
        assert words in start().stdout.readline()
        started[0].kill()
        started[0].wait()
        assert json.loads(start().stdout.readline())[1] == said[0][1], "of one that was killed the next may have it"
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_workers_have_the_cores_and_the_memory_of_environments(last):
    import resource

    index, core = last
    recipe = jaxrl.make("gymnasium:host_probes:Counting-v0", workers=2)
    with resources.applied(Resources(environments=index, worker_memory=1.5)):
        host = recipe.build(2, 0)
    try:
        for worker in host._stepper._workers:
            assert os.sched_getaffinity(worker._process.pid) == core
            assert resource.prlimit(worker._process.pid, resource.RLIMIT_DATA)[0] == 1.5 * 2**30
    finally:
        host.close()


def test_a_worker_that_takes_more_memory_ends_the_run_and_not_the_machine():
    recipe = jaxrl.make("gymnasium:host_probes:Hungry-v0", workers=1, mebibytes=1024)
    with resources.applied(Resources(worker_memory=0.75)):
        host = recipe.build(1, 0)
    host.reset()
    for _ in range(2):
        host.step([0])
    raises(EnvironmentFailedError, "MemoryError", host.step, [0])
    host.close()


def test_threads_of_envpool_have_the_cores_of_environments(last):
    pytest.importorskip("envpool")
    index, core = last
    recipe = jaxrl.make("envpool:CartPole-v1", num_threads=2)
    before = set(os.listdir("/proc/self/task"))
    with resources.applied(Resources(environments=index)):
        host = recipe.build(2, 0)
    started = set(os.listdir("/proc/self/task")) - before
    assert len(started) >= 2 and {frozenset(os.sched_getaffinity(int(name))) for name in started} == {frozenset(core)}
    host.close()
