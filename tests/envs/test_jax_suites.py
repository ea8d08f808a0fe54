"""What every suite of `jaxrl.envs.suites` holds; the rest of each is in its own file of tests/envs/suites."""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.legal_play import outside, play
from helpers.programs import PPO, ROWS, anakin, assert_equal
from helpers.refused import raises, refused
from helpers.suite_samples import SAMPLES, SUITES, adapter, each_suite, needs

import jaxrl
from jaxrl.core import suite_modules
from jaxrl.core.errors import ConfigError
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


# For each environment: parameters, and what the message says of them.
REFUSED = {
    "craftax:Craftax-Symbolic-AutoReset-v1": [({}, "'Craftax-Symbolic-v1'")],  # it hides the last observation
    "craftax:Craftax-Classic-Symbolic-v1": [
        ({"max_timesteps": 0}, "max_timesteps"),
        ({"map_size": (64, 32)}, "map_size"),
        ({"map_size": (50, 50)}, "map_size"),
        ({"map_size": 64}, "map_size"),
        ({"max_zombies": 0}, "max_zombies"),
        ({"fractal_noise_angles": 1}, "fractal_noise_angles"),
        ({"max_attribute": 9}, "max_attribute"),  # of the larger game
        ({"spawn_cow_chance": 1.5}, "spawn_cow_chance=1.5 must be at least 0 and at most 1"),
        ({"spawn_zombie_night_chance": -0.1}, "spawn_zombie_night_chance"),
        ({"spawn_skeleton_chance": float("nan")}, "spawn_skeleton_chance"),
        ({"zombie_health": 0}, "zombie_health=0 must be at least 1"),
        ({"mob_despawn_distance": -1}, "mob_despawn_distance"),
    ],
    "jaxmarl:MPE_simple_spread_v3": [
        ({"num_agents": 1}, "num_agents=1"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"shaped_rewards": 1.0}, "shaped_rewards"),
    ],
    "jaxmarl:HeuristicEnemySMAX": [({"scenario": "3n"}, "did you mean '3m'")],
    "jaxmarl:overcooked": [({"shaped_rewards": float("inf")}, "finite")],
    "jumanji:Maze-v0": [({"time_limit": 0}, "at least 1")],
    "jumanji:MMST-v0": [({"time_limit": 100}, "at most max_step=70"), ({"max_step": 50}, "at most max_step=50")],
    "jumanji:TSP-v1": [({"num_cities": 0}, "num_cities=0 must be at least 1")],
    "jumanji:SlidingTilePuzzle-v0": [({"num_random_moves": -1}, "num_random_moves=-1 must be at least 1")],
    "jumanji:Knapsack-v1": [
        ({"total_budget": -1.0}, "total_budget=-1.0 must be at least 0"),
        ({"total_budget": float("nan")}, "total_budget=nan"),
    ],
    "jumanji:Game2048-v1": [({"num_rows": 4}, "num_rows")],
    "jumanji:Sokoban-v0": [({}, "downloads its levels")],
    "navix:Navix-Empty-5x5-v0": [
        ({"observation": "symbolik"}, "did you mean 'symbolic'"),
        ({"max_steps": 0}, "max_steps"),
        ({"penalty_coeff": -0.5}, "penalty_coeff=-0.5 must be at least 0"),
        ({"penalty_coeff": float("inf")}, "penalty_coeff"),
        ({"gamma": 0.9}, "gamma"),  # which NAVIX only hands to agents
        ({"height": 9}, "height"),
    ],
    "octax:pong": [
        ({"max_num_steps_per_episodes": 0}, "at least 1"),
        ({"frame_skip": 0}, "at least 1"),
        ({"fps": 1000}, "0 instructions"),
        ({"frame_skip": 10**6}, "11000000 instructions"),
        ({"render_scale": 4}, "unknown parameter"),
    ],
    "octax:cavern": [({}, "cavern")],  # without a level
    "pgx:tic_tac_toe": [({"opponent": "perfect"}, "opponent")],
    "pgx:2048": [({"opponent": "random"}, "unknown parameter")],
    "pgx:go_9x9": [({"size": 5}, "unknown parameter")],
    "pgx:hex": [({"size": 5}, "unknown parameter")],
    "pgx:minatar-breakout": [({"sticky_action_prob": "often"}, "sticky_action_prob='often'")],
    "playground:CartpoleBalance": [
        ({"impl": "warpp"}, "did you mean 'warp'"),
        ({"impl": "warp"}, "needs an NVIDIA GPU; use impl='jax'"),
        ({"randomize": True}, "does not randomize CartpoleBalance"),
        ({"njmax": 7}, "changes nothing with impl='jax'"),
        ({"episode_length": 0}, "must be at least 1"),
        ({"episode_length": 10**12}, "must be at most 2,147,483,647"),
        ({"action_repeat": 2}, "action_repeat"),
        ({"ctrl_dt": 0.001}, "ctrl_dt=0.001 must be a multiple of sim_dt=0.01"),
        ({"sim_dt": 0.003}, "must be a multiple"),
        ({"ctrl_dt": 1000.0}, "at most 10,000 times sim_dt"),
        ({"system": {"opt.gravityx": 0.0}}, "gravityx"),
        ({"system": {"opt.gravity": [0.0]}}, "is not"),
        ({"system": {"opt.wind": [0.0, 0.0, 1.0]}}, "changes nothing"),
    ],
    "xminigrid:MiniGrid-Empty-5x5": [
        ({"view_size": 4}, "view_size"),
        ({"view_size": 1}, "view_size"),
        ({"max_steps": 0}, "max_steps"),
        ({"num_objects": 3}, "num_objects"),  # of Playground
        ({"ruleset": 3}, "ruleset=3 .* changes nothing"),
        ({"benchmark": "trivial-21k"}, "benchmark"),
        ({"height": 9}, "height"),  # names have the sizes
    ],
    "xminigrid:MiniGrid-Playground": [({"num_objects": 0}, "num_objects")],
}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name.split(":")[0])) for name in REFUSED])
def test_what_cannot_be_is_refused(name):
    for parameters, match in REFUSED[name]:
        raises(ConfigError, match, jaxrl.make, name, **parameters)


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
