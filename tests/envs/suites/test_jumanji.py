"""The adapter of Jumanji: it shows what Jumanji shows, and tells time limits from ends."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples
from helpers.legal_play import play
from helpers.programs import assert_equal

import jaxrl
from jaxrl.envs.suite import foreign_rules

pytestmark = suite_samples.needs("jumanji")

COUNT = 16  # episodes at once
raw = functools.partial(suite_samples.raw, "jumanji")


def generator(path, *args):
    module = importlib.import_module(f"jumanji.environments.{path}.generator")
    kind = "RandomWalkGenerator" if "connector" in path else "RandomGenerator"
    return getattr(module, kind)(*args)


# Jumanji's own environment; our name and parameters for it; whether its task ended in a state, for Jumanji itself calls
# a time limit a termination in all of these but Connector.
CASES = {
    "Maze-v0": (
        lambda: {"generator": generator("routing.maze", 4, 4), "time_limit": 7},
        {"num_rows": 4, "num_cols": 4, "time_limit": 7},
        lambda s: s.agent_position == s.target_position,
    ),
    "Tetris-v0": (
        lambda: {"num_rows": 6, "num_cols": 5, "time_limit": 7},
        {"num_rows": 6, "num_cols": 5, "time_limit": 7},
        lambda s: ~s.action_mask.any(),
    ),
    "Connector-v3": (
        lambda: {"generator": generator("routing.connector", 5, 2), "time_limit": 6},
        {"grid_size": 5, "num_agents": 2, "time_limit": 6},
        lambda s: (s.agents.connected | ~s.action_mask[:, 1:].any(axis=-1)).all(),
    ),
    "SearchAndRescue-v0": (
        lambda: {
            "generator": generator("swarms.search_and_rescue", 2, 2),
            "time_limit": 8,
            "target_contact_range": 0.3,
        },
        {"num_searchers": 2, "num_targets": 2, "time_limit": 8, "target_contact_range": 0.3},
        lambda s: s.targets.found.all(),
    ),
}


def by_hand(name, options, seed, actions):
    """Jumanji's states and time steps after the same actions, from the same keys."""
    import jumanji

    env = jumanji.make(name, **options)

    @jax.jit
    def run(key, actions):
        def one(state, action):
            state, after = jax.vmap(env.step)(state, action)
            return state, (state, after)

        state, first = jax.vmap(env.reset)(jax.random.split(jax.random.split(key)[0], COUNT))
        return first, *jax.lax.scan(one, state, actions)[1]

    with foreign_rules():
        return jax.device_get(run(jax.random.key(seed), actions))


def as_dict(observation):
    items = vars(observation) if hasattr(observation, "__dict__") else observation._asdict()
    return {
        k: as_dict(x) if hasattr(x, "_asdict") or hasattr(x, "__dataclass_fields__") else x
        for k, x in items.items()
        if k not in ("action_mask", "step", "step_count")
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_every_step_is_jumanjis_and_last_ones_are_ends_or_time_limits(name):
    options, parameters, has_ended = CASES[name]
    limit = parameters["time_limit"]
    first, following, actions = jax.device_get(play(raw(name, **parameters), jax.random.key(3), COUNT, limit))
    if name == "Tetris-v0":
        actions = np.stack(np.unravel_index(actions, (4, 5)), axis=-1)
    theirs_first, state, theirs = by_hand(name, options(), 3, actions)
    assert_equal(as_dict(theirs_first.observation), first.observation)
    # Both go on after an end, by the same rules; what counts is up to the end.
    last = following.terminated | following.truncated
    alive = np.cumsum(last, axis=0) - last == 0
    np.testing.assert_array_equal((theirs.step_type == 2)[alive], last[alive])
    ended = jax.vmap(jax.vmap(has_ended))(jax.tree.map(jnp.asarray, state))
    np.testing.assert_array_equal(np.asarray(ended)[alive], following.terminated[alive])
    assert (following.terminated & alive).any() and (following.truncated & alive).any()
    assert not (following.truncated & alive)[:-1].any(), "only at the limit"
    assert not (following.terminated & following.truncated).any()
    kept = lambda tree: jax.tree.map(lambda x: x[alive], tree)  # noqa: E731
    assert_equal(kept(as_dict(theirs.observation)), kept(following.observation), 1e-6)
    reward = theirs.reward.reshape(limit, COUNT, -1).sum(axis=-1)
    np.testing.assert_allclose(reward[alive], following.reward[alive], rtol=1e-6)
    if (mask := following.action_mask) is not None:
        raw_mask = theirs.observation.action_mask
        allowed = raw_mask.reshape(limit, COUNT, -1)
        some = allowed.any(axis=-1, keepdims=True)
        np.testing.assert_array_equal(np.where(some, allowed, True)[alive & ~last], mask[alive & ~last])
    for extra, values in theirs.extras.items():
        np.testing.assert_allclose(values[alive], following.info[extra][alive], rtol=1e-6)


def test_all_but_what_needs_a_download_is_listed():
    import jumanji

    assert {*suite_samples.adapter("jumanji").names()} == jumanji.registered_environments() - {"Sokoban-v0"}


def test_parameters_are_those_of_the_environment_and_of_its_generator():
    env = raw("RobotWarehouse-v0", num_agents=2, shelf_rows=1, time_limit=30)
    assert env.action_space == jaxrl.spaces.MultiDiscrete((5, 5)) and env.numbers == {"time_limit": 30}
    assert raw("Maze-v0").time_limit == 100 and raw("Maze-v0", num_rows=5).time_limit == 50  # rows times columns
    assert raw("TSP-v1").time_limit == float("inf")
    assert raw("MMST-v0", max_step=100, time_limit=100).time_limit == 100


def test_combinations_under_one_mask_are_one_action():
    sizes = {"BinPack-v2": 800, "FlatPack-v0": 8100, "Minesweeper-v0": 100, "Sudoku-v0": 729, "Tetris-v0": 40}
    for name, n in (sizes | {"RubiksCube-v0": 18}).items():
        assert raw(name).action_space == jaxrl.spaces.Discrete(n)
    assert raw("MultiCVRP-v0").action_space == jaxrl.spaces.MultiDiscrete((21, 21))
