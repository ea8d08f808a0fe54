"""`--distributed` as two people type it, and `--launch` as one does, on loopback."""

import contextlib
import subprocess
import sys

import pytest
from helpers.patience import PATIENCE
from helpers.processes import environment, free_port, python
from helpers.strict_json import read_json

from jaxrl.cli import main, multihost, runs
from jaxrl.core.errors import ConfigError, PeerError
from jaxrl.parallel.multihost import distributed, launch, place
from jaxrl.parallel.multihost.launch import Processes
from jaxrl.run.directory.checkpoint import complete_steps
from jaxrl.run.loggers import read_metrics

TRAIN = ["train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "128", "--num-envs", "4", "--devices", "2"]
TRAIN += ["--rollout-length", "8", "--minibatches", "2", "--epochs", "1", "--network.torso", "mlp:8", "--no-progress"]
TRAIN += ["--evaluation-episodes", "2", "--evaluate-every", "0"]


def two(first, second):
    """Runs two command lines as the two processes of a run; exit codes, what they printed, and their complaints."""
    place = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    env = environment()
    with contextlib.ExitStack() as stack:
        processes = []
        for index, argv in enumerate((first, second)):
            words = [sys.executable, "-m", "jaxrl", *argv, *place, str(index)]
            process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    return [process.returncode for process in processes], [out for out, _ in said], [err for _, err in said]


def test_two_command_lines_are_one_run(tmp_path):
    run_dir = tmp_path / "run"
    command = [*TRAIN, "--run-dir", str(run_dir)]
    codes, (first, second), complaints = two(command, command)
    assert codes == [0, 0], complaints
    assert "PPO on gymnax:CartPole-v1: 128 steps" in first and str(run_dir) in first
    assert "steps" not in second and "evaluation" not in second, "the first process alone tells the result"
    record = read_json(run_dir / "result.json")
    assert record["total_steps"] == 128 and record["evaluation"]["episodes"] == 2
    assert read_json(run_dir / "config.json")["topology"]["devices"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_one_command_line_starts_both(tmp_path):
    run_dir = tmp_path / "run"
    words = ["-m", "jaxrl", *TRAIN, "--run-dir", run_dir, "--launch", "processes:2"]
    assert python(*words, env=environment()).stdout.count("PPO on gymnax:CartPole-v1: 128 steps") == 1
    assert read_json(run_dir / "result.json")["total_steps"] == 128
    assert read_json(run_dir / "config.json")["topology"]["devices"] == 2
    assert "the run had already finished" in python(*words, env=environment()).stdout


def test_one_command_line_starts_an_evaluator_too(tmp_path, capsys):
    run_dir = tmp_path / "run"
    words = ["-m", "jaxrl", *TRAIN, "--devices", "1", "--checkpoint-every", "32", "--keep", "9"]
    words += ["--run-dir", run_dir, "--launch", "processes:1:evaluators=1"]

    def run(*more):
        return python(*words, *more, env=environment()).stdout

    def found():
        """What the evaluator wrote, once `jaxrl eval --follow` has found the same."""
        rows, out = read_metrics(run_dir / "evaluations.jsonl"), tmp_path / "followed.jsonl"
        out.unlink(missing_ok=True)
        assert main.main(["eval", str(run_dir), "--follow", "--episodes", "2", "--out", str(out)]) == 0
        assert rows == read_metrics(out)
        assert [row["step"] for row in rows] == complete_steps(run_dir / "checkpoints") == [32, 64, 96, 128]
        return rows

    assert run().count("PPO on gymnax:CartPole-v1: 128 steps") == 1
    first, file = found(), run_dir / "evaluations.jsonl"
    # The same command again evaluates what its evaluator had left.
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert "the run had already finished" in run()
    assert found() == first
    # And of a run that takes its place, all.
    run("--overwrite", "--seed", "7")
    assert found() != first


# --- without a second process --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--distributed", "--coordinator", "host:1"], "--num-processes, --process-id: missing; give all three"),
        (["--distributed", "--coordinator", "host", "--num-processes", "2", "--process-id", "0"], "must be HOST:PORT"),
        (["--distributed", "--coordinator", "host:1", "--num-processes", "2", "--process-id", "2"], "between 0 and 1"),
        (["--distributed"], "no cluster was detected"),
        (["--launch", "cluster"], "no cluster was detected"),
        (["--launch", "cluster", "--coordinator", "host:1"], "--num-processes, --process-id: missing"),
        (["--launch", "processes:2", "--distributed"], "cannot be used with --launch processes:2, which starts"),
        (["--launch", "processes:2:restarts=1"], "needs --run-dir, since a restart resumes from its newest checkpoint"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_wrong_combinations_start_nothing(command, flags, words, capsys, monkeypatch):
    def initialize(*arguments, **_):
        assert arguments == (None, None, None), "joined the others in spite of what is wrong"
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(distributed.jax.distributed, "initialize", initialize)
    assert main.main([command, "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "8", *flags]) == 2
    assert words in capsys.readouterr().err


def test_an_evaluator_joins_nobody(monkeypatch):
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    monkeypatch.setattr(place, "_own", [place.Place("127.0.0.1:1", 2, 2, evaluators=1)])
    words = ["ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "8", "--run-dir", "runs/none"]
    words += ["--launch", "processes:2:evaluators=1"]
    assert multihost.join(runs.read("train", words).run) == 2 == launch.launch("processes:2:evaluators=1")


@pytest.mark.parametrize("command", ["train", "sweep", "compile"])
def test_the_same_command_is_started(command, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_processes", lambda *arguments: started.append(arguments) or 7)
    words = ["ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "8", "--launch", "processes:3:restarts=2"]
    words += ["--run-dir", "runs/none", "--overwrite"]
    assert main.main([command, *words]) == 7
    again = ["--no-overwrite"]
    assert started == [([sys.executable, "-m", "jaxrl", command, *words], Processes(3, 2), again)]
    assert runs.read(command, words).run["overwrite"] is True
    assert runs.read(command, [*words, *again]).run["overwrite"] is False, "it would begin anew"


HOST = "impala --env gymnasium:CartPole-v1 --total-steps 8"
OF_TWO = "--distributed --coordinator host:1 --num-processes 2 --process-id 0"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ppo --env gymnax:CartPole-v1 --distributed --gamma 2", ["PPO.gamma=2.0", "--total-steps"]),
        (f"{HOST} --launch processes:2 --error-buffer 512", ["--error-buffer cannot be used with several"]),
        (f"gail {HOST[7:]} {OF_TWO} --record-every 2", ["--record-every needs --record", "--dataset PATH"]),
        ("iql --dataset rlds:data --num-envs 2 --total-steps 8 --distributed", ["--num-envs 2 needs --env"]),
    ],
)
def test_what_is_wrong_is_told_before_others_are_waited_for(line, words, capsys, monkeypatch):
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    monkeypatch.setattr(launch, "run_processes", lambda *_: pytest.fail("started"))
    assert main.main(["train", *line.split()]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_what_is_for_one_process_is_taken_where_there_is_one():
    runs.read("train", f"{HOST} {OF_TWO} --num-processes 1 --error-buffer 512".split())


def test_one_that_fails_tells_those_who_wait_for_it(monkeypatch):
    class Store(dict):
        def key_value_set(self, key, value):
            self[key] = value

        def key_value_delete(self, key):
            del self[key]

        def blocking_key_value_get(self, key, milliseconds):
            return self[key]

    store, place = Store(), distributed._engine.global_state
    for name, value in {"client": store, "num_processes": 2, "process_id": 1}.items():
        monkeypatch.setattr(place, name, value)
    monkeypatch.setattr(distributed, "_exchanges", iter(range(10)))
    with pytest.raises(ConfigError), distributed.report_errors():
        raise ConfigError("no such environment here")
    monkeypatch.setattr(distributed, "_exchanges", iter(range(10)))
    monkeypatch.setattr(place, "process_id", 0)
    with pytest.raises(PeerError, match="process 1 failed: ConfigError"):
        distributed.exchange("settings", {})
