"""What SAC, MPO, TD3, DDPG and D4PG share: targets, averaging, warm-up, devices; and every field changes something."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import (
    ALGORITHMS,
    BATCH,
    BOX,
    D4PG,
    SAC,
    SPEC,
    STOCHASTIC,
    TD3,
    critic_values,
    transitions,
    updated,
)
from helpers.tiers import few, one_quick

import jaxrl
from jaxrl.algos import acting, off_policy, q_learning, train_state
from jaxrl.algos.optimizers import RMSProp
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.keys import root_key
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Lifo, View
from jaxrl.core.types import ActorState, EnvSpec, TimeStep
from jaxrl.networks import ActionValues, Actor, CategoricalValues, Critic, QuantileValues
from jaxrl.parallel.replicas import SingleReplica

ENV = jaxrl.make("probe:ActionReward", continuous=True)
STATIC = {
    "n_step": 3,
    "capacity": 512,
    "min_size": 64,
    "batch_size": 8,
    "rollout_length": 4,
    "replay_ratio": 0.5,
    "samples_per_insert": 24,
}
STATIC |= {"storage": "flashbax", "sampler": Lifo(), "max_times_sampled": 3, "newest": 2, "view": View(2, Lifo())}
STATIC |= {
    "noise_correlation": 0.5,
    "random_correlation": 0.6,
    "target_period": 3,
    "samples": 5,
    "per_dimension": False,
}
STATIC |= {"reset_at": (2, 5), "target_value": "mean", "least_noise": 0.05}
STATIC |= {"policy_delay": 3, "learn_temperature": False, "optimizer": RMSProp(), "normalize_observation": True}
STATIC |= {"joint_policy": True, "target_critics": 1, "policy_value": "mean", "noise_hold": 4, "normalize_reward": True}
STATIC |= {
    "prioritized": False,
    "policy_learning_rate": 1e-3,
    "temperature_learning_rate": 1e-3,
}


def program(algo):
    """The traced program of one iteration, whose inputs begin with the algorithm's numbers."""
    bound = jaxrl.Anakin(4, devices=1, shards=1).bind(algo, ENV)
    state = jax.eval_shape(bound.init, algo, ENV, jax.random.key(0))
    return jax.make_jaxpr(lambda algo, state: bound.iterate(algo, ENV, state, jnp.float32(1e3)))(algo, state)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_number_reaches_the_program(name):
    from jax.interpreters import partial_eval as pe

    # The temperature is in the first state where it is learned, as multipliers are, and its target is of no use where
    # it is not. A share of the entropy is for discrete actions, and the loss of quantiles for a head of them.
    starts = {".temperature", ".alpha_mean", ".alpha_std"}
    algo = ALGORITHMS[name].replace(normalize_observation=True)
    variants = [(algo, starts | {".target_entropy_fraction", ".quantile_huber"})]
    if name in ("sac", "crossq"):
        support, scale = {".v_min", ".v_max"}, {".largest_return"}
        variants = [(algo, variants[0][1] | support | scale)]
        fixed = algo.replace(learn_temperature=False, normalize_reward=True)
        unlearned = {".target_entropy", ".target_entropy_fraction"}
        categorical, quantiles = (
            fixed.replace(critic=dataclasses.replace(algo.critic, head=head))
            for head in (CategoricalValues(5), QuantileValues(5))
        )
        variants += [(categorical, unlearned | {".quantile_huber"}), (quantiles, unlearned | support)]
    if name == "mpo":
        distribution = Critic(widths=(8,), ensemble=1, head=CategoricalValues(5))
        variants = [(algo, starts | {".v_min", ".v_max"}), (algo.replace(critic=distribution), starts)]
    if name in ("ddpg", "td3", "d4pg"):
        support = {"v_min": jaxrl.D4PG().v_min, "v_max": jaxrl.D4PG().v_max}  # others would be refused: they do nothing
        plain, categorical, quantiles = (
            algo.replace(critic=Critic(widths=(8,), ensemble=1, head=head), least_noise=0.05, **support)
            for head in (ActionValues(), CategoricalValues(5), QuantileValues(5))
        )
        ends = {".v_min", ".v_max"}
        variants = [(plain, ends | {".quantile_huber"}), (categorical, {".quantile_huber"}), (quantiles, ends)]
    for algo, elsewhere in variants:
        closed = program(algo)
        used = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[1]
        leaves = jax.tree_util.tree_leaves_with_path(algo)
        unused = {
            jax.tree_util.keystr(path) for (path, _), hit in zip(leaves, used[: len(leaves)], strict=True) if not hit
        }
        assert unused == elsewhere & {jax.tree_util.keystr(path) for path, _ in leaves}


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "td3", rest=[]))
def test_every_other_field_changes_the_program(name):
    algo = ALGORITHMS[name]
    usual, same = str(program(algo)), []
    for field in dataclasses.fields(algo):
        if field.name == "storage" and algo.n_step > 1:
            continue  # flashbax keeps one-step transitions
        if field.name == "sampler" and getattr(algo, "prioritized", False):
            continue  # is one
        if field.name in STATIC:
            other = STATIC[field.name]
        elif field.name == "joint_batch":
            other = not algo.joint_batch
        elif field.name == "critic":
            other = dataclasses.replace(algo.critic, widths=(5,))
        elif field.name == "policy":
            other = Actor(widths=(5,), stochastic=name in STOCHASTIC)
        else:
            continue
        assert other != getattr(algo, field.name), field.name
        if str(program(algo.replace(**{field.name: other}))) == usual:
            same.append(field.name)
    assert same == []


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_array_is_in_the_state_twice(name):
    state = ALGORITHMS[name].init(jax.random.key(0), SPEC)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(places)) == len(places)


