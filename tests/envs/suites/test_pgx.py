"""The adapter of PGX: games of several players as one agent's, seen from its seat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples
from helpers.legal_play import play

from jaxrl.envs.suite import foreign_rules

pytestmark = suite_samples.needs("pgx")

COUNT = 32  # games at once
raw = functools.partial(suite_samples.raw, "pgx")


@pytest.mark.long
def test_games_against_random_are_played_by_the_rules_and_their_last_board_is_seen():
    """Every game is read off its observations and judged by rules written here."""
    env = raw("tic_tac_toe")
    first, following, actions = jax.device_get(play(env, jax.random.key(1), COUNT, 5))
    results, openings = [], set()
    for game in range(COUNT):
        before = first.observation[game].reshape(9, 2)
        assert before[:, 0].sum() == 0 and before[:, 1].sum() <= 1
        opened = bool(before[:, 1].any())  # by the opponent
        openings.add(opened)
        for t in range(5):
            after, action = following.observation[t, game].reshape(9, 2), actions[t, game]
            mine, theirs = after[:, 0], after[:, 1]
            assert mine[action] and not before[action].any()
            np.testing.assert_array_equal(np.flatnonzero(mine & ~before[:, 0]), [action])
            assert (theirs >= before[:, 1]).all() and not (mine & theirs).any()
            won, lost = has_line(mine), has_line(theirs)
            over = won or lost or after.any(axis=-1).all()
            replies = theirs.sum() - before[:, 1].sum()
            assert replies == (0 if won or (mine | before[:, 1]).all() else 1)
            assert following.terminated[t, game] == over and not following.truncated[t, game]
            assert following.reward[t, game] == float(won) - float(lost)
            if over:
                results.append(following.reward[t, game])
                break
            np.testing.assert_array_equal(following.action_mask[t, game], ~after.any(axis=-1))
            before = after
    assert set(results) == {-1.0, 0.0, 1.0} and openings == {False, True} and len(results) == COUNT


def has_line(marks):
    lines = np.asarray([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])
    return bool(marks[lines].all(axis=-1).any())


@pytest.mark.long
def test_a_game_of_one_player_is_pgxs_own():
    import pgx

    env, theirs = raw("minatar-breakout", sticky_action_prob=0.0), pgx.make("minatar-breakout")
    theirs = type(theirs)(sticky_action_prob=0.0)
    first, following, actions = jax.device_get(play(env, jax.random.key(2), 4, 40))

    @jax.jit
    def run(boards, actions):
        def one(state, action):
            state = jax.vmap(lambda s, a: theirs.step(s, a, jax.random.key(0)))(state, action)
            return state, (state.observation, state.rewards[:, 0], state.terminated)

        return jax.lax.scan(one, boards, actions)[1]

    with foreign_rules():
        # The adapter's own deals; what follows them has no chance in it, without sticky actions.
        keys = jax.random.split(jax.random.split(jax.random.key(2))[0], 4)
        start = jax.vmap(env.reset)(keys)[0].game
        start = start.replace(observation=jnp.asarray(first.observation))
        observation, reward, terminated = jax.device_get(run(start, actions))
    alive = np.cumsum(terminated, axis=0) - terminated == 0
    assert (terminated & alive).any() and first.action_mask is None
    np.testing.assert_array_equal(observation[alive], following.observation[alive])
    np.testing.assert_array_equal(reward[alive], following.reward[alive])
    np.testing.assert_array_equal(terminated[alive], following.terminated[alive])


@pytest.mark.long
def test_freeways_timer_truncates_and_its_last_screen_is_pgxs():
    import pgx

    env, theirs = raw("minatar-freeway"), pgx.make("minatar-freeway")
    state, now = jax.jit(env.reset)(jax.random.key(0))

    @jax.jit
    def late(state, key):
        near = state.replace(game=state.game.replace(_terminate_timer=jnp.asarray(1, jnp.int32)))

        def one(state, key):
            state, after = env.step(state, jnp.asarray(0), key)
            return state, (state.game, after)

        return jax.lax.scan(one, near, jax.random.split(key, 4))[1]

    games, after = jax.device_get(late(state, jax.random.key(1)))
    assert not after.terminated.any() and after.truncated.any() and not after.truncated[0]
    np.testing.assert_array_equal(after.truncated, games.terminated)
    end = int(np.argmax(after.truncated))
    with foreign_rules():
        last = theirs.observe(jax.tree.map(lambda x: jnp.asarray(x[end]), games))
    np.testing.assert_array_equal(last, after.observation[end])


def test_bridge_is_left_out_and_arguments_are_the_games_own():
    names = suite_samples.adapter("pgx").names()
    assert "bridge_bidding" not in names and len(names) == 20
    assert raw("go_9x9", komi=5.5).parameters == {"komi": 5.5}


@pytest.mark.long
def test_self_play_is_the_game_of_both_players():
    """Rows 2 k and 2 k + 1 are the players of one game, and it is PGX's, move by move."""
    import pgx

    env, game = raw("tic_tac_toe", opponent="self"), pgx.make("tic_tac_toe")
    assert env.num_agents == 2

    def one(key):
        state, timestep = env.reset(key)

        def move(carry, key):
            state, timestep = carry
            key_action, key_step = jax.random.split(key)
            action = jax.random.categorical(key_action, jnp.where(timestep.action_mask, 0.0, -jnp.inf)).astype(
                jnp.int32
            )
            mover = state.game.current_player
            following = game.step(state.game.replace(observation=jnp.zeros((3, 3, 2), bool)), action[mover])
            state, timestep = env.step(state, action, key_step)
            seen = jax.vmap(lambda seat: game._observe(following, seat))(jnp.arange(2))
            return (state, timestep), (timestep, mover, following.rewards, following.terminated, seen, following)

        return timestep, jax.lax.scan(move, (state, timestep), jax.random.split(key, 9))[1]

    first, after = jax.device_get(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), COUNT)))
    steps, movers, rewards, over, seen, states = after
    endings = []
    for k in range(COUNT):
        end = np.flatnonzero(over[k])[0]
        part = slice(0, end + 1)
        np.testing.assert_array_equal(steps.observation[k, part], seen[k, part])
        np.testing.assert_array_equal(steps.reward[k, part], rewards[k, part])
        np.testing.assert_array_equal(steps.terminated[k, part], over[k, part, None].repeat(2, 1))
        assert not steps.truncated[k, part].any()
        for t in range(end):  # who waits may do nothing but nothing
            mover = states.current_player[k, t]
            np.testing.assert_array_equal(steps.action_mask[k, t, mover], states.legal_action_mask[k, t])
            np.testing.assert_array_equal(steps.action_mask[k, t, 1 - mover], np.arange(9) == 0)
        endings.append(tuple(rewards[k, end]))
    assert {(1.0, -1.0), (-1.0, 1.0)} < set(endings) and set(movers[:, 0]) == {0, 1}
