"""Histories: transitions within sequences, and recurrent policies and critics over them, against plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import ALGORITHMS, BOX, SPEC
from helpers.programs import assert_equal

import jaxrl
from jaxrl.algos import acting, histories
from jaxrl.algos.fields import Memory, Sampling
from jaxrl.algos.train_state import Variables
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import NetworkInputs, SequenceBatch, TimeStep, Trajectory, TransitionBatch
from jaxrl.networks import GRU, LSTM, Actor, Critic
from jaxrl.parallel.replicas import SingleReplica

ROWS, COLUMNS, BURN_IN = 9, 4, 3
LEARNED = ROWS - BURN_IN
CORE = {"core": GRU(6), "previous_action": True, "previous_reward": True}
POLICY = Actor(widths=(8,), gain=0.3, **CORE)
CRITIC = Critic(widths=(8,), **(CORE | {"core": LSTM(5)}))
MEMORY = {"policy": POLICY, "critic": CRITIC, "memory": Memory(length=5, burn_in=2), "rollout_length": 4}
RECURRENT = {
    "sac": ALGORITHMS["sac"].replace(**MEMORY),
    "td3": ALGORITHMS["td3"].replace(**MEMORY | {"policy": dataclasses.replace(POLICY, stochastic=False)}),
    "ddpg": ALGORITHMS["ddpg"].replace(
        **MEMORY
        | {"policy": dataclasses.replace(POLICY, stochastic=False), "critic": dataclasses.replace(CRITIC, ensemble=1)}
    ),
}


def sequences(seed=0):
    """Random ones: an episode ends in the burn-in, others where something is learned, by both kinds of ending."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, COLUMNS)
    terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool)
    terminated[0, 0] = terminated[4, 1] = truncated[3, 2] = truncated[6, 2] = True
    ended = terminated | truncated
    weight = np.ones(shape, bool)
    weight[1:] = ~ended[:-1]  # the row of the last observation
    first = np.zeros(shape, bool)
    first[2:] = ended[:-2]
    observation = rng.normal(size=(*shape, 3)).astype(np.float32)
    action = rng.uniform(BOX.low, BOX.high, (*shape, 2)).astype(np.float32)
    reward = np.where(weight, rng.normal(size=shape), 0.0).astype(np.float32)
    rows = Trajectory(observation, action, reward, terminated, truncated, first, weight)
    arrived = np.where(first, 0.0, rng.normal(size=shape)).astype(np.float32)
    before = np.where(first[..., None], 0.0, np.concatenate([action[:1], action[:-1]])).astype(np.float32)
    timesteps = TimeStep(observation, arrived, terminated, truncated, first, previous_action=before)
    carry = acting.ActingCarry(rng.normal(size=(COLUMNS, 6)).astype(np.float32), ())
    rows = rows.replace(weight=weight & (np.arange(ROWS) >= BURN_IN)[:, None])
    batch = SequenceBatch(rows, timesteps, np.ones(shape, bool), carry, None, BURN_IN)
    return jax.tree.map(jnp.asarray, batch)


def step_by_step(apply, timesteps, carry):
    """What `apply(inputs, carry)` gives at each row, one row at a time."""
    outputs = []
    for t in range(ROWS):
        inputs = NetworkInputs.of_timesteps(jax.tree.map(lambda x, t=t: x[t : t + 1], timesteps))
        output, carry = apply(inputs, carry)
        outputs.append(output)
    return outputs


@pytest.mark.long
def test_a_policy_says_what_it_said_when_it_acted():
    """Both ends of every transition, from the state that was stored, anew with each episode."""
    batch, variables = sequences(), Variables(POLICY.init(jax.random.key(0), SPEC)[0])

    def apply(inputs, carry):
        return POLICY.apply(variables.params, inputs, carry, spec=SPEC, model_state=(), train=False)[:2]

    acted = step_by_step(apply, batch.timesteps, batch.carry.network)
    found = histories.transitions(batch, 2)
    for history in (found.observation, found.next_observation):
        output = history.policy_output(POLICY, variables, SPEC)[0]
        for n, place in enumerate(np.asarray(history.index)):
            row, column = divmod(int(place), COLUMNS)
            one = jax.tree.map(lambda x, column=column: x[0, column], acted[row + BURN_IN])
            assert_equal(jax.tree.map(lambda x, n=n: x[n], output), one, 1e-5)


