"""docs/systems.md and systems.toml against the code: every row's tests exist, and its commands begin."""

import ast
import functools
import re
import shlex
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from helpers.systems import CHECKS, COMMANDS, LINES, ROWS, write_datasets

import jaxrl
from jaxrl.cli import main, multihost, sweep
from jaxrl.parallel.multihost import launch
from jaxrl.run import training
from jaxrl.run.directory import follow, loading
from jaxrl.run.directory.run_directory import RunDirectory
from jaxrl.run.loop.run_loop import Loop
from jaxrl.run.recording import replay_export

ROOT = Path(__file__).parents[1]
ABSENT = re.compile(r"\*\*not (yet|carried over)\*\*(, because )?")


def state(row):
    """Return "" if a row holds, or why it does not: "yet" or "carried over"."""
    found = ABSENT.match(row[1])
    return found.group(1) if found else ""


def test_every_row_holds_or_says_why_not():
    for row in ROWS:
        what, here, how = row
        if state(row):
            assert how == "" and (state(row) == "yet" or ABSENT.match(here).group(2)), f"{what}: because of what?"
        else:
            words, lines = set(how.strip("`").split()), CHECKS[what]["commands"]
            begun = how.startswith("`jaxrl.") or any(words <= set(line.split()) for line in lines)
            assert here and begun and CHECKS[what]["tests"], f"{what}: no command or no test"
    assert list(CHECKS) == [row[0] for row in ROWS if not state(row)]


@functools.cache
def defined_in(path):
    """Return the names of the functions of a file, without importing it."""
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    for name in (name for check in CHECKS.values() for name in check["tests"]):
        path, _, test = name.partition("::")
        assert test.startswith("test_") and test in defined_in(path), name


def test_commands_of_several_devices_run_on_a_machine_with_one():
    several = [line for line in LINES if re.search(r"-devices [2-9]", line)]
    assert several and all(line.startswith("JAX_NUM_CPU_DEVICES=4 ") for line in several), several


# --- the commands --------------------------------------------------------------------------------------------------


class Began(Exception):
    """Nothing was wrong with the command line."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the commands read: two datasets, and the metrics of a run."""
    write_datasets(tmp_path)
    with RunDirectory(tmp_path / "runs" / "cartpole", {"seed": 0}) as run:
        run.metrics_jsonl.write_text('{"step": 1, "train/return_mean": 1.0}\n{"step": 2, "train/return_mean": 2.0}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def begun(folder, monkeypatch):
    """Return a function that runs a command until a run would begin or be read, or the command ends well."""

    def begin(*_, **__):
        raise Began

    monkeypatch.setattr(Loop, "train", begin)  # after all that is checked before the first compile
    monkeypatch.setattr("jaxrl.sweeps.sweep.train_many", begin)
    monkeypatch.setattr("jaxrl.sweeps.tune._Training", begin)
    monkeypatch.setattr("jaxrl.sweeps.pbt.train_many", begin)
    monkeypatch.setattr("jaxrl.sweeps.tune.side_by_side", begin)
    monkeypatch.setattr(sweep, "launch", begin)
    for module in (loading, replay_export):
        monkeypatch.setattr(module, "load_run", begin)
    monkeypatch.setattr(follow, "follow", begin)
    monkeypatch.setattr(launch, "run_processes", begin)
    join = multihost.join
    monkeypatch.setattr(multihost, "join", lambda run: begin() if run["distributed"] else join(run))
    assert training.Loop is Loop and jax.device_count() == 4  # JAX has started: a command cannot divide the CPU anew

    def run(words):
        try:
            return main.main(words) == 0
        except Began:
            return True

    return run


@pytest.mark.long  # makes the environments and checks all that is checked before anything is compiled
def test_every_command_begins(begun, capsys):
    wrong = []
    for number, command in enumerate(COMMANDS):
        words = shlex.split(command)[1:]
        words = [f"runs/{number}" if before == "--run-dir" else word for before, word in pairwise(["", *words])]
        began = begun(words)
        said = capsys.readouterr().err
        wrong += [] if began else [f"{command}: {said}"]
    assert wrong == []


@pytest.mark.parametrize(
    "wrong",
    ["jaxrl train ppo --env gymnax:CartPole-v1 --total-steps 10 --lagg 1", "jaxrl train ppo --env gymnax:CartPole-v1"],
)
def test_a_wrong_command_does_not(begun, wrong):
    assert not begun(shlex.split(wrong)[1:])


@pytest.mark.long
def test_a_run_tells_of_its_replay_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    algo = jaxrl.DQN(min_size=32, batch_size=16, replay_ratio=0.25)
    result = jaxrl.train(algo, "gymnax:CartPole-v1", total_steps=256, num_envs=4, evaluation_episodes=4, progress=False)
    found = [row for row in result.metrics if row.get("train/updates")]
    made, steps_at = 0.0, [0, *(row["step"] for row in result.metrics if "train/updates" in row)]
    for row in found:  # each of the means over its updates, of which there is one for the four steps of an iteration
        updates = row["train/updates"]
        made, middle = made + updates, (updates - 1) / 2
        told = {name.removeprefix("update/replay_"): value for name, value in row.items() if "/replay_" in name}
        assert told["inserted"] == row["step"] - 4 * middle and told["sampled"] == 16 * (made - middle)
        assert told["items"] < told["inserted"], "the last observation of an episode begins no transition"
        assert 0 < told["samples_per_insert"] <= told["sampled"] / told["inserted"] + 0.1
        assert 1 <= told["times_sampled"] <= told["sampled"]
        assert 0 <= told["age_steps"] <= 64 and 0 <= told["age_updates"] <= 57 and row["steps_per_second"] > 0
        assert row["inserts_per_second"] == row["steps_per_second"]
        steps = row["step"] - max(step for step in steps_at if step < row["step"])
        assert row["samples_per_second"] == pytest.approx(16 * updates * row["steps_per_second"] / steps)
    assert made == (256 - 32) / 4 + 1 and len(found) > 1
    assert list(tmp_path.iterdir()) == []
