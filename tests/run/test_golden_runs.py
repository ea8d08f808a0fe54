"""Run directories of earlier jaxrl load, act as they did, evaluate and go on, whatever has moved since."""

import json
import shutil

import numpy as np
import pytest
from golden.make_runs import KINDS, RUNS, gather_sweep, play, run_directories, train_ppo

import jaxrl
from jaxrl.core.config import decode, encode
from jaxrl.run import loading
from jaxrl.run.directory import RunDirectory, read_config

pytestmark = pytest.mark.exact

if not RUNS.exists():
    pytest.skip("there are no golden runs: make them with tests/golden/make_runs.py", allow_module_level=True)
ACTIONS = json.loads((RUNS / "actions.json").read_text())


def test_there_is_a_run_of_each_kind():
    assert set(ACTIONS) == set(run_directories(RUNS))
    assert {name.partition("/")[0] for name in ACTIONS} == set(KINDS)
    sizes = {kind: sum(file.stat().st_size for file in (RUNS / kind).rglob("*") if file.is_file()) for kind in KINDS}
    assert all(size < 500_000 for size in sizes.values()), sizes


@pytest.mark.parametrize("name", ACTIONS)
def test_it_loads_and_acts_as_it_did(name):
    run = loading.load_run(RUNS / name)
    np.testing.assert_array_equal(play(run.policy), ACTIONS[name])
    assert run.config == read_config(RUNS / name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ACTIONS if not name.startswith("sweep")])
def test_it_evaluates(name):
    run = loading.load_run(RUNS / name)
    found = jaxrl.evaluate(run.policy.algo, run.policy.actor, run.env, run.policy.spec, episodes=2)
    assert found.episodes == 2 and found.return_mean > 0


@pytest.mark.long
def test_a_run_goes_on(tmp_path):
    path = shutil.copytree(RUNS / "ppo", tmp_path / "ppo")
    before = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    result = train_ppo(path, total_steps=256)
    assert result.total_steps == 256 and result.stopped == "finished"
    assert result.metrics[: len(before)] == before and len(result.metrics) > len(before)


@pytest.mark.long
def test_a_field_that_is_new_since_has_its_default(tmp_path):
    """A run of a jaxrl without the field goes on; one whose field differs from the default does not."""
    path = shutil.copytree(RUNS / "ppo", tmp_path / "ppo")
    config = json.loads((path / "config.json").read_text())
    del config["algorithm"]["gae_lambda"], config["algorithm"]["network"]["core"], config["topology"]["devices"]
    (path / "config.json").write_text(json.dumps(config))
    now = read_config(RUNS / "ppo")
    now |= {name: encode(decode(now[name])) for name in ("algorithm", "topology")}  # as this jaxrl writes them
    with RunDirectory(path, now) as directory:
        assert directory.resumed
    assert train_ppo(path, total_steps=256).total_steps == 256
    del config["algorithm"]["rollout_length"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(jaxrl.JaxrlError, match="rollout_length: 128 -> 16"):
        train_ppo(path, total_steps=256)


def test_a_sweep_is_gathered_and_not_run_again(tmp_path):
    path = shutil.copytree(RUNS / "sweep", tmp_path / "sweep")
    found = gather_sweep(path)
    assert found.errors == {} and np.isfinite(found.scores).all() and found.scores.shape == (2, 1)