# --- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_target_is_of_the_smallest_critic_and_stops_only_at_terminations():
    algo, n = resolve_schedules(TD3.replace(n_step=3, gamma=0.9), jnp.float32(0)), 3
    critic = algo.init(jax.random.key(0), SPEC).critic
    critic = critic.replace(target_params=jax.tree.map(lambda x: 2 * x, critic.target_params))
    batch = transitions(n).replace(steps=jnp.arange(BATCH) % n + 1)
    action = transitions(seed=1).action
    values = np.asarray(critic_values(algo, critic.target_params, batch.next_observation, action, SPEC))
    assert values.shape == (2, BATCH) and (values.argmin(axis=0) == 0).any() and (values.argmin(axis=0) == 1).any()
    wanted = [
        sum(0.9**k * float(batch.rewards[i, k]) for k in range(n))
        + (0.9 ** (i % n + 1) * values[:, i].min() if i % 4 else 0.0)
        for i in range(BATCH)
    ]
    found = off_policy.smallest_target(algo.critic, critic.target_variables, batch, action, algo.gamma, SPEC)
    np.testing.assert_allclose(found.atoms[:, 0], wanted, rtol=1e-5, atol=1e-5)
    values = jnp.asarray(values.min(axis=0))
    expected = off_policy.expected_target(batch, values, algo.gamma)
    np.testing.assert_allclose(expected.atoms, found.atoms, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_distributions_target_is_its_atoms_moved():
    algo = resolve_schedules(D4PG.replace(n_step=3, gamma=0.9), jnp.float32(0))
    critic = algo.init(jax.random.key(0), SPEC).critic
    batch, action = transitions(3), transitions(seed=1).action
    output = off_policy.evaluate_critic(
        algo.critic, Variables(critic.target_params), batch.next_observation, action, SPEC
    )
    found = smallest_target(algo, critic, batch, action)
    reward = np.asarray(batch.rewards) @ [1.0, 0.9, 0.81]
    atoms = reward[:, None] + np.where(batch.bootstrap, 0.9**3, 0.0)[:, None] * np.linspace(-5, 5, 11)[None]
    np.testing.assert_allclose(found.atoms, atoms, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.probabilities, jax.nn.softmax(output.logits[0, :, 0]), rtol=1e-5)


def smallest_target(algo, critic, batch, action):
    ends = {"v_min": algo.v_min, "v_max": algo.v_max}
    return off_policy.smallest_target(algo.critic, critic.target_variables, batch, action, algo.gamma, SPEC, **ends)


@pytest.mark.long
def test_new_priorities_are_how_wrong_the_critic_was():
    algo, batch = resolve_schedules(D4PG.replace(n_step=1), jnp.float32(0)), transitions()
    batch = batch.replace(sample_info=batch.sample_info.replace(importance=jnp.linspace(0.1, 1.0, BATCH)))
    state = algo.init(jax.random.key(0), SPEC)
    policy = Variables(state.policy.target_params)
    next_action = off_policy.evaluate_policy(algo.policy, policy, batch.next_observation, SPEC)
    target = smallest_target(algo, state.critic, batch, next_action)
    output = off_policy.evaluate_critic(
        algo.critic, Variables(state.critic.params), batch.observation, batch.action, SPEC
    )
    only = jnp.zeros(BATCH, jnp.int32)
    losses, errors = q_learning.td_loss(jax.tree.map(lambda x: x[0], output), only, target, -5.0, 5.0, 1.0)
    _, info = updated(algo, state, batch, jax.random.key(1))
    np.testing.assert_allclose(info.priorities["replay"], errors + 1e-6, rtol=1e-5)
    counted = np.asarray(losses * batch.sample_info.importance)[: BATCH - 1]
    assert float(info.metrics["critic_loss"]) == pytest.approx(float(counted.mean()), rel=1e-5)
    uniform = algo.replace(prioritized=False)
    assert updated(uniform, state, batch, jax.random.key(1))[1].priorities == {}


def test_targets_follow_by_a_share():
    algo = resolve_schedules(TD3, jnp.float32(0))
    learned = algo.init(jax.random.key(0), SPEC).critic
    moved = train_state.polyak_update(
        learned.replace(params=jax.tree.map(lambda x: x + 1.0, learned.params)), jnp.float32(0.25)
    )
    for old, new in zip(jax.tree.leaves(learned.params), jax.tree.leaves(moved.target_params), strict=True):
        np.testing.assert_allclose(new, old + 0.25, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(ALGORITHMS, "td3"))
def test_transitions_of_no_weight_teach_nothing(name):
    algo = resolve_schedules(ALGORITHMS[name], jnp.float32(0))
    state, batch = algo.init(jax.random.key(0), SPEC), transitions()
    batches = (batch, batch.replace(rewards=batch.rewards.at[-1].set(1e3), action=batch.action.at[-1].set(1.0)))
    update = jax.jit(
        lambda batch: algo.update(state, {"replay": batch}, spec=SPEC, key=jax.random.key(1), replicas=SingleReplica())
    )
    one, other = (update(batch) for batch in batches)
    for name in one[1].priorities:  # of what was not drawn is dropped
        for info in (one[1], other[1]):
            info.priorities[name] = info.priorities[name][:-1]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_keys_of_a_batch_do_not_depend_on_the_devices():
    whole = q_learning.transition_keys(jax.random.key(0), 16, SingleReplica(shards=4))

    class Second(SingleReplica):
        first_shard = 2

    half = q_learning.transition_keys(jax.random.key(0), 8, Second(shards=2))
    np.testing.assert_array_equal(jax.random.key_data(whole[8:]), jax.random.key_data(half))


@pytest.mark.long
@pytest.mark.exhaustive
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


# --- normalizing observations --------------------------------------------------------------------------------------


def scaled(batch, by):
    return batch.replace(observation=by * batch.observation, next_observation=by * batch.next_observation)


def after_updates(algo, by):
    """The learner after five updates of observations in other units, and what it then does."""
    state = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(0), SPEC)
    for i in range(5):
        state, info = updated(algo, state, scaled(transitions(seed=i), by), jax.random.key(i))
    seen = moments(BATCH).replace(observation=by * transitions(seed=9).observation)
    carry, keys = acting.ActingCarry((), ()), jax.random.split(jax.random.key(0), BATCH)
    action = algo.act(algo.actor(state), seen, carry, keys, spec=SPEC, explore=False)
    return state, info.metrics, action.action