@pytest.mark.long
def test_a_critic_judges_from_an_empty_state_on():
    batch, (params, _) = sequences(), CRITIC.init(jax.random.key(0), SPEC)
    found = histories.transitions(batch, 1)
    history = found.next_observation
    output = history.critic_output(CRITIC, Variables(params), found.action, SPEC)[0]
    for member in range(CRITIC.ensemble):
        one = dataclasses.replace(CRITIC, ensemble=1)
        mine = jax.tree.map(lambda x, member=member: x[member : member + 1], params)

        def apply(inputs, carry, one=one, mine=mine):
            settings = {"spec": SPEC, "model_state": (), "train": False}
            features, carry, _ = one.encode(mine, inputs, carry, **settings)
            action = jnp.asarray(found.action)  # each of them, at every row
            wide = jnp.broadcast_to(features[:, 0, :, None], (1, COLUMNS, len(action), features.shape[-1]))
            return one.evaluate(mine, wide, jnp.broadcast_to(action, (COLUMNS, *action.shape)), **settings)[0], carry

        zeros = jax.tree.map(lambda x: jnp.zeros((1, COLUMNS, *x.shape)), one.initial_carry(SPEC))
        judged = step_by_step(apply, batch.timesteps, zeros)
        for n, place in enumerate(np.asarray(history.index)):
            row, column = divmod(int(place), COLUMNS)
            np.testing.assert_allclose(output[member, n], judged[row + BURN_IN][0, column, n], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_no_gradient_goes_into_the_burn_in():
    batch, variables = sequences(), Variables(POLICY.init(jax.random.key(0), SPEC)[0])
    critic = Variables(CRITIC.init(jax.random.key(0), SPEC)[0])

    def total(observation, carry):
        shown = batch.replace(timesteps=batch.timesteps.replace(observation=observation))
        shown = shown.replace(carry=batch.carry.replace(network=carry))
        found = histories.transitions(shown, 1)
        mean = found.observation.policy_output(POLICY, variables, SPEC)[0].mode()
        return mean.sum() + found.observation.critic_output(CRITIC, critic, found.action, SPEC)[0].sum()

    observation, carry = jax.grad(total, argnums=(0, 1))(batch.timesteps.observation, batch.carry.network)
    assert np.abs(observation[BURN_IN:]).min(axis=(0, 2)).all() and not np.abs(observation[:BURN_IN]).any()
    assert not np.abs(carry).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_without_a_core_a_batch_of_sequences_teaches_what_its_transitions_do(name):
    algo = resolve_schedules(ALGORITHMS[name].replace(normalize_observation=True), jnp.float32(0))
    if name == "td3":
        algo = algo.replace(target_noise=0.0)  # whose keys differ
    batch = sequences()
    found = histories.transitions(batch, 1)
    rows = batch.rows.observation[BURN_IN:].reshape(-1, 3)
    flat = dataclasses.replace(
        found, observation=rows[found.observation.index], next_observation=rows[found.next_observation.index]
    )
    assert isinstance(flat, TransitionBatch)
    state = algo.init(jax.random.key(0), SPEC)
    settings = {"spec": SPEC, "key": jax.random.key(1), "replicas": SingleReplica()}
    one, other = (
        jax.jit(algo.update, static_argnames=("spec", "replicas"))(state, {"replay": x}, **settings)
        for x in (batch, flat)
    )
    assert_equal(one, other, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", RECURRENT)
def test_no_entry_of_the_sequences_that_does_not_count_teaches_anything(name):
    """The last row bootstraps, those after an ending are of another episode; rewards and actions there are noise."""
    algo = resolve_schedules(RECURRENT[name], jnp.float32(0))
    batch = sequences()
    state = algo.init(jax.random.key(0), SPEC)
    counts = np.asarray(batch.rows.weight).copy()
    counts[-1] = False

    def spoiled(x):
        mask = counts.reshape(counts.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.full_like(x, 1.0))

    rows = batch.rows.replace(reward=spoiled(batch.rows.reward), action=spoiled(batch.rows.action))
    settings = {"spec": SPEC, "key": jax.random.key(1), "replicas": SingleReplica()}
    update = jax.jit(algo.update, static_argnames=("spec", "replicas"))
    one, other = (update(state, {"replay": x}, **settings) for x in (batch, batch.replace(rows=rows)))
    assert_equal(one, other)
    assert float(one[1].metrics["critic_loss"]) > 0.0


def test_a_batch_has_as_many_transitions_as_without_a_memory_in_whole_sequences():
    algo = RECURRENT["sac"].replace(batch_size=18)
    assert algo.experience["replay"].batch_size == 4  # of 4 transitions each
    assert algo.experience["replay"].sequence.rows == 7
    assert algo.replace(sampling=Sampling(samples_per_insert=32.0)).experience["replay"].replay_ratio == 32 / 16
    assert jaxrl.SAC(policy=POLICY).resolve(SPEC, 8).rollout_length == 4


def test_histories_of_a_run_say_what_it_did():
    """Without noise, and with a policy that does not change: the replay's sequences give the actions again."""
    env = jaxrl.make("gymnax:Pendulum-v1", hide=2, max_steps_in_episode=10)
    still = {"noise": acting.GaussianNoise(std=0.0), "learning_rate": 1e-30, "replay_ratio": 1 / 32}
    algo = RECURRENT["td3"].replace(**still, min_size=56, capacity=256)  # after 48 steps random ones are overwritten
    program = jaxrl.Anakin(num_envs=8, devices=1, shards=1).bind(algo, env)
    state, _ = program.chunk(algo, env, program.start(algo, env, 0), 12, 10**6)
    algo, spec = resolve_schedules(algo, jnp.float32(0)), program.layout.spec
    buffers = program.layout.experience(algo)
    _, batches = jax.jit(buffers.sample)(state.buffers, jax.random.key(1), jnp.int32(0))
    found = histories.transitions(batches["replay"], 1)
    again = found.observation.policy_output(algo.policy, state.learner.policy.variables, spec)[0]
    counts = np.asarray(found.weight)
    assert counts.sum() > 8 and int(state.learner.updates) > 0
    np.testing.assert_allclose(np.asarray(again)[counts], np.asarray(found.action)[counts], atol=1e-5)
    assert np.asarray(found.observation.inputs.first).any() and np.abs(np.asarray(found.observation.carry)).max() > 1e-3
    assert np.asarray(found.action)[counts].std() > 1e-3


@pytest.mark.parametrize("name", RECURRENT)
def test_a_run_is_the_same_on_four_devices_and_goes_on_bit_for_bit(name, tmp_path):
    env = jaxrl.make("gymnax:Pendulum-v1", hide=2, max_steps_in_episode=10)
    algo = RECURRENT[name].replace(replay_ratio=1 / 16, min_size=64, capacity=512)
    settings = {"total_steps": 512, "seed": 3, "progress": False, "evaluate_every": 0}

    def trained(devices, **more):
        topology = jaxrl.Anakin(num_envs=8, devices=devices, shards=4)
        return jaxrl.train(algo, env, topology=topology, **settings | more)

    one, four = trained(1), trained(4)
    assert_equal(one.state.learner, four.state.learner, 1e-4)
    trained(1, total_steps=256, run_dir=tmp_path)
    assert_equal(trained(1, run_dir=tmp_path).state, one.state)
