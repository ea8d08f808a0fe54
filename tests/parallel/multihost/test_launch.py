"""Processes of this machine: started, watched, ended and started again. Most of them are shell-like scripts here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers.launching import scripts, until_asked
from helpers.patience import PATIENCE
from helpers.processes import environment, python
from helpers.programs import ENV, PPO, ROWS, assert_equal
from helpers.strict_json import read_json

import jaxrl
from jaxrl.core.errors import ConfigError
from jaxrl.parallel.multihost import launch, place
from jaxrl.parallel.multihost.launch import Cluster, Here, Processes, RayProcesses
from jaxrl.run.directory import checkpoint
from jaxrl.run.directory.follow import follow
from jaxrl.run.loggers import read_metrics

LAUNCHED = Path(__file__).with_name("launched.py")
EVALUATED = Path(__file__).with_name("evaluated.py")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The command that runs a script which knows its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return scripts(tmp_path)


def told(folder, count=2):
    """What the processes wrote about themselves."""
    return [read_json(folder / f"{index}.json") for index in range(count)]


TELL = """
import json
found = {"place": vars(place), "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []}
found |= {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "place_passed_on": "JAXRL_LAUNCHED" in os.environ}
found |= {"role": place.role, "platforms": os.environ.get("JAX_PLATFORMS")}
with open(f"{place.process_id}.json", "w") as file:
    json.dump(found, file)
print("word of", place.process_id)
"""


def test_each_finds_its_place_and_the_first_alone_is_heard(program, tmp_path, capfd):
    assert launch.run_processes(program(TELL), Processes(3)) == 0
    found = told(tmp_path, 3)
    assert [one["place"]["process_id"] for one in found] == [0, 1, 2]
    assert {one["place"]["num_processes"] for one in found} == {3}
    coordinators = {one["place"]["coordinator"] for one in found}
    assert len(coordinators) == 1 and coordinators.pop().startswith("127.0.0.1:")
    assert not any(one["place_passed_on"] for one in found), "what these start is no part of the run"
    assert capfd.readouterr().out == "word of 0\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not say")
def test_cores_are_divided(program, tmp_path):
    before = os.sched_getaffinity(0)
    assert launch.run_processes(program(TELL), Processes(2)) == 0
    first, second = (one["cores"] for one in told(tmp_path))
    assert sorted({*first, *second}) == sorted(before) == sorted(os.sched_getaffinity(0))
    assert len(before) == 1 or (not {*first} & {*second} and abs(len(first) - len(second)) <= 1)


@pytest.fixture
def four_gpus(program, monkeypatch):
    monkeypatch.setattr(launch.local.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_divided_or_refused(program, tmp_path, monkeypatch):
    assert launch.run_processes(program(TELL), Processes(2)) == 0
    assert [one["gpus"] for one in told(tmp_path)] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"4 GPUs .*4,5,6,7.* count=3;"):
        launch.run_processes(program(TELL), Processes(3))
    # Each process reads the command again, with its share of the GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert launch.problems(Processes(2)) != []
    monkeypatch.setattr(place, "_own", [place.Place("127.0.0.1:1", 2, 0)])
    assert launch.problems(Processes(2)) == []
    monkeypatch.setattr(place, "_own", [])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert launch.problems(Processes(3)) == []


@pytest.mark.usefixtures("four_gpus")
def test_an_evaluator_is_one_more_and_no_gpu_is_its(program, tmp_path):
    assert launch.run_processes(program(TELL), Processes(2, evaluators=1)) == 0
    found = told(tmp_path, 3)
    assert [one["role"] for one in found] == ["learner", "learner", "evaluator"]
    assert [one["gpus"] for one in found] == ["4,5", "6,7", ""]
    assert [one["platforms"] for one in found] == [None, None, "cpu"]
    places = [one["place"] for one in found]
    assert [each["process_id"] for each in places] == [0, 1, 2]
    assert {(each["num_processes"], each["evaluators"]) for each in places} == {(2, 1)}
    first = places[0]["start"]
    assert len(first) == 16 and {each["start"] for each in places} == {first}
    assert launch.run_processes(program(TELL), Processes(1)) == 0
    assert told(tmp_path, 1)[0]["place"]["start"] != first


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not say")
def test_an_evaluator_has_its_share_of_the_cores(program, tmp_path):
    assert launch.run_processes(program(TELL), Processes(1, evaluators=1)) == 0
    learner, evaluator = (one["cores"] for one in told(tmp_path))
    assert sorted({*learner, *evaluator}) == sorted(os.sched_getaffinity(0))
    assert len(os.sched_getaffinity(0)) == 1 or max(learner) < min(evaluator)


def test_where_one_fails_all_end_and_its_last_words_are_shown(program, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.1)
    text = "if place.process_id == 0: time.sleep(600)\nprint('cannot go on', file=sys.stderr)\nsys.exit(3)"
    assert launch.run_processes(program(text), Processes(2)) == 3
    said = capfd.readouterr().err
    assert "process 1: cannot go on" in said and "process 0: killed 0.1 s after another process had failed" in said


def test_a_killed_process_is_named(program, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.1)
    text = "if place.process_id == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    assert launch.run_processes(program(text), Processes(2)) == 128 + signal.SIGKILL
    assert "error: process 1 was ended by SIGKILL" in capfd.readouterr().err


def test_where_the_evaluator_fails_learners_are_asked_to_save(program, tmp_path, capfd):
    learner = until_asked(signal.SIGTERM) + "time.sleep(600)"
    text = f"""
if place.role == "evaluator":
    while not os.path.exists("0.ready"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
{learner}"""
    assert launch.run_processes(program(text), Processes(1, evaluators=1)) == 128 + signal.SIGKILL
    assert (tmp_path / "0.asked").exists()
    assert capfd.readouterr().err == "error: the evaluator was ended by SIGKILL\n"


def test_where_a_learner_fails_the_evaluator_ends_at_once(program, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_PERIOD", PATIENCE)
    text = f"""
if place.role == "learner":
    while not os.path.exists("1.ready"):
        time.sleep(0.01)
    sys.exit(3 if sys.argv[1:] == ["first"] else 0)
if sys.argv[1:] == ["first"]:
    {until_asked(signal.SIGTERM).replace(chr(10), chr(10) + 4 * " ")}
    time.sleep(600)
"""
    how = Processes(1, restarts=1, evaluators=1)
    assert launch.run_processes([*program(text), "first"], how, ["again"]) == 0
    assert (tmp_path / "1.asked").exists()
    said = capfd.readouterr().err
    assert said == "starting all processes again (restart 1 of 1)\n"


def test_an_evaluator_hears_when_no_checkpoint_comes_any_more(program, tmp_path):
    text = """
if place.role == "learner":
    open("learner.ended", "w").close()
    sys.exit()
while not have_learners_ended():
    time.sleep(0.01)
assert os.path.exists("learner.ended")
open("evaluator.ended", "w").close()
"""
    assert launch.run_processes(program(text), Processes(1, evaluators=1)) == 0
    assert (tmp_path / "evaluator.ended").exists()


def test_learners_have_their_time_to_save_when_a_signal_has_ended_the_evaluator(program, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_PERIOD", 0.1)
    text = """
def save(number, frame):
    while evaluator_runs():
        time.sleep(0.01)
    time.sleep(1)
    open("saved", "w").close()
    sys.exit(128 + number)
def evaluator_runs():
    try:
        os.kill(int(open("pid").read()), 0)
    except ProcessLookupError:
        return False
    return True
if place.role == "evaluator":
    with open("pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.new", "pid")
    time.sleep(600)
signal.signal(signal.SIGTERM, save)
while not os.path.exists("pid"):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
    assert launch.run_processes(program(text), Processes(1, restarts=1, evaluators=1)) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_a_signal_that_cuts_the_last_evaluation_short_is_told(program):
    text = """
if place.role == "evaluator":
    while not have_learners_ended():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""
    assert launch.run_processes(program(text), Processes(1, restarts=1, evaluators=1)) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("restarts", "code", "tries"), [(0, 1, 1), (1, 1, 2), (5, 0, 3)])
def test_all_are_started_again_so_many_times(program, tmp_path, capfd, restarts, code, tries):
    text = """
with open(f"{place.process_id}.tries", "a") as file:
    file.write(" ".join(sys.argv[1:]) + ";")
sys.exit(0 if open(f"{place.process_id}.tries").read().count(";") == 3 else 1)
"""
    assert launch.run_processes([*program(text), "first"], Processes(2, restarts), ["again"]) == code
    words = ";".join(["first", "first again", "first again"][:tries]) + ";"
    assert [(tmp_path / f"{index}.tries").read_text() for index in range(2)] == [words] * 2
    assert capfd.readouterr().err.count("starting all processes again") == tries - 1


def test_wrong_settings_are_not_tried_again(program, tmp_path):
    text = "open(f'{place.process_id}.tries', 'a').write('x')\nsys.exit(2)"
    assert launch.run_processes(program(text), Processes(2, restarts=3)) == 2
    assert (tmp_path / "0.tries").read_text() == "x"


@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)]
)
def test_signals_are_passed_on_and_end_the_run_for_good(program, tmp_path, number, ignored):
    text = (
        until_asked(number)
        + f"""
while place.process_id == 0 and not os.path.exists("1.ready"):
    time.sleep(0.01)
if place.process_id == 0:
    os.kill(os.getppid(), {int(number)})
time.sleep(600)
"""
    )
    own = signal.getsignal(number)
    before = signal.SIG_IGN if ignored else own  # as a shell has it for what it runs in the background
    try:
        signal.signal(number, before)
        assert launch.run_processes(program(text), Processes(2, restarts=3)) == 128 + number
        assert sorted(path.name for path in tmp_path.glob("*.asked")) == ["0.asked", "1.asked"]
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, own)


def test_none_outlives_the_process_that_started_it(program, tmp_path):
    text = """
def ask(number, frame):
    os.rename(f"{place.process_id}.ready", f"{place.process_id}.ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, ask)
open(f"{place.process_id}.ready", "w").close()
time.sleep(600)
"""
    start = f"from jaxrl.parallel.multihost import launch\nlaunch.run_processes({program(text)}, launch.Processes(2))"
    process = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        for name in ("ready", "ended"):
            until = time.monotonic() + PATIENCE
            while len(list(tmp_path.glob(f"*.{name}"))) < 2:
                assert time.monotonic() < until, f"{name}: {sorted(tmp_path.iterdir())}"
                time.sleep(0.02)
            process.kill()


# --- how it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("here", Here()),
        ("cluster", Cluster()),
        ("processes", Processes()),
        ("processes:4", Processes(4)),
        ("processes:4:restarts=3", Processes(4, 3)),
        ("processes:restarts=3:count=4", Processes(4, 3)),
        ("processes:2:evaluators=1", Processes(2, evaluators=1)),
        ("ray", RayProcesses()),
        ("ray:4:restarts=3:cpus=8:gpus=1", RayProcesses(4, 3, 8, 1)),
        ("ray:4:gpus=1:evaluators=1", RayProcesses(4, gpus=1, evaluators=1)),
    ],
)
def test_ways_as_text(text, how):
    assert launch.parse(text) == how


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("processs:4", "processes"),
        ("here:2", "too many settings"),
        ("processes:4:3:1:2", "too many settings"),
        ("processes:4:count=3", "'count=3'"),
        ("processes:many", "count='many' must be a whole number"),
        ("processes:cores=4", "'cores=4'"),
    ],
)
def test_ways_that_there_are_not(text, words):
    with pytest.raises(ConfigError, match=words):
        launch.parse(text)


def test_numbers_that_do_not_fit():
    found = launch.problems(Processes(0, -1))
    assert found == ["processes: count=0 must be at least 1", "processes: restarts=-1 must be at least 0"]
    assert launch.problems(Processes(None)) == ["processes: count=None must be a whole number"]  # ty: ignore[invalid-argument-type]
    found = launch.problems(Processes("4", 2.5))  # ty: ignore[invalid-argument-type]
    assert found == ["processes: count='4' must be a whole number", "processes: restarts=2.5 must be a whole number"]
    [found] = launch.problems(Processes(2, evaluators=2))
    assert found.startswith("processes: evaluators=2 must be 0 or 1")
    assert launch.problems(Processes(2, evaluators=-1)) == ["processes: evaluators=-1 must be at least 0"]
    assert launch.problems(Processes(1, evaluators=1)) == []
    with pytest.raises(ConfigError, match="must be a whole number"):
        jaxrl.launch(Processes(True))
    with pytest.raises(ConfigError, match="must be a whole number"):
        launch.parse("processes:" + "9" * 5000)


def test_from_python_this_process_is_the_default_and_a_session_cannot_be_started_again(monkeypatch):
    assert jaxrl.launch() == 1
    with pytest.raises(ConfigError, match="cluster, processes:COUNT"):
        jaxrl.launch(4)  # ty: ignore[invalid-argument-type]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match="an interactive session"):
        jaxrl.launch("processes:2")


@pytest.mark.parametrize("words", [["-"], ["-B"], []])
def test_a_program_that_python_reads_from_its_input_cannot_be_started_again(words):
    text = "from jaxrl.parallel.multihost import launch\nlaunch.launch('processes:2')\nprint('trained')"
    ended = python(*words, input=text, code=1)
    assert ended.stdout == "" and "run the program from a file" in ended.stderr


# --- a run ---------------------------------------------------------------------------------------------------------


def launched(program, how, folder):
    """A program that launches itself `how`, once it has ended."""
    return python(program, how, folder, env=environment())


@pytest.mark.long
def test_a_run_whose_evaluator_is_killed_is_started_again_and_wholly_evaluated(tmp_path):
    ended = launched(EVALUATED, "processes:1:restarts=1:evaluators=1", tmp_path)
    assert "error: the evaluator was ended by SIGKILL" in ended.stderr and "(restart 1 of 1)" in ended.stderr
    assert ended.stdout == "a learner: finished\n", "what comes after the training is the learners' alone"
    run = tmp_path / "run"
    rows = read_metrics(run / "evaluations.jsonl")
    assert [row["step"] for row in rows] == checkpoint.complete_steps(run / "checkpoints") and len(rows) >= 4
    assert (tmp_path / "played").stat().st_size == len(rows) + 1, "the first one was not played again"
    list(follow(run, episodes=4, out=tmp_path / "followed.jsonl"))
    assert read_metrics(tmp_path / "followed.jsonl") == rows


def test_a_run_whose_process_is_killed_is_started_again_and_is_the_unbroken_one(tmp_path):
    ended = launched(LAUNCHED, "processes:2:restarts=1", tmp_path)
    assert "error: process 1 was ended by SIGKILL" in ended.stderr and "(restart 1 of 1)" in ended.stderr
    assert (tmp_path / "killed").exists() and ended.stdout.count("process 0 of 2: finished") == 1
    record = read_json(tmp_path / "run" / "result.json")
    assert record["stopped"] == "finished" and 0 < record["session_steps"] < record["total_steps"] == 8 * ROWS
    settings = {"total_steps": 8 * ROWS, "evaluate_every": 0, "evaluation_episodes": 4, "seed": 3, "progress": False}
    one = jaxrl.train(PPO, ENV, topology=jaxrl.Anakin(num_envs=8, devices=2), **settings)
    assert one.evaluation.return_mean == record["evaluation"]["return_mean"]
    state, _, _ = checkpoint.restore(tmp_path / "run" / "checkpoints", one.state)
    assert_equal(one.state, state, 1e-5)
    assert jax.process_count() == 1
