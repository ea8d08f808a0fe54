"""Experiments side by side: what each left behind, gathered; those that fail disturb none, and none is run twice."""

import json
from types import SimpleNamespace

import pytest
from helpers import clusters
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, assert_equal
from helpers.strict_json import read_json

import jaxrl
from jaxrl.cli import main, sweep
from jaxrl.core.errors import ConfigError, RunDirectoryError
from jaxrl.run.loop.run_loop import Loop
from jaxrl.sweeps import launcher
from jaxrl.sweeps.launcher import launch

PLAIN = PPO.replace(learning_rate=1e-2)
SETTINGS = {"total_steps": 2 * ROWS, "num_envs": NUM_ENVS, "evaluation_episodes": 2, "progress": False}


started, cluster = clusters.fixtures()


@pytest.mark.long
def test_experiments_side_by_side(cluster, tmp_path, monkeypatch):
    other = tmp_path / "learning_rate=0.003" / "seed=5"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"format": 1, "algorithm": {}}')
    found = launch(PLAIN, ENV, run_dir=tmp_path, seeds=[5], learning_rate=[1e-2, 1e30, 3e-3], **SETTINGS)

    assert found.failed.tolist() == [[False], [True], [True]]
    assert set(found.errors) == {(1, 0), (2, 0)}
    assert "not finite" in found.errors[1, 0]
    assert "Traceback" in found.errors[2, 0] and "contains a run of another configuration" in found.errors[2, 0]
    alone = jaxrl.train(
        PLAIN, ENV, total_steps=2 * ROWS, num_envs=NUM_ENVS, seed=5, evaluation_episodes=2, progress=False
    )
    assert found.scores[0, 0] == pytest.approx(alone.evaluation.return_mean)
    assert found.best == {"learning_rate": 1e-2} and found.table().splitlines()[1].split()[0] == "0.01"
    run_dir = found.run_dirs[0][0]
    assert run_dir == tmp_path / "learning_rate=0.01" / "seed=5"
    assert isinstance(jaxrl.load(run_dir), jaxrl.Policy)
    assert read_json(tmp_path / "sweep.json")["best"]["run"] == "learning_rate=0.01/seed=5"
    assert_equal(jaxrl.load(tmp_path).actor, jaxrl.load(run_dir).actor)
    assert {"curves.csv", "table.csv", "table.md", "curves.png"} <= {file.name for file in tmp_path.iterdir()}
    found.save(tmp_path / "elsewhere")
    assert_equal(jaxrl.load(tmp_path / "elsewhere").actor, jaxrl.load(run_dir).actor)
    losses = [row["update/value_loss"] for row in alone.metrics if "update/value_loss" in row]
    assert found.records()[0].final_metrics()["update/value_loss"] == pytest.approx(losses[-1], rel=1e-5)

    monkeypatch.setattr(launcher, "connect", lambda address: pytest.fail("ran what had ended"))
    again = launch(PLAIN, ENV, run_dir=tmp_path, seeds=[5], learning_rate=[1e-2], **SETTINGS)
    assert again.scores.tolist() == found.scores[:1].tolist() and not again.errors


# --- without a cluster -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_before_anything_is_launched(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "connect", lambda address: pytest.fail("launched"))
    for settings, words in (
        (
            {"cpus_per_run": -1.0, "restarts": -1},
            "cpus_per_run=-1.0 must be at least 0\nrestarts=-1 must be at least 0",
        ),
        ({"minibatches": [2, 5]}, "minibatches"),
        ({"seeds": []}, "seeds=\\[\\]"),
        ({"clip": []}, "clip is an empty list"),
    ):
        with pytest.raises(ConfigError, match=words):
            launch(PLAIN, ENV, run_dir=tmp_path, **SETTINGS | settings)


def test_a_result_that_says_no_steps_is_of_no_run_that_ended(tmp_path):
    (tmp_path / "result.json").write_text('{"stopped": "finished"}')
    assert not launcher._ended(tmp_path, {"total_steps": 1})


