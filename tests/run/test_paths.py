"""`~` is the home directory in every path that a user can give, to Python and on the command line."""

import ast
import json
import os
from pathlib import Path

import pytest
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS
from helpers.recorded import episode, untrained
from helpers.refused import raises

import jaxrl
from jaxrl.cli import main, table, values
from jaxrl.core import files
from jaxrl.core.errors import JaxrlError
from jaxrl.data import RldsWriter
from jaxrl.data.minari_reader import MinariReader
from jaxrl.data.rlds import RldsReader
from jaxrl.run.directory.checkpoint import best_step, complete_steps, read_manifest, restore
from jaxrl.run.directory.follow import follow
from jaxrl.run.directory.init_from import recorded_parent
from jaxrl.run.directory.run_directory import read_config
from jaxrl.run.loggers import read_metrics
from jaxrl.run.plotting import plot_runs, read_run
from jaxrl.run.policies.opponents import as_opponent

pytest.importorskip("tensorflow_datasets")
SOURCES = Path(jaxrl.__file__).parent


@pytest.fixture(params=[str, Path], ids=["str", "Path"])
def at_home(tmp_path, monkeypatch, request):
    """A function from a path below the home directory to how it is written with `~`; nothing here is named so later."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", os.fspath(home))
    monkeypatch.chdir(here)
    yield lambda name: request.param(f"~/{name}")
    assert [path for path in here.rglob("*") if "~" in path.name] == []
    assert [path for path in home.rglob("*") if "~" in path.name] == []


@pytest.mark.long
def test_no_path_is_made_of_a_users_text_elsewhere():
    """`Path(name)` of an argument would take `~` for the name of a folder; `files.expand(name)` does not."""
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        if file == SOURCES / "core" / "files.py":
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Path", "open", "pathlib.Path"):
                names = [x for x in call.args[:1] if isinstance(x, ast.Name) and x.id != "__file__"]
                found += [f"{file}:{call.lineno}" for _ in names]
    assert {line.rpartition(":")[0] for line in found} == {f"{SOURCES}/data/tfrecord.py"}, "its callers expand"


# --- Python ----------------------------------------------------------------------------------------------------------

RUN = {"num_envs": NUM_ENVS, "evaluate_every": 0, "evaluation_episodes": 2, "progress": False}


@pytest.mark.long
def test_training_and_all_that_follows(at_home, tmp_path):
    """What writes, writes below the home directory; what reads finds it there."""
    home = tmp_path / "home"
    run = {"total_steps": ROWS, "run_dir": at_home("run"), "record": at_home("recorded"), **RUN}
    result = jaxrl.train(PPO, ENV, **run)
    assert result.run_dir == home / "run" and len(jaxrl.load_dataset(f"rlds:{home}/recorded"))
    policy = jaxrl.load(at_home("run"))
    assert recorded_parent(at_home("run"), at_home("run")) is None
    assert result.save(at_home("saved")) == home / "saved" and (home / "saved" / "config.json").exists()
    result.plot(at_home("curve.png"))
    plot_runs([at_home("run")], at_home("curves.png"))
    assert read_run(at_home("run")).rows == read_metrics(at_home("run/metrics.jsonl"))
    assert jaxrl.export_rlds(policy, ENV, at_home("data"), episodes=1, progress=False) == home / "data"
    assert jaxrl.render(policy, ENV, at_home("film.gif"), max_steps=2) == home / "film.gif"
    assert jaxrl.export_policy(at_home("run"), at_home("policy"), to="safetensors") == home / "policy"
    assert type(jaxrl.load(at_home("policy"))) is type(policy)
    assert jaxrl.report([at_home("run")], at_home("report.html")) == home / "report.html"
    assert len(jaxrl.to_pandas([at_home("run")])) == 1
    found = [step for step, _ in follow(at_home("run"), episodes=2, out=at_home("evaluations.jsonl"), env=ENV)]
    assert found == complete_steps(at_home("run/checkpoints")) == [ROWS]
    assert read_manifest(at_home("run/checkpoints")).step == ROWS
    assert {path.name for path in home.iterdir()} >= {"run", "recorded", "saved", "curve.png", "curves.png", "film.gif"}


@pytest.mark.long
def test_datasets(at_home, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    with RldsWriter(at_home("rlds"), "data") as writer:
        writer.write(episode(0, 3, "truncated", dtypes=["int16"]))
        assert writer.close() == home / "rlds"
    assert len(jaxrl.load_dataset("rlds:~/rlds")) == len(RldsReader(at_home("rlds"))) == 1
    policy, options = untrained(ENV, PPO), {"episodes": 1, "progress": False}
    jaxrl.export_minari(policy, ENV, "a-v0", data_dir=at_home("minari"), **options)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "~/others")
    jaxrl.export_minari(policy, ENV, "b-v0", **options)
    assert (home / "others" / "b-v0").is_dir() and len(jaxrl.load_dataset("minari:b-v0")) == 1
    assert len(jaxrl.load_dataset("minari:~/minari/a-v0")) == len(MinariReader(at_home("minari/a-v0"))) == 1


READERS = {
    "jaxrl.load": jaxrl.load,
    "jaxrl.export_replay": lambda path: jaxrl.export_replay(path, "out"),
    "jaxrl.train(init_from=)": lambda path: jaxrl.train(PPO, ENV, total_steps=ROWS, init_from=path, **RUN),
    "read_manifest": read_manifest,
    "evaluate(opponent=)": as_opponent,
    "best_step": best_step,
    "restore": lambda path: restore(path, {}),
    "read_config": read_config,
    "read_run": read_run,
    "plot_runs": lambda path: plot_runs([path], "out.png"),
    "RldsReader": RldsReader,
    "MinariReader": MinariReader,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_says_where_it_looked(at_home, tmp_path, read):
    raises(JaxrlError, f"{tmp_path}/home/nothing", read, at_home("nothing"))


# --- the command line ------------------------------------------------------------------------------------------------


def test_every_flag_for_a_path_is_read_in_one_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    kinds, waiting = [], [json.loads(json.dumps(table.load()))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            kinds += [node] if str(node.get("kind", "")).startswith("path") else []
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    assert {flag["name"] for flag in kinds} >= {"run_dir", "init_from", "record"}
    for kind in ("path", "path|None"):
        assert values.read(table._kind(kind), "~/x") == tmp_path / "x"


@pytest.mark.parametrize(
    "command",
    [
        ["plot", "~/nothing"],
        ["eval", "~/nothing"],
        ["dataset", "info", "~/nothing"],
        ["dataset", "info", "minari:~/nothing"],
        ["export-rlds", "~/nothing", "--out", "~/data"],
        ["export-minari", "~/nothing", "--id", "a-v0", "--data-dir", "~/data"],
        ["export-replay", "~/nothing", "--out", "~/data"],
        ["train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "8", "--init-from", "~/nothing"],
        ["train", "bc", "--dataset", "rlds:~/nothing", "--eval-env", "gymnax:CartPole-v1", "--total-steps", "8"],
    ],
    ids=" ".join,
)
def test_commands_look_in_the_home_directory(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    assert main.main(command) == 2
    assert f"{tmp_path}/nothing" in capsys.readouterr().err
    assert list((tmp_path / "here").iterdir()) == []


def test_the_doctor_looks_at_the_home_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.chdir(tmp_path)
    main.main(["doctor", "--run-dir", "~/runs"])
    assert files.expand("~/runs").parent == tmp_path and f"{tmp_path}" in capsys.readouterr().out
    assert not (tmp_path / "~").exists()
