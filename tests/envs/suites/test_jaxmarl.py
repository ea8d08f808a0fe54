"""The adapter of JaxMARL, against its environments stepped by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import suite_samples

from jaxrl.envs.suite import foreign_rules

pytestmark = suite_samples.needs("jaxmarl")
raw = functools.partial(suite_samples.raw, "jaxmarl")


def both(name, steps, seed=0, **parameters):
    """Time steps of the raw environment [steps + 1, agents, ...], and what JaxMARL gives for its keys and actions."""
    env = raw(name, **parameters)
    own = env.foreign

    def play(key):
        key_reset, key = jax.random.split(key)
        state, timestep = env.reset(key_reset)
        with foreign_rules():
            seen, own_state = own.reset(key_reset)

        def one(carry, key):
            state, own_state, timestep = carry
            key_action, key_step = jax.random.split(key)
            mask = timestep.action_mask
            logits = (
                jnp.zeros((len(own.agents), env.action_space.n)) if mask is None else jnp.where(mask, 0.0, -jnp.inf)
            )
            action = jax.random.categorical(key_action, logits).astype(jnp.int32)
            state, timestep = env.step(state, action, key_step)
            with foreign_rules():
                seen, own_state, reward, done, info = own.step_env(
                    key_step, own_state, dict(zip(own.agents, action, strict=True))
                )
                # A while loop needs what it carries in one type.
                types = jax.eval_shape(own.reset, key)[1]
                own_state = jax.tree.map(lambda x, t: jnp.asarray(x, t.dtype), own_state, types)
            return (state, own_state, timestep), (timestep, seen, reward, done, own_state, info)

        after = jax.lax.scan(one, (state, own_state, timestep), jax.random.split(key, steps))[1]
        return timestep, seen, after

    first, seen, after = jax.device_get(jax.jit(play)(jax.random.key(seed)))
    return own, first, seen, after


@pytest.mark.long
def test_a_time_limit_of_particles_cuts_off_and_its_last_observation_is_seen():
    own, first, seen, (steps, observations, rewards, dones, *_) = both("MPE_simple_spread_v3", 8, max_steps=5)
    assert first.first.all() and first.observation.shape == (3, 18)
    for i, agent in enumerate(own.agents):
        np.testing.assert_array_equal(first.observation[i], seen[agent])
        np.testing.assert_array_equal(steps.observation[:6, i], observations[agent][:6])
        np.testing.assert_array_equal(steps.reward[:6, i], rewards[agent][:6])
    over = np.flatnonzero(dones["__all__"])[0]
    assert over == 5  # of steps from 0: it compares before it counts
    assert steps.truncated[over].all() and not steps.truncated[:over].any() and not steps.terminated[: over + 1].any()


@pytest.mark.long
def test_units_that_die_are_out_and_paid_until_the_battle_ends_for_all():
    own, first, _, (steps, observations, rewards, dones, states, _) = both("HeuristicEnemySMAX", 60, scenario="3m")
    alive = states.state.unit_alive
    over = np.flatnonzero(dones["__all__"])[0]
    lost = ~alive[over, : own.num_allies].any()
    assert lost  # at random against the heuristic
    for i, agent in enumerate(own.agents):
        dead = np.flatnonzero(~alive[:, i])[0]
        np.testing.assert_array_equal(steps.active[: over + 1, i], alive[: over + 1, i])
        assert not steps.last[:over, i].any() and steps.terminated[over, i]
        assert steps.action_mask[dead, i].sum() == 1  # only to stop
        np.testing.assert_array_equal(steps.observation[: over + 1, i], observations[agent][: over + 1])
        np.testing.assert_allclose(steps.reward[: over + 1, i], rewards[agent][: over + 1])
    assert not steps.truncated[: over + 1].any()
    assert len({np.flatnonzero(~alive[:, i])[0] for i in range(own.num_allies)}) > 1  # else this saw nothing
    assert first.action_mask.shape == (3, 8) and first.action_mask.any(axis=-1).all()


@pytest.mark.long
def test_shaped_rewards_of_a_kitchen_are_added():
    own, _, _, (steps, _, rewards, _, _, info) = both("overcooked", 300, shaped_rewards=0.5)
    for i, agent in enumerate(own.agents):
        shaped = info["shaped_reward"][agent]
        assert shaped.any()
        np.testing.assert_allclose(steps.reward[:, i], rewards[agent] + 0.5 * shaped)


def test_vectors_are_filled_up_and_actions_that_an_agent_lacks_are_masked():
    own, first, seen, (steps, *_) = both("MPE_simple_speaker_listener_v4", 3)
    sizes = [seen[agent].size for agent in own.agents]
    counts = [own.action_space(agent).n for agent in own.agents]
    assert len(set(sizes)) == len(set(counts)) == 2  # else this says nothing
    for i, agent in enumerate(own.agents):
        np.testing.assert_array_equal(first.observation[i, : sizes[i]], seen[agent])
        assert not first.observation[i, sizes[i] :].any()
        np.testing.assert_array_equal(steps.action_mask[0, i], np.arange(max(counts)) < counts[i])


def test_what_all_see_and_who_one_is_can_be_observed():
    env = raw("MPE_simple_spread_v3", world_state=True, agent_id=True)
    seen = env.reset(jax.random.key(0))[1].observation
    plain = raw("MPE_simple_spread_v3").reset(jax.random.key(0))[1].observation
    np.testing.assert_array_equal(seen["observation"][:, :18], plain)
    np.testing.assert_array_equal(seen["observation"][:, 18:], np.eye(3))
    np.testing.assert_array_equal(seen["world_state"], np.broadcast_to(np.ravel(plain), (3, 54)))
