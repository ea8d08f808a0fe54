import os
import shutil

import pytest
from helpers.processes import python
from helpers.refused import raises

import jaxrl
from jaxrl.core import files
from jaxrl.core.config import encode
from jaxrl.core.errors import CheckpointError, RunDirectoryError
from jaxrl.run.directory import run_directory as run_directory
from jaxrl.run.directory.run_directory import RunDirectory, difference, read_config

CONFIG = {"algorithm": {"name": "ppo", "gamma": 0.99, "network": {"sizes": [64, 64]}}, "total_steps": 100, "seed": 0}
RESULT = '{"evaluation": {}, "stopped": "finished", "wall_seconds": 1.0}'


def test_a_new_directory_holds_the_configuration(tmp_path):
    with RunDirectory(tmp_path / "a" / "run", {**CONFIG, "sizes": (1, 2)}) as run:
        assert not run.resumed
        assert read_config(run.path) == {**CONFIG, "sizes": [1, 2]}
        assert run.metrics_jsonl == tmp_path / "a" / "run" / "metrics.jsonl"
    run.close()


def test_the_same_configuration_resumes_and_total_steps_may_change(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    with RunDirectory(tmp_path, {**CONFIG, "total_steps": 200, "logging": {"wandb": True}}) as run:
        assert run.resumed
    assert read_config(tmp_path)["total_steps"] == 200


@pytest.mark.parametrize("below", [(), ("sweep",), ("tune",)])
def test_what_was_written_before_a_field_was_there_resumes(tmp_path, below):
    def config(gamma=0.99):
        found = {"algorithm": encode(jaxrl.SAC(gamma=gamma))}
        for name in below:
            found = {name: found}
        return found

    old = config()
    algorithm = old[below[0]]["algorithm"] if below else old["algorithm"]
    del algorithm["critic"]["dtype"], algorithm["imitate"], algorithm["gamma"]
    RunDirectory(tmp_path, old).close()
    with RunDirectory(tmp_path, config()) as run:
        assert run.resumed
    RunDirectory(tmp_path / "other", old).close()
    init_from = "" if below else "--init-from .*other to start"
    raises(RunDirectoryError, f"(?s)0.99 -> 0.5.*{init_from}", RunDirectory, tmp_path / "other", config(gamma=0.5))


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    other = {
        **CONFIG,
        "algorithm": {"name": "ppo", "gamma": 0.9, "network": {"sizes": [32]}},
        "env": "gymnax:CartPole-v1",
    }
    with pytest.raises(RunDirectoryError) as error:
        RunDirectory(tmp_path, other)
    text = str(error.value)
    assert "algorithm.gamma: 0.99 -> 0.9" in text
    assert "algorithm.network.sizes: [64, 64] -> [32]" in text
    assert 'env: (absent) -> "gymnax:CartPole-v1"' in text
    assert "seed" not in text and "--overwrite" in text and "--init-from" in text
    assert read_config(tmp_path) == CONFIG
    RunDirectory(tmp_path, CONFIG).close()  # the refused one gave the lock back


def test_overwrite_deletes_only_what_jaxrl_makes(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    mine = [tmp_path / "notes.txt", tmp_path / "checkpoints" / "mine.txt", tmp_path / "tensorboard" / "mine.txt"]
    mine += [tmp_path / "tensorboard" / "events.out.tfevents.2.host", tmp_path / "videos" / "mine.gif"]
    ours = {
        tmp_path / "metrics.jsonl": '{"step": 1, "seconds": 2.0}\n',
        tmp_path / "result.json": RESULT,
        tmp_path / "evaluations.jsonl": '{"step": 1, "evaluation/return_mean": 2.0}\n',
        tmp_path / "checkpoints" / "000000000100" / "manifest.json": '{"step": 100, "config": {}}',
        tmp_path / "checkpoints" / ".saving-000000000200" / "state" / "x": "x",
        tmp_path / "tensorboard" / "events.out.tfevents.1.host": "..\n\x07seconds",
        tmp_path / "videos" / "000000000100.html": "<!-- written by jaxrl -->",
    }
    for path in [*mine, *ours]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ours.get(path, "x"))
    with RunDirectory(tmp_path, {**CONFIG, "seed": 1}, overwrite=True) as run:
        assert not run.resumed
    assert all(path.exists() for path in mine)
    assert not any(path.exists() for path in ours)
    assert read_config(tmp_path)["seed"] == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_without_a_configuration_are_not_taken_for_a_run(tmp_path, overwrite):
    (tmp_path / "metrics.jsonl").write_text("somebody's")
    raises(
        RunDirectoryError,
        r"metrics\.jsonl: not written by jaxrl for a run",
        RunDirectory,
        tmp_path,
        CONFIG,
        overwrite=overwrite,
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody's"


@pytest.mark.long
def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path):
    script = (
        "import sys\nfrom jaxrl.run.directory import run_directory as d; d.RunDirectory(sys.argv[1], {'algorithm': {}})"
    )
    with RunDirectory(tmp_path, {"algorithm": {}}):
        refused = python("-c", script, tmp_path, code=1)
        for overwrite in (False, True):
            raises(RunDirectoryError, "in use", RunDirectory, tmp_path, {"algorithm": {}}, overwrite=overwrite)
    assert f"is in use by process {os.getpid()} on " in refused.stderr
    python("-c", script, tmp_path)


def test_a_directory_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    raises(RunDirectoryError, "cannot write .*file/run", RunDirectory, tmp_path / "file" / "run", CONFIG)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "_probe", full)
    raises(RunDirectoryError, "No space left on device", RunDirectory, tmp_path / "run", CONFIG)


