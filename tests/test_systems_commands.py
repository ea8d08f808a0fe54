"""Every command of docs/systems.md as it is typed, on one device or as many as it says: it trains, or reads.

Only how far it goes is cut down (`helpers.systems.shortened`). What a command should come to, the tests of its row say.
"""

import glob
import json
import math
import shutil
import subprocess
import sys

import pytest
from helpers.patience import PATIENCE, within
from helpers.processes import environment, free_port
from helpers.systems import LINES, TRAINING, shortened, write_datasets

# What a machine without accelerators refuses.
GPUS = "--gpus-per-run"


# Runs the commands that it reads, one after another: a process each takes longer to begin than most of them do.
SERVER = """
import gc, json, os, sys, traceback
answers, maps = os.fdopen(os.dup(1), "w"), "/proc/self/maps"
from jaxrl.cli import main
for line in sys.stdin:
    folder, words = json.loads(line)
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    try:
        code = main.main(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    if os.path.exists(maps) and open(maps).read().count(chr(10)) > 30_000:  # of those that a process may have
        import jax
        jax.clear_caches()
        gc.collect()
    print(json.dumps(code), file=answers, flush=True)
"""
# What starts processes of its own, or needs another beside it.
DEVICES_OF_JAX = "JAX_NUM_CPU_DEVICES"
APART = (DEVICES_OF_JAX, "--launch", "--distributed", "--backend ray", "--remote")


class Server:
    """A process with one device that runs commands."""

    def __init__(self, folder):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._said = open(folder / "server", "w")  # before the first command
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment(DEVICES_OF_JAX), cwd=folder, stderr=self._said, **pipes
        )

    def run(self, words, folder):
        print(json.dumps([str(folder), words]), file=self.process.stdin, flush=True)
        with within(PATIENCE):
            answer = self.process.stdout.readline()
        return (json.loads(answer) if answer else "the process ended"), (folder / "said").read_text()

    def close(self):
        self.process.kill()
        self.process.wait()
        self._said.close()


def run_apart(line, folder):
    """Run a command in processes of its own; return the exit code that is not 0, else 0, and what it said."""
    variables, words = shortened(line)
    commands = [words]
    if "--num-processes" in words:  # as typed it is the first of several
        address, count = f"127.0.0.1:{free_port()}", int(words[words.index("--num-processes") + 1])
        commands = [[*words, "--coordinator", address, "--process-id", str(index)] for index in range(count)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    how["env"] = environment(DEVICES_OF_JAX, **variables)
    started = [subprocess.Popen([sys.executable, "-m", "jaxrl", *command], **how) for command in commands]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return next((process.returncode for process in started if process.returncode), 0), "\n".join(said)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("server"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """Two datasets, and two runs by the page's own commands."""
    path = tmp_path_factory.mktemp("systems")
    write_datasets(path)
    for name, algorithm in (("cartpole", "ppo"), ("dqn", "dqn")):
        line = f"jaxrl train {algorithm} --env gymnax:CartPole-v1 --total-steps 4096 --run-dir runs/{name}"
        assert line in LINES
        code, said = server.run(shortened(line)[1], path)
        assert code == 0, said
    return path


def test_there_is_one_of_each_kind():
    assert len(LINES) > 130


@pytest.mark.long
@pytest.mark.parametrize("line", LINES, ids=LINES)
def test_a_command_as_typed(line, server, folder, tmp_path):
    words = shortened(line)[1]
    command = words[0]
    for name in ("data",) if command in TRAINING else ("data", "runs"):
        shutil.copytree(folder / name, tmp_path / name)
    apart = any(word in line for word in APART)
    code, said = run_apart(line, tmp_path) if apart else server.run(words, tmp_path)
    if GPUS in line and not glob.glob("/dev/nvidia[0-9]*"):
        assert code == 2 and "the Ray cluster has" in said, said
        return
    assert code == 0, said
    if command == "train":
        (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
        rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        updates = {name: row[name] for row in rows for name in row if name.startswith("update/")}
        assert updates and all(value is None or math.isfinite(value) for value in updates.values()), said
    elif command in TRAINING:
        assert list((tmp_path / "runs").rglob("trials.csv" if command == "tune" else "sweep.json")), said
