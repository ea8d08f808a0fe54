"""What SAC, MPO, TD3, DDPG and D4PG share: devices, normalization, warm-up and noise; what they and others refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import offline
from helpers.continuous import (
    ALGORITHMS,
    BATCH,
    BOX,
    SAC,
    SPEC,
    STOCHASTIC,
    initial,
    transitions,
    updated,
)
from helpers.programs import resumed
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import acting
from jaxrl.algos.acting import GaussianNoise, Noise
from jaxrl.core import spaces
from jaxrl.core.keys import root_key
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import ActorState, EnvSpec, TimeStep
from jaxrl.networks import ActionValues, Actor, CategoricalValues, Critic

ENV = jaxrl.make("probe:ActionReward", continuous=True)
EVERY = ALGORITHMS | offline.ALGORITHMS


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_no_array_is_in_the_state_twice(name):
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(initial(EVERY[name]))]
    assert len(set(places)) == len(places)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_device_learns_what_two_do(name):
    algo, states = ALGORITHMS[name].replace(min_size=16), []
    for devices in (1, 2):
        bound = jaxrl.Anakin(8, devices=devices, shards=4).bind(algo, ENV)
        state, report = bound.chunk(algo, ENV, bound.start(algo, ENV, 0), 12, 12)  # D4PG's items are of six steps
        assert report.failed_at == -1 and report.iterations > 4
        states.append(state.learner)
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mpo", "crr"])
def test_targets_are_copied_once_a_period(name):
    algo = EVERY[name].replace(target_period=3)
    state = initial(algo)
    for number in range(1, 5):
        new = updated(algo, state, transitions(seed=number), jax.random.key(0))[0]
        for then, now in ((state.policy, new.policy), (state.critic, new.critic)):
            offline.same(now.target_params, now.params if number == 3 else then.target_params)
        state = new


# --- normalizing observations --------------------------------------------------------------------------------------


def scaled(batch, by):
    return batch.replace(observation=by * batch.observation, next_observation=by * batch.next_observation)


def after_updates(algo, by):
    """The learner after five updates of observations in other units, and what it then does."""
    state = initial(algo)
    for i in range(5):
        state, info = updated(algo, state, scaled(transitions(seed=i), by), jax.random.key(i))
    seen = moments(BATCH).replace(observation=by * transitions(seed=9).observation)
    carry, keys = acting.ActingCarry((), ()), jax.random.split(jax.random.key(0), BATCH)
    action = algo.act(algo.actor(state), seen, carry, keys, spec=SPEC, explore=False)
    return state, info.metrics, action.action


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_units_of_normalized_observations_do_not_matter(name):
    algo = ALGORITHMS[name].replace(normalize_observation=True)
    (one, told, action), (other, told_other, action_other) = (after_updates(algo, by) for by in (1.0, 1e3))
    for a, b in zip(*map(jax.tree.leaves, ((one.policy, one.critic), (other.policy, other.critic))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(action, action_other, rtol=1e-3, atol=1e-4)
    for key in told:
        np.testing.assert_allclose(told[key], told_other[key], rtol=1e-3, atol=1e-4)
    assert np.abs(after_updates(ALGORITHMS[name], 1e3)[2] - action).max() > 0.1, "without, they do"


@pytest.mark.long
def test_statistics_are_of_what_is_drawn_and_counts():
    """Both ends of a transition are normalized with them, and so is what is acted on; the target sees the same."""
    algo = SAC.replace(normalize_observation=True, observation_clip=1.5)
    state, batch = initial(algo), scaled(transitions(), 10.0)
    new, info = updated(algo, state, batch, jax.random.key(1))
    drawn = np.asarray(batch.observation)[: BATCH - 1]
    (moment,) = new.statistics.moments.values()
    np.testing.assert_allclose(moment.mean, drawn.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moment.variance, drawn.var(axis=0), rtol=1e-4)
    ends = [np.clip((x - drawn.mean(axis=0)) / drawn.std(axis=0), -1.5, 1.5) for x in batch_ends(batch)]
    plain = updated(
        SAC,
        state.replace(statistics=()),
        batch.replace(observation=ends[0], next_observation=ends[1]),
        jax.random.key(1),
    )
    for a, b in zip(jax.tree.leaves(plain[0]), jax.tree.leaves(new.replace(statistics=())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert algo.actor(new).statistics == new.statistics and SAC.actor(plain[0]).statistics == ()


def batch_ends(batch):
    return np.asarray(batch.observation), np.asarray(batch.next_observation)


def test_statistics_resume(tmp_path):
    algo = SAC.replace(normalize_observation=True)

    whole = resumed(tmp_path, algo, ENV, 128, topology=jaxrl.Anakin(num_envs=4, devices=1))
    assert int(whole.state.learner.statistics.count) > BATCH


# --- acting --------------------------------------------------------------------------------------------------------


def moments(batch):
    flags = jnp.zeros(batch, bool)
    return TimeStep(jnp.ones((batch, 3)), jnp.zeros(batch), flags, flags, flags)


@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "td3", "ddpg"))
def test_actions_are_uniform_over_the_box_until_the_first_update(name):
    algo, batch = resolve_schedules(ALGORITHMS[name], jnp.float32(0)), 4096
    state, keys = algo.init(jax.random.key(0), SPEC), jax.random.split(root_key(1), batch)
    compiled = jax.jit(functools.partial(algo.act, spec=SPEC), static_argnames="explore")

    def act(updates, explore):
        actor = algo.actor(state.replace(updates=jnp.int32(updates)))
        return np.asarray(compiled(actor, moments(batch), acting.ActingCarry((), ()), keys, explore=explore).action)

    random, later, greedy = act(0, True), act(1, True), act(0, False)
    unit = (random - BOX.low) / (BOX.high - BOX.low)
    for quantile in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(np.quantile(unit, quantile, axis=0), quantile, atol=0.03)
    assert (random >= BOX.low).all() and (random <= BOX.high).all()
    assert (later >= BOX.low).all() and (later <= BOX.high).all()
    assert np.ptp(greedy, axis=0).max() == 0, "the best action is no matter of chance"
    # All saw the same observation, so what differs is exploration.
    assert 0.01 < ((later - BOX.low) / (BOX.high - BOX.low)).std(axis=0).min()
    if name not in STOCHASTIC:
        noise = ((later - greedy) / (0.5 * (BOX.high - BOX.low))).std(axis=0)
        assert noise.max() < 1.2 * algo.noise.std


def test_noise_is_in_units_of_half_the_range_and_limited():
    keys = jax.random.split(jax.random.key(0), 4096)
    middle = jnp.broadcast_to(jnp.float32([0.0, 5.0]), (4096, 2))
    noise = np.asarray(acting.add_noise(middle, keys, 0.2, BOX) - middle)
    np.testing.assert_allclose(noise.std(axis=0), [0.4, 1.0], rtol=0.05)
    limited = np.asarray(acting.add_noise(middle, keys, 0.2, BOX, 0.3) - middle)
    np.testing.assert_allclose(np.abs(limited).max(axis=0), [0.6, 1.5], rtol=1e-4)
    edge = acting.add_noise(middle + jnp.float32([[2.0, 5.0]]), keys, 0.2, BOX)
    assert float(edge.max(axis=0)[0]) == 2.0 and float(edge.max(axis=0)[1]) == 10.0


def test_correlated_noise_is_a_recursion_that_begins_anew_with_each_episode():
    envs, steps, correlation = 2000, 12, 0.8
    noise, fresh, first = np.zeros((envs, 2)), [], np.zeros((steps, envs), bool)
    first[0] = first[7, ::2] = True
    carry = jnp.zeros((envs, 2))
    for step in range(steps):
        key = jax.random.split(jax.random.key(step), envs)
        carry = acting.next_noise(carry, correlation, moments(envs).replace(first=jnp.asarray(first[step])), key)
        drawn = np.asarray(jax.vmap(lambda k: jax.random.normal(k, (2,)))(key))
        noise = np.where(first[step][:, None], drawn, correlation * noise + 0.6 * drawn)
        np.testing.assert_allclose(carry, noise, atol=1e-6)
        fresh.append(noise)
    np.testing.assert_allclose(np.std(fresh, axis=(1, 2)), 1.0, atol=0.05)  # from the first step on
    before, after = fresh[6], fresh[9]  # three steps apart, over the beginning of an episode in every second one
    np.testing.assert_allclose(np.mean(before[1::2] * after[1::2]), correlation**3, atol=0.06)
    np.testing.assert_allclose(np.mean(before[::2] * after[::2]), 0.0, atol=0.06)


def test_noise_is_held_for_a_zeta_distributed_number_of_steps():
    """Each beginning of an episode draws anew; n of at most 4 steps have a probability in proportion to 1 / n^2."""
    envs, most = 20_000, 4
    algo = resolve_schedules(SAC.replace(noise=Noise(hold=most)), jnp.float32(0))
    carry = algo.initial_carry(SPEC, jnp.int32(0), 1)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (envs, *x.shape)), carry)
    actor = algo.actor(algo.init(jax.random.key(0), SPEC))
    hold, noises, first = jax.jit(algo.noise.step), [], np.zeros((9, envs), bool)
    first[0] = first[5, ::2] = True
    for step in range(9):
        keys = jax.random.split(jax.random.key(step), envs)
        carry = hold(actor, carry, moments(envs).replace(first=jnp.asarray(first[step])), keys)
        noises.append(np.asarray(carry.noise))
    changes = np.any(np.diff(noises, axis=0) != 0.0, axis=-1)  # whether step k + 1 is another than step k
    assert changes[4, ::2].all() and not changes[4, 1::2].all()
    held = 1 + np.argmax(changes, axis=0)
    found = np.bincount(held, minlength=most + 1)[1:] / envs
    np.testing.assert_allclose(found, 1 / np.arange(1, 5) ** 2 / np.sum(1 / np.arange(1, 5) ** 2), atol=0.015)
    np.testing.assert_allclose(np.std(noises, axis=(1, 2)), 1.0, atol=0.05)


def test_each_episode_draws_its_noise():
    """Uniformly between the two, where an episode begins; it stays until the next."""
    envs = 512
    timestep = moments(envs).replace(first=jnp.ones(envs, bool))
    noise = GaussianNoise(std=0.4, least_std=0.1)
    state = ActorState(params=(), exploration=noise.levels())
    carry = acting.ActingCarry((), (), (), jnp.zeros(envs))
    one, other = (jax.random.split(jax.random.key(n), envs) for n in range(2))
    begun = noise.step(state, carry, timestep, one)
    drawn = np.asarray(begun.noise_scale)
    assert (drawn >= 0.1).all() and (drawn <= 0.4).all()
    np.testing.assert_allclose([drawn.mean(), drawn.std()], [0.25, 0.3 / np.sqrt(12)], atol=0.01)
    np.testing.assert_array_equal(noise.step(state, begun, moments(envs), other).noise_scale, drawn)
    again = noise.step(state, begun, timestep, other)
    assert abs(np.corrcoef(drawn, again.noise_scale)[0, 1]) < 0.15


RANDOM_FIRST = ("sac",)  # its random actions have a correlation of their own


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "sac", "td3"))
def test_actions_with_correlated_noise_are_distributed_as_without_and_follow_each_other(name):
    algo, batch = resolve_schedules(ALGORITHMS[name], jnp.float32(0)), 4096
    state = algo.init(jax.random.key(0), SPEC)

    def acting(algo):
        return algo, jax.jit(functools.partial(algo.act, spec=SPEC), static_argnames="explore")

    def acted(acting, updates, explore=True):
        algo, act = acting
        actor = algo.actor(state.replace(updates=jnp.int32(updates)))
        initial, found = algo.initial_carry(SPEC, jnp.int32(0), 1), []
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), initial)
        for step in range(2):
            shown = moments(batch).replace(first=jnp.full(batch, step == 0))
            keys = jax.random.split(root_key(step), batch)
            output = act(actor, shown, carry, keys, explore=explore)
            carry = output.carry
            found.append((np.asarray(output.action) - BOX.low) / (BOX.high - BOX.low))
        return np.stack(found)

    if name in RANDOM_FIRST:
        algo = algo.replace(noise=Noise())
    plain, wandering = (acting(algo.replace(noise=algo.noise.replace(correlation=x))) for x in (0.0, 0.9))
    for updates in (0, 1):  # uniform, then the policy's
        usual, other = acted(plain, updates), acted(wandering, updates)
        for quantile in (0.1, 0.5, 0.9):
            ends = [np.quantile(x, quantile, axis=(0, 1)) for x in (usual, other)]
            np.testing.assert_allclose(*ends, atol=0.03)
        assert [round(np.corrcoef(*x[..., 0])[0, 1], 1) for x in (usual, other)] == [0.0, 0.9]
    np.testing.assert_array_equal(acted(wandering, 1, explore=False), acted(plain, 1, explore=False))
    if name in RANDOM_FIRST:
        for always in (0.0, 0.6):
            at_first = acting(algo.replace(noise=Noise(correlation=always, random_correlation=0.9)))
            found = [acted(at_first, updates) for updates in (0, 1)]
            assert [round(np.corrcoef(*x[..., 0])[0, 1], 1) for x in found] == [0.9, always]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_what_does_not_fit_is_said(name):
    algo, stochastic = EVERY[name], EVERY[name].policy.stochastic
    assert algo.validate(SPEC, 4, 4) == []
    for space in (spaces.MultiDiscrete((3, 2)), spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1, 1, (2, 2))):
        (problem,) = algo.validate(EnvSpec("x", SPEC.observation_space, space), 4, 4)
        assert "bounded Box" in problem and repr(space) in problem
    discrete = EnvSpec("x", SPEC.observation_space, spaces.Discrete(3))
    assert (algo.validate(discrete, 4, 4) == []) == stochastic
    if name == "bc":
        return
    wrong = algo.replace(policy=Actor(stochastic=not stochastic))
    assert f"must have stochastic={stochastic}" in wrong.validate(SPEC, 4, 4)[0]
    assert "tau=" in algo.replace(tau=0.0).validate(SPEC, 4, 4)[0]
    noisy = algo.replace(critic=Critic(head=ActionValues(noisy=True)))
    assert any("noisy=False" in problem for problem in noisy.validate(SPEC, 4, 4))
    categorical = algo.replace(critic=Critic(head=CategoricalValues()))
    assert (categorical.validate(SPEC, 4, 4) == []) == (name in ALGORITHMS or not stochastic)