@pytest.mark.parametrize("place", ["clip=0.1", "clip=0.1/seed=1"])
def test_no_run_is_launched_behind_a_link(place, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "connect", lambda address: pytest.fail("launched"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / place).parent.mkdir(parents=True)
    (tmp_path / "runs" / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="is a link to"):
        launch(PLAIN, ENV, run_dir=tmp_path / "runs", **SETTINGS | {"clip": [0.1], "seeds": 2})


class _Launched(Exception):
    """Something was to be run."""


def _refuse(address):
    raise _Launched


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The directory of experiments of which one, clip=0.2 and seed 5, has ended: as `train` describes it."""
    root = tmp_path_factory.mktemp("ended")
    run_dir = root / "clip=0.2" / "seed=5"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Loop, "train", lambda *_: None)  # what matters here is config.json
        jaxrl.train(PPO, ENV, seed=5, run_dir=run_dir, **SETTINGS)
    record = {"evaluation": {}, "stopped": "finished", "wall_seconds": 1.0, "total_steps": 2 * ROWS}
    (run_dir / "result.json").write_text(json.dumps(record))
    return root


def _again(root, algo=PPO, env=ENV, **others):
    return launch(algo, env, run_dir=root, **{"seeds": [5], "clip": [0.2], **SETTINGS, **others})


def test_flags_reach_ray_if_it_has_as_much(tmp_path, monkeypatch, capsys):
    asked = {}

    class Ray:
        @staticmethod
        def remote(**options):
            asked.update(options)
            raise _Launched

        @staticmethod
        def cluster_resources():
            return {"CPU": 2.0, "GPU": 1.0}

    monkeypatch.setattr(launcher, "connect", lambda address: asked.update(address=address) or Ray)
    words = ["sweep", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "64", "--backend", "ray"]
    words += ["--cpus-per-run", "2", "--gpus-per-run", "0.5", "--restarts", "7", "--address", "there:1"]
    with pytest.raises(_Launched):
        main.main([*words, "--seeds", "2", "--run-dir", str(tmp_path / "search")])
    words[words.index("--gpus-per-run") + 1] = "1.5"
    assert main.main([*words, "--seeds", "2", "--run-dir", str(tmp_path / "search")]) == 2
    assert "gpus_per_run=1.5: the Ray cluster has 2 CPUs and 1 GPUs" in capsys.readouterr().err
    assert asked == {"address": "there:1", "num_cpus": 2.0, "num_gpus": 0.5, "max_retries": 7, "max_calls": 1}


def test_a_study_over_environments(tmp_path, monkeypatch, capsys):
    """A sweep for each, in a directory of its own; in one program they cannot be, and that is told."""
    sweeps = []

    def launched(algo, env, *, run_dir, **others):
        sweeps.append((env.name, run_dir, others["clip"], others["seeds"]))
        return SimpleNamespace(table=lambda: "a table", wall_seconds=0.0, steps_per_second=0.0)

    monkeypatch.setattr(sweep, "launch", launched)
    words = ["sweep", "ppo", "--total-steps", "64", "--grid", "clip=0.1,0.2"]
    words += ["env=gymnax:CartPole-v1,gymnasium:Pendulum-v1", "--seeds", "2", "--run-dir", str(tmp_path / "search")]
    assert main.main([*words, "--backend", "ray"]) == 0
    root = tmp_path / "search"
    assert sweeps == [
        ("gymnax:CartPole-v1", root / "gymnax_CartPole-v1", [0.1, 0.2], 2),
        ("gymnasium:Pendulum-v1", root / "gymnasium_Pendulum-v1", [0.1, 0.2], 2),
    ]
    said = capsys.readouterr().out
    assert said.count("a table") == 2 and said.index("gymnax:CartPole-v1:") < said.index("gymnasium:Pendulum-v1:")
    assert main.main(words) == 2 and "--grid env needs --backend ray" in capsys.readouterr().err
    assert main.main([*words, "env=gymnax:CartPole-v2"]) == 2 and "CartPole-v2" in capsys.readouterr().err


def test_what_has_ended_is_not_run_again(ended, monkeypatch):
    monkeypatch.setattr(launcher, "connect", _refuse)
    assert not _again(ended).failed.any()
    assert read_json(ended / "sweep.json")["best"] is None, "it has no evaluation"
    assert not _again(ended, total_steps=ROWS).failed.any(), "it went further than that"


@pytest.mark.parametrize(
    "changed",
    [
        {"env": jaxrl.make("gymnax:CartPole-v1", max_steps_in_episode=13)},
        {"num_envs": None, "topology": jaxrl.Anakin(num_envs=2 * NUM_ENVS)},
        {"num_envs": None, "topology": jaxrl.Anakin(num_envs=NUM_ENVS, shards=2)},
        {"evaluation_episodes": 3},
        {"explore_in_evaluation": True},
        {"total_steps": 3 * ROWS},
        {"seeds": [6]},
        {"clip": [0.3]},
        {"algo": PPO.replace(gamma=0.5)},
    ],
    ids=lambda changed: list(changed)[-1],
)
def test_another_configuration_in_its_place_has_not_ended(changed, ended, monkeypatch):
    monkeypatch.setattr(launcher, "connect", _refuse)
    with pytest.raises(_Launched):
        _again(ended, **changed)


def test_names_of_directories_tell_configurations_apart():
    assert launcher._name({"learning_rate": 1e-3, "epochs": 4}) == "learning_rate=0.001,epochs=4"
    assert launcher._name({}) == "defaults"
    long = [launcher._name({"network": f"{'x' * 300}/{number}"}) for number in range(2)]
    assert long[0] != long[1] and all(len(name) < 120 and "/" not in name for name in long)
