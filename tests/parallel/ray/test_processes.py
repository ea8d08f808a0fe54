"""Processes of one run on a Ray cluster: started, watched, ended and started again."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import clusters
from helpers.launching import scripts, until_asked
from helpers.patience import PATIENCE
from helpers.strict_json import read_json

from jaxrl.core.errors import ConfigError, JaxrlError, MissingExtraError
from jaxrl.parallel.multihost import launch, place
from jaxrl.parallel.multihost.launch import RayProcesses
from jaxrl.parallel.ray import processes

pytestmark = pytest.mark.long

LAUNCHED = Path(__file__).parents[1] / "multihost" / "launched.py"


started, cluster = clusters.fixtures()


@pytest.fixture
def program(cluster, tmp_path, monkeypatch):
    """The command that runs a script which knows its place."""
    monkeypatch.chdir(tmp_path)
    return scripts(tmp_path)


def test_each_finds_its_place_and_the_first_alone_is_heard(program, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("JAX_OF_TEST", "passed on")
    text = """
import json
names = ("JAX_OF_TEST", "JAX_PLATFORMS", "JAXRL_LAUNCHED")
found = {"place": vars(place), "variables": {name: os.environ.get(name) for name in names}}
with open(f"{place.process_id}.json", "w") as file:
    json.dump(found, file)
print("word of", place.process_id)
"""
    assert launch.run_processes(program(text), RayProcesses(2)) == 0
    found = [read_json(tmp_path / f"{index}.json") for index in range(2)]
    assert [one["place"]["process_id"] for one in found] == [0, 1]
    assert {one["place"]["num_processes"] for one in found} == {2}
    assert len({one["place"]["coordinator"] for one in found}) == 1
    expected = {"JAX_OF_TEST": "passed on", "JAX_PLATFORMS": "cpu", "JAXRL_LAUNCHED": None}
    assert all(one["variables"] == expected for one in found)
    heard = capfd.readouterr().out
    assert "word of 0\n" in heard and "word of 1" not in heard


def test_an_evaluator_is_one_more_and_hears_when_the_learner_has_ended(program, tmp_path, monkeypatch):
    text = """
import json
with open(f"{place.role}.json", "w") as file:
    json.dump({"place": vars(place), "platforms": os.environ.get("JAX_PLATFORMS")}, file)
while place.role == "evaluator" and not have_learners_ended():
    time.sleep(0.01)
open(f"{place.role}.ended", "w").close()
"""
    assert launch.run_processes(program(text), RayProcesses(1, evaluators=1)) == 0
    learner, evaluator = (read_json(tmp_path / f"{role}.json") for role in ("learner", "evaluator"))
    assert [one["place"]["process_id"] for one in (learner, evaluator)] == [0, 1]
    assert learner["place"] | {"process_id": 1} == evaluator["place"] and evaluator["place"]["num_processes"] == 1
    assert evaluator["platforms"] == "cpu" and (tmp_path / "evaluator.ended").exists()


def test_where_one_fails_all_end_and_are_started_again(program, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.1)
    text = """
with open(f"{place.process_id}.tries", "a") as file:
    file.write(" ".join(sys.argv[1:]) + ";")
if sys.argv[1:] == ["first"]:
    if place.process_id == 0:
        time.sleep(600)
    print("cannot go on", file=sys.stderr)
    sys.exit(3)