@pytest.mark.parametrize("text", ["[1]", '{"torn": '])
def test_a_broken_configuration_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    raises(RunDirectoryError, r"config\.json", read_config, tmp_path)
    raises(RunDirectoryError, "not a run directory", read_config, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("runs/cartpol", ["runs/cartpole"]),
        ("runs/CartPole", ["runs/cartpole"]),
        ("run/cartpole", ["runs/cartpole"]),
        ("run/cartpoles", ["runs/cartpole"]),
        ("runs/swep", ["runs/sweep"]),
        ("runs/group/sede-1", ["runs/group/seed-1"]),
        ("runs/data-se", []),  # no run is of that name
        ("elsewhere/altogether", []),
    ],
)
def test_a_wrong_path_offers_runs_of_close_names_that_exist(path, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("runs/cartpole", "runs/group/seed-1", "runs/sweep", "runs/data-set"):
        (tmp_path / run).mkdir(parents=True)
    for file in ("cartpole/config.json", "group/seed-1/config.json", "sweep/sweep.json"):
        (tmp_path / "runs" / file).write_text("{}")
    assert [str(found) for found in run_directory.close_runs(path)] == meant
    with pytest.raises(RunDirectoryError, match="is not a run directory") as caught:
        read_config(path)
    assert str(caught.value).partition("did you mean ")[2].rstrip("?").split(" or ") == (meant or [""])
    assert run_directory.close_runs("runs/cartpole") == []


def test_a_folder_of_runs_names_one(tmp_path):
    for number in range(3):
        RunDirectory(tmp_path / f"run-{number}", CONFIG).close()
    raises(RunDirectoryError, f"3 runs, such as {tmp_path}/run-0", read_config, tmp_path)


def test_links_in_the_directory_lead_nowhere(tmp_path):
    target, path = tmp_path / "precious", tmp_path / "run"
    path.mkdir()
    target.write_text("precious")
    for name in (".probe", ".config.json.tmp", ".result.json.tmp", "config.json.tmp"):
        (path / name).symlink_to(target)
    with RunDirectory(path, CONFIG) as run:
        run.result.symlink_to(target)
        files.write_json(run.result, {})
        run.result.unlink()
    assert target.read_text() == "precious"
    for make in (lambda lock: lock.symlink_to(target), os.mkfifo):
        (path / ".lock").unlink()
        make(path / ".lock")
        raises(RunDirectoryError, r"\.lock: not written by jaxrl for a run", RunDirectory, path, CONFIG)
    assert target.read_text() == "precious"


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    (tmp_path / ".config.json.0123456789abcdef.tmp").write_text("half")
    with RunDirectory(tmp_path, CONFIG) as run:
        assert [file.name for file in sorted(run.path.iterdir())] == [".lock", "config.json"]


@pytest.mark.parametrize("ended", [False, True])
def test_metrics_whose_checkpoints_are_gone_are_kept(tmp_path, ended):
    with RunDirectory(tmp_path, CONFIG) as run:
        run.metrics_jsonl.write_text('{"step": 64}\n')
        run.checkpoints.mkdir()
    RunDirectory(tmp_path, CONFIG).close()  # it was killed before its first checkpoint
    if ended:
        run.result.write_text(RESULT)
    else:
        run.checkpoints.rmdir()
    raises(RunDirectoryError, "checkpoints/.*--overwrite", RunDirectory, tmp_path, CONFIG)
    assert run.metrics_jsonl.read_text() == '{"step": 64}\n'
    with RunDirectory(tmp_path, CONFIG, overwrite=True) as run:
        assert not run.resumed and not run.metrics_jsonl.exists()


@pytest.mark.parametrize("how", ["deleted", "moved", "another"])
def test_a_directory_that_disappears_is_noticed(tmp_path, how):
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        run.check()
        if how == "deleted":
            shutil.rmtree(run.path)
        else:
            run.path.rename(tmp_path / "moved")
        if how == "another":
            RunDirectory(run.path, CONFIG).close()
        raises(CheckpointError, "/run was deleted or moved", run.check)


def test_a_name_that_orbax_could_not_write_to_is_refused(tmp_path):
    raises(
        RunDirectoryError,
        r"run\\xff.* is not UTF-8",
        RunDirectory,
        os.path.join(os.fsencode(tmp_path), b"run\xff").decode(errors="surrogateescape"),
        CONFIG,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_is_nested_deeply_is_told(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    raises(RunDirectoryError, r"config\.json cannot be read", read_config, tmp_path)


def test_another_schedule_or_algorithm_is_one_line():
    """Before, a learning rate of 1e-3 for a schedule was five lines, DQN for PPO a hundred."""
    falling = jaxrl.PPO(learning_rate=jaxrl.schedules.Linear(5e-4, 0.0))
    ppo, fixed, dqn = ({"a": encode(algo)} for algo in (falling, falling.replace(learning_rate=1e-3), jaxrl.DQN()))
    assert [line.partition(": {")[0] for line in difference(ppo, fixed)] == ["a.learning_rate"]
    [line] = difference(ppo, dqn)
    assert "algorithm:ppo" in line and '{"type": "algorithm:dqn"' in line and len(line) < 300


def test_difference_of_nested_fields():
    assert difference({"a": {"b": 1, "c": {}}}, {"a": {"b": 1, "c": {"d": None}}}) == ["a.c.d: (absent) -> null"]
    assert difference({"log": {"a": 1}, "logger": 1}, {"log": {"a": 2}, "logger": 2}, ["log"]) == ["logger: 1 -> 2"]