@pytest.mark.long
@pytest.mark.parametrize("name", few(ALGORITHMS, "td3"))
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
    state, batch = resolve_schedules(algo, jnp.float32(0)).init(jax.random.key(0), SPEC), scaled(transitions(), 10.0)
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


@pytest.mark.exhaustive
def test_statistics_resume(tmp_path):
    algo = SAC.replace(normalize_observation=True)

    def trained(name, total_steps):
        settings = {"evaluate_every": 0, "checkpoint_every": 64, "progress": False, "run_dir": tmp_path / name}
        return jaxrl.train(algo, ENV, total_steps=total_steps, topology=jaxrl.Anakin(num_envs=4, devices=1), **settings)

    whole = trained("whole", 128)
    trained("halved", 64)
    again = trained("halved", 128)
    assert int(whole.state.learner.statistics.count) > BATCH
    for a, b in zip(*(jax.tree.leaves(run.state.learner) for run in (whole, again)), strict=True):
        np.testing.assert_array_equal(a, b)


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
        assert noise.max() < 1.2 * algo.exploration_noise


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
    algo = resolve_schedules(SAC.replace(noise_hold=most, random_correlation=None), jnp.float32(0))
    carry = algo.initial_carry(SPEC, jnp.int32(0), 1)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (envs, *x.shape)), carry)
    actor = algo.actor(algo.init(jax.random.key(0), SPEC))
    hold, noises, first = jax.jit(functools.partial(acting.with_noise, algo)), [], np.zeros((9, envs), bool)
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
    state = ActorState(params=(), exploration={"noise": jnp.float32(0.4), "least_noise": jnp.float32(0.1)})
    carry = acting.ActingCarry((), (), (), jnp.zeros(envs))
    one, other = (jax.random.split(jax.random.key(n), envs) for n in range(2))
    begun = acting.with_scale(state, carry, timestep, one)
    drawn = np.asarray(begun.noise_scale)
    assert (drawn >= 0.1).all() and (drawn <= 0.4).all()
    np.testing.assert_allclose([drawn.mean(), drawn.std()], [0.25, 0.3 / np.sqrt(12)], atol=0.01)
    np.testing.assert_array_equal(acting.with_scale(state, begun, moments(envs), other).noise_scale, drawn)
    again = acting.with_scale(state, begun, timestep, other)
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
        algo = algo.replace(random_correlation=None)
    plain, wandering = (acting(algo.replace(noise_correlation=x)) for x in (0.0, 0.9))
    for updates in (0, 1):  # uniform, then the policy's
        usual, other = acted(plain, updates), acted(wandering, updates)
        for quantile in (0.1, 0.5, 0.9):
            ends = [np.quantile(x, quantile, axis=(0, 1)) for x in (usual, other)]
            np.testing.assert_allclose(*ends, atol=0.03)
        assert [round(np.corrcoef(*x[..., 0])[0, 1], 1) for x in (usual, other)] == [0.0, 0.9]
    np.testing.assert_array_equal(acted(wandering, 1, explore=False), acted(plain, 1, explore=False))
    if name in RANDOM_FIRST:
        for always in (0.0, 0.6):
            at_first = acting(algo.replace(noise_correlation=always, random_correlation=0.9))
            found = [acted(at_first, updates) for updates in (0, 1)]
            assert [round(np.corrcoef(*x[..., 0])[0, 1], 1) for x in found] == [0.9, always]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_does_not_fit_is_said(name):
    algo = ALGORITHMS[name]
    assert algo.validate(SPEC, 4, 4) == []
    for space in (spaces.MultiDiscrete((3, 2)), spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1, 1, (2, 2))):
        (problem,) = algo.validate(EnvSpec("x", SPEC.observation_space, space), 4, 4)
        assert "bounded Box" in problem and repr(space) in problem
    wrong = algo.replace(policy=Actor(stochastic=name not in STOCHASTIC))
    assert f"must have stochastic={name in STOCHASTIC}" in wrong.validate(SPEC, 4, 4)[0]
    assert "tau=" in algo.replace(tau=0.0).validate(SPEC, 4, 4)[0]
    discrete = EnvSpec("x", SPEC.observation_space, spaces.Discrete(3))
    assert (algo.validate(discrete, 4, 4) == []) == (name in STOCHASTIC)
    noisy = algo.replace(critic=Critic(head=ActionValues(noisy=True)))
    assert any("noisy=False" in problem for problem in noisy.validate(SPEC, 4, 4))
    categorical = algo.replace(critic=Critic(head=CategoricalValues()))
    assert categorical.validate(SPEC, 4, 4) == []