"""
    assert launch.run_processes([*program(text), "first"], RayProcesses(2, restarts=1), ["again"]) == 0
    assert (tmp_path / "1.tries").read_text() == "first;first again;"
    said = capfd.readouterr().err
    assert "process 1: cannot go on" in said and "process 0: killed 0.1 s after another process had failed" in said
    assert "(restart 1 of 1)" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_end_the_run_for_good(program, started, tmp_path, number):
    """From a process of its own, whose Ray is not connected yet."""
    command = program(until_asked(number) + "time.sleep(600)")
    how = "from jaxrl.parallel.multihost import launch\n"
    how += f"raise SystemExit(launch.run_processes({command}, launch.RayProcesses(2, restarts=3)))"
    env = os.environ | {"RAY_ADDRESS": started.get_runtime_context().gcs_address}
    process = subprocess.Popen([sys.executable, "-c", how], env=env)
    try:
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait() == 128 + number
    finally:
        process.kill()
        process.wait()
    assert sorted(path.name for path in tmp_path.glob("*.asked")) == ["0.asked", "1.asked"]


def test_a_restart_that_finds_no_place_ends_with_the_first_code(program, monkeypatch, capfd):
    text = "sys.exit(3)"
    command = program(text)
    starts = []

    def start(*given):
        starts.append(given)
        if len(starts) > 1:
            raise ConfigError("ray: no place")
        return before(*given)

    before = processes.start
    monkeypatch.setattr(processes, "start", start)
    assert launch.run_processes(command, RayProcesses(1, restarts=2)) == 3
    assert len(starts) == 3 and capfd.readouterr().err.count("error: ray: no place") == 2


def test_a_process_ends_with_its_actor(program, started, tmp_path, capfd, monkeypatch):
    """As where a machine is lost: the run fails."""
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.1)
    text = """
open(f"{place.process_id}.pid", "w").write(str(os.getpid()))
os.rename(f"{place.process_id}.pid", f"{place.process_id}.ready")
time.sleep(600)
"""
    made, held = [], processes._Held
    monkeypatch.setattr(processes, "_Held", lambda *given: made.append(given[1]) or held(*given))

    def lose():
        while len(list(tmp_path.glob("*.ready"))) < 2:
            time.sleep(0.02)
        started.kill(made[1])

    command = program(text)
    threading.Thread(target=lose, daemon=True).start()
    assert launch.run_processes(command, RayProcesses(2)) == 1
    assert "process 1: lost together with its Ray actor" in capfd.readouterr().err
    for index in range(2):
        pid = int((tmp_path / f"{index}.ready").read_text())
        while _runs(pid):
            time.sleep(0.02)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" not in status.read_text()


def test_what_the_cluster_has_not_or_cannot_start_is_told(program, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "START_TIMEOUT", 1.0)
    with pytest.raises(ConfigError, match="3 processes .* 2 CPUs .* free"):
        launch.run_processes(program(""), RayProcesses(3))
    with pytest.raises(ConfigError, match="2 processes .* an evaluator"):
        launch.run_processes(program(""), RayProcesses(2, evaluators=1))
    monkeypatch.setattr(processes, "START_TIMEOUT", float(PATIENCE))
    monkeypatch.setattr(processes.os, "getcwd", lambda: str(tmp_path / "gone"))
    with pytest.raises(JaxrlError, match="(?s)process 0 .*gone"):
        launch.run_processes([sys.executable], RayProcesses(1))


def test_numbers_that_do_not_fit(monkeypatch):
    found = launch.problems(RayProcesses(0, 0, 0, -1))
    words = ("count=0 must be at least 1", "cpus=0 must be at least 1", "gpus=-1 must be at least 0")
    assert found == [f"ray: {what}" for what in words]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [problem] = launch.problems(RayProcesses(2, gpus=1))
    assert "gpus=1 would be idle with JAX_PLATFORMS=cpu" in problem
    with monkeypatch.context() as patch:  # with which an evaluator was started, and reads the same command
        patch.setattr(place, "_own", [place.Place("127.0.0.1:1", 2, 2, evaluators=1)])
        assert launch.problems(RayProcesses(2, gpus=1, evaluators=1)) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'jaxrl\[ray\]'"):
        launch.run_processes(["true"], RayProcesses(2))


def test_a_run_whose_process_is_killed_is_started_again(program, tmp_path, capfd):
    """What it comes to is what it does on one machine: tests/parallel/multihost/test_launch.py."""
    words = [sys.executable, str(LAUNCHED), "ray:2", str(tmp_path)]
    assert launch.run_processes(words, RayProcesses(2, restarts=1)) == 0
    heard = capfd.readouterr()
    assert "error: process 1 was ended by SIGKILL" in heard.err and "(restart 1 of 1)" in heard.err
    assert heard.out.count("process 0 of 2: finished") == 1
    record = read_json(tmp_path / "run" / "result.json")
    assert record["stopped"] == "finished" and 0 < record["session_steps"] < record["total_steps"]
