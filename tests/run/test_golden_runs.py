"""Run directories of e170f74 load, act as they did, and continue with the numbers that e170f74 continued them with."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from helpers.golden import E170F74, FOLDER, old_runs
from helpers.programs import ENV
from helpers.refused import raises

import jaxrl
from jaxrl.algos.optimizers import Adam
from jaxrl.core.config import decode
from jaxrl.core.errors import CheckpointError
from jaxrl.networks import MLP, ActorCritic
from jaxrl.run.directory.loading import load_run
from jaxrl.sweeps.launcher import launch
from jaxrl.sweeps.records import read_records

EXPECTED = json.loads((E170F74 / "expected.json").read_text())
RUNS = [kind for kind, expected in EXPECTED.items() if "rows" in expected]
# A version that cannot read these files is to be mended: they are what users have.
FROZEN = {
    "presets.json": "b3390327441f93dad4c854c376551f10bde7fd8c4efdc3d13249f68601d86e33",
    "e170f74/expected.json": "3c352698007bf7fdb719f568ff218aa8c809961109af690c5720e9e033759c80",
    "e170f74/runs.tar.xz": "1123b75032ed14e424f6c208f8a6324b0be02c2e1978db090c9a783f16ea92a6",
}
# Kinds that learn other numbers since, by the commit that says why, and the numbers that are the same.
CHANGED = {"reppo": "4a6c4ffc"}
# Kinds whose checkpoints do not fit since, by the commit that changed what they hold.
REFUSED = {"sweep": "4a2cf4a8", "pbt": "4a2cf4a8"}
COUNTS = {"step", "train/episodes", "train/transitions", "train/updates"}

PPO = jaxrl.PPO(
    learning_rate=1e-2,
    optimizer=Adam(eps=1e-3),
    rollout_length=16,
    epochs=2,
    minibatches=2,
    normalize_observation=True,
    network=ActorCritic(torso=MLP((8,))),
)
QUIET = {"evaluation_episodes": 2, "progress": False}
COMPILED = {"num_envs": 4, "devices": 1, "mapping": "in_turn", **QUIET}
SPACE = {"learning_rate": jaxrl.LogUniform(1e-4, 1e-1), "clip": jaxrl.Uniform(0.1, 0.4)}
FIXED = {"gamma": 0.99, "gae_lambda": 0.95, "value_cost": 0.5, "max_grad_norm": 0.5}
EXPLOIT = {"exploit_every": 64, "exploit_from": 0.0, "fraction": 0.25}
RATES = {"learning_rate": [1e-2, 1e-3]}
# The sweep and the population were killed, the search has two trials, the runs on Ray have ended.
MANY = {
    "sweep": (jaxrl.sweep, {"total_steps": 384, "seeds": 2, "points": 6, **RATES, **COMPILED}),
    "pbt": (jaxrl.pbt, {"total_steps": 384, "population": 4, **EXPLOIT, **SPACE, **FIXED, **COMPILED}),
    "tune": (
        jaxrl.tune,
        {"total_steps": 128, "trials": 3, "seeds": 1, "evaluate_every": 64, "pruner": "none"}
        | {**SPACE, **FIXED, **COMPILED},
    ),
    "ray_sweep": (launch, {"total_steps": 64, "seeds": 1, "num_envs": 4, **RATES, **QUIET}),
}


def assert_near(found, expected):
    """Check every number that is expected, up to the rounding of another processor."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def assert_acts_as_it_did(policy, expected):
    shape, carry, actions = policy.spec.observation_space.shape, None, []
    for observation in np.linspace(-1.0, 1.0, 8 * shape[0], dtype=np.float32).reshape(8, *shape):
        action, carry = policy(observation, carry)
        actions.append(action)
    assert_near({"actions": actions}, {"actions": expected["actions"]})


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a function that copies a run directory; the path of its dataset is relative."""
    monkeypatch.chdir(old_runs())
    return lambda kind: shutil.copytree(old_runs() / kind, tmp_path / kind)


def test_what_earlier_versions_wrote_is_as_they_wrote_it():
    files = [FOLDER / "presets.json", *(file for file in E170F74.rglob("*") if file.is_file())]
    assert {str(file.relative_to(FOLDER)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == FROZEN


@pytest.mark.parametrize(
    "kind", ["ppo", "recurrent_dqn", "sac", "sebulba", "bc", "policy", "tune", "sweep_finished", "pbt_finished"]
)
def test_it_loads_and_acts_as_it_did(kind):
    run = load_run(old_runs() / kind)
    assert_acts_as_it_did(run.policy, EXPECTED[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", RUNS)
def test_it_continues_as_it_did(kind, copied):
    path, expected = copied(kind), EXPECTED[kind]
    run, before = load_run(path), [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert_acts_as_it_did(run.policy, expected)
    result = jaxrl.train(
        run.algo,
        None if kind == "bc" else run.env,
        eval_env=run.env,
        dataset="rlds:demonstrations" if "dataset" in run.config else None,
        topology=decode(run.config["topology"]),
        total_steps=expected["rows"][-1]["step"],
        log_every=expected["rows"][0]["step"] - before[-1]["step"],
        evaluate_every=0,
        checkpoint_every=0,
        run_dir=path,
        **QUIET,
    )
    assert result.metrics[: len(before)] == before
    for found, row in zip(result.metrics[len(before) :], expected["rows"], strict=True):
        assert_near(found, {name: value for name, value in row.items() if kind not in CHANGED or name in COUNTS})


@pytest.mark.long
@pytest.mark.parametrize("kind", MANY)
def test_many_runs_continue_as_they_did(kind, copied):
    path = copied(kind)
    call, settings = MANY[kind]
    if kind in REFUSED:
        raises(CheckpointError, "does not fit this configuration", call, PPO, ENV, run_dir=path, **settings)
        return
    result, expected = call(PPO, ENV, run_dir=path, **settings), EXPECTED[kind]["continued"]
    if kind == "tune":
        searched = [[trial.settings[name] for name in SPACE] for trial in result.trials]
        found = {"settings": searched, "returns": [trial.returns for trial in result.trials]}
    else:
        found = {**result.metrics, "returns": result.returns}
    assert_near(found, {name: value for name, value in expected.items() if name != "actions"})
    assert_acts_as_it_did(jaxrl.load(path), expected)


def test_old_searches_sweeps_and_populations_are_read_as_tables():
    scores = {
        "tune": [12.0, 10.5],
        "sweep_finished": [11.0, 12.0, 12.0, 11.0],
        "pbt_finished": [11.0, 11.5, 11.0, 12.0],
    }
    for name, expected in scores.items():
        assert [record.score for record in read_records([old_runs() / name])] == expected
