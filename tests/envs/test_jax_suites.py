"""What every suite of `jaxrl.envs.suites` holds; the rest of each is in its own file of tests/envs/suites."""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.legal_play import outside, play
from helpers.programs import PPO, ROWS, anakin, assert_equal
from helpers.refused import refused
from helpers.suite_samples import SAMPLES, SUITES, adapter, each_suite

import jaxrl
from jaxrl.core import suite_modules
from jaxrl.core.types import env_spec, num_agents
from jaxrl.envs.drawings import drawing_of
from jaxrl.envs.parameters import unwrapped
from jaxrl.run.callbacks import FunctionCallback

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("suite", each_suite())
TOTAL = 8 * ROWS
# Small steps: of seldom inputs, which Craftax has many, Adam makes steps of that size from what is rounding alone.
ALGO = PPO.replace(network=jaxrl.networks.ActorCritic(), learning_rate=jaxrl.schedules.Linear(1e-3, 1e-4))


def environment(suite):
    return jaxrl.make(f"{suite}:{SAMPLES[suite].name}", **SAMPLES[suite].parameters)


def train(suite, run_dir, devices=1, **settings):
    settings = {
        "checkpoint_every": 2 * ROWS,
        "evaluate_every": 0,
        "evaluation_episodes": 1,
        "progress": False,
    } | settings
    return jaxrl.train(
        ALGO, environment(suite), total_steps=TOTAL, topology=anakin(devices), run_dir=run_dir, **settings
    )


def test_each_suite_is_tried_and_has_its_page():
    assert set(SAMPLES) == set(SUITES)
    assert all((ROOT / "docs" / "suites" / f"{suite}.md").exists() for suite in SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_an_adapter_is_one_file(suite):
    file = ROOT / Path(*suite_modules.SUITES[suite].module.split(".")).with_suffix(".py")
    package = suite_modules.SUITES[suite].package
    users = {path for path in (ROOT / "jaxrl").rglob("*.py") if f"import {package}" in path.read_text()}
    users |= {path for path in (ROOT / "jaxrl").rglob("*.py") if f"from {package}" in path.read_text()}
    assert users == {file}


@EACH
@pytest.mark.long
def test_names_are_listed_and_an_unknown_one_is_refused(suite):
    names = adapter(suite).names()
    assert SAMPLES[suite].name in names and len(set(names)) == len(names)
    assert f"{suite}:{SAMPLES[suite].name}" in jaxrl.environments()
    refused(lambda: jaxrl.make(f"{suite}:{SAMPLES[suite].name}x"), "did you mean")
    refused(lambda: jaxrl.make(f"{suite}:{SAMPLES[suite].name}", nonsense=1), "nonsense")


@EACH
@pytest.mark.long
def test_the_sample_keeps_the_protocol_and_is_drawn(suite):
    jaxrl.check_env(environment(suite), steps=30)
    env = unwrapped(environment(suite))
    if suite not in ("pgx", "playground"):  # which has no drawing, and which needs a display
        state, first = env.reset(jax.random.key(0))
        first = jax.tree.map(lambda x: x[0], first) if env.num_agents > 1 else first
        drawing = drawing_of(env, env.observation_space)
        frame = drawing.draw(jax.device_get(drawing.view(env, state, first)))
        assert frame.dtype == np.uint8 and frame.shape[-1] == 3
        assert frame.std() >= 5 * (suite != "octax")  # whose screen is black at first


@EACH
@pytest.mark.learning
def test_every_name_keeps_the_protocol_under_random_and_under_legal_play(suite):
    for name in adapter(suite).names():
        env = jaxrl.make(f"{suite}:{name}")
        jaxrl.check_env(env, steps=50)
        if env_spec(env).masked and num_agents(env) == 1:
            following = play(env, jax.random.key(0), 16, 300)[1]
            assert outside(env, following) == [] and np.isfinite(following.reward).all(), name
            assert all(mask.any(axis=-1).all() for mask in jax.tree.leaves(following.action_mask)), name


@pytest.mark.long
@pytest.mark.parametrize("suite", each_suite())
def test_a_killed_run_is_the_whole_one_and_four_devices_are_one(suite, tmp_path):
    whole = train(suite, tmp_path / "whole")

    def killed(moment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(suite, tmp_path / "killed", callbacks=[FunctionCallback(killed)], log_every=4 * ROWS)
    resumed = train(suite, tmp_path / "killed", log_every=4 * ROWS)
    assert_equal(whole.state, resumed.state)
    four = train(suite, None, devices=4)
    assert_equal(whole.state, four.state, 1e-5)
