"""Transitions within replayed sequences, and what R2D2 adds, against numpy and loops written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import EPS, close, exact, rescaled, unscaled
from helpers.refused import refused
from helpers.updates import assert_learned
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
from jaxrl.algos import histories, q_learning
from jaxrl.algos.fields import Memory
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, NetworkInputs, SampleInfo, SequenceBatch, TimeStep, Trajectory
from jaxrl.networks import GRU, MLP, QNetwork
from jaxrl.parallel.replicas import SingleReplica

SPEC = EnvSpec("test", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4))
NETWORK = QNetwork(MLP((4,)), core=GRU(4), previous_action=True, previous_reward=True)
BATCH, BURN_IN, LENGTH = 2, 3, 7
ONE = SingleReplica(1)
KEY = jax.random.key(2)


def stream(seed, rows=BURN_IN + LENGTH, batch=BATCH):
    """Rows [rows, batch] by the row convention: episodes of random length end by either kind of ending."""
    rng = np.random.default_rng(seed)
    first, weight, terminated, truncated = (np.zeros((rows, batch), bool) for _ in range(4))
    for column in range(batch):
        fresh, left = rng.random() < 0.5, rng.integers(1, 6)
        for row in range(rows):
            first[row, column], weight[row, column] = fresh, left > 0
            fresh = left == 0
            if left == 1:
                (terminated if rng.random() < 0.5 else truncated)[row, column] = True
            left = rng.integers(1, 6) if fresh else left - 1
    reward = np.where(weight, rng.normal(size=(rows, batch)), 0.0)
    return first, weight, terminated, truncated, reward


def sequences(seed, discounted=False):
    rng = np.random.default_rng(seed + 1)
    first, weight, terminated, truncated, reward = (jnp.asarray(x) for x in stream(seed))
    reward, shape = reward.astype(jnp.float32), first.shape
    observation = jnp.asarray(rng.uniform(-1, 1, (*shape, 3)), jnp.float32)
    action = jnp.asarray(rng.integers(0, 4, shape), jnp.int32)
    flags = jnp.zeros(shape, bool)
    counted = weight & (jnp.arange(shape[0])[:, None] >= BURN_IN)
    batch, ones = shape[1], jnp.ones(shape[1])
    rows = Trajectory(observation, action, reward, terminated, truncated, first, counted)
    if discounted:
        own = jnp.asarray(rng.uniform(0.2, 1.0, shape), jnp.float32)
        rows = rows.replace(discount=jnp.where(weight & ~terminated, own, 0.0))
    return SequenceBatch(
        rows=rows,
        timesteps=TimeStep(
            observation, jnp.zeros(shape), flags, flags, first, previous_action=jnp.roll(action, 1, axis=0)
        ),
        mask=jnp.ones(shape, bool),
        carry=q_learning.QCarry(jnp.asarray(rng.normal(size=(batch, 4)), jnp.float32), jnp.zeros(batch)),
        sample_info=SampleInfo(*([jnp.zeros(batch, jnp.int32)] * 2), ones, ones, ones, *([jnp.zeros(batch)] * 3)),
        burn_in=BURN_IN,
    )


def moves(batch, n):
    """By loops: for every row after the burn-in that begins a step, its rewards, steps, and how much to bootstrap."""
    rows, found = jax.tree.map(np.asarray, batch.rows), {}
    for column in range(BATCH):
        for row in range(BURN_IN, BURN_IN + LENGTH - 1):
            if not rows.weight[row, column]:
                continue
            rewards, at_row, bootstrap = [], row, 1.0
            while len(rewards) < n and at_row < BURN_IN + LENGTH - 1 and rows.weight[at_row, column]:
                rewards.append(bootstrap * rows.reward[at_row, column])
                bootstrap *= 1.0 if rows.discount is None else rows.discount[at_row, column]
                at_row += 1
                if rows.terminated[at_row - 1, column] or rows.truncated[at_row - 1, column]:
                    bootstrap *= not rows.terminated[at_row - 1, column]
                    break
            found[row - BURN_IN, column] = (rewards, at_row - row, bootstrap)
    return found


@pytest.mark.long
@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 5), st.booleans())
def test_the_transitions_of_sequences_are_those_of_loops(seed, n, discounted):
    batch = sequences(seed, discounted=discounted)
    found = histories.transitions(batch, n)
    expected = moves(batch, n)
    weight = np.asarray(found.weight).reshape(LENGTH, BATCH)
    assert {(int(i), int(j)) for i, j in zip(*np.nonzero(weight), strict=True)} == set(expected)
    for (row, column), (rewards, steps, bootstrap) in expected.items():
        i = row * BATCH + column
        assert found.steps[i] == steps and found.bootstrap.dtype == (jnp.float32 if discounted else bool)
        np.testing.assert_allclose(found.bootstrap[i], bootstrap, rtol=1e-5)
        np.testing.assert_allclose(found.rewards[i, : len(rewards)], rewards, rtol=1e-5 if discounted else 1e-7)
        assert not found.rewards[i, len(rewards) :].any()
        assert found.action[i] == batch.rows.action[BURN_IN + row, column]
        assert found.observation.index[i] == i and found.next_observation.index[i] == i + steps * BATCH


@pytest.mark.long
def test_outputs_are_those_of_the_network_stepped_by_hand():
    batch = sequences(3)
    params, _ = NETWORK.init(jax.random.key(0), SPEC)
    found = histories.transitions(batch, 2)
    output, model_state = found.observation.output(NETWORK, Variables(params), SPEC, train=True)
    assert model_state == ()
    current = found.observation.taken(output)
    following = found.next_observation.following(output, NETWORK, Variables(params), SPEC, None)
    carry, values = batch.carry.network, []
    for row in range(BURN_IN + LENGTH):
        moment = jax.tree.map(lambda x, row=row: x[row : row + 1], batch.timesteps)
        inputs = NetworkInputs.of_timesteps(moment)
        step, carry, _ = NETWORK.apply(params, inputs, carry, spec=SPEC, model_state=(), train=False)
        values.append(step[0])
    values = np.stack(values)[BURN_IN:]
    np.testing.assert_allclose(current, values.reshape(-1, 4), rtol=1e-4, atol=1e-6)
    for (row, column), (_, steps, _) in moves(batch, 2).items():
        np.testing.assert_allclose(following[row * BATCH + column], values[row + steps, column], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_sequences_priority_is_mixed_of_its_largest_and_its_mean_error():
    batch = sequences(5)
    found = histories.transitions(batch)
    error = np.random.default_rng(0).uniform(0, 1, found.weight.shape).astype(np.float32)
    got = found.observation.priorities(jnp.asarray(error), found.weight, 0.9)
    columns = np.arange(error.size) % BATCH
    for column in range(BATCH):
        mine = error[(columns == column) & np.asarray(found.weight)]
        np.testing.assert_allclose(got[column], 0.9 * mine.max() + 0.1 * mine.mean(), rtol=1e-5)


# --- value rescaling -----------------------------------------------------------------------------------------------


@given(st.floats(-1e5, 1e5, width=32))
def test_rescaling_and_its_inverse(x):
    np.testing.assert_allclose(q_learning.rescaled(jnp.float32(x)), rescaled(np.float64(x)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(q_learning.unscaled(q_learning.rescaled(jnp.float32(x))), x, rtol=1e-4, atol=1e-5)


def recurrent_values(params, batch, warm):
    """Q of every row after the burn-in, [LENGTH, BATCH, 4]; the carry at its end is of the parameters `warm`."""

    def unrolled(params, rows, hidden):
        layer, core, found = params["torso"]["torso"]["dense"]["layer_0"], params["torso"]["core"], []
        moments = exact(batch.timesteps.observation), np.asarray(batch.timesteps.previous_action)
        sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
        for row in rows:
            first = np.asarray(batch.timesteps.first[row])[:, None]
            hidden = np.where(first, 0.0, hidden)
            features = np.tanh(moments[0][row] @ layer["kernel"] + layer["bias"])
            previous = np.where(first, 0.0, np.eye(4)[moments[1][row]])
            x = np.concatenate([features, previous, exact(batch.timesteps.reward[row])[:, None]], axis=1)
            x = x @ core["input"]["kernel"] + core["input"]["bias"]
            u = hidden @ core["recurrent"]["kernel"]
            reset, update = sigmoid(x[:, :4] + u[:, :4]), sigmoid(x[:, 4:8] + u[:, 4:8])
            candidate = np.tanh(x[:, 8:] + reset * (u[:, 8:] + core["candidate_bias"]))
            hidden = (1 - update) * candidate + update * hidden
            head = params["head"]["advantage"]["output"]
            found.append(hidden @ head["kernel"] + head["bias"])
        return np.stack(found), hidden

    carry = unrolled(warm, range(BURN_IN), exact(batch.carry.network))[1]
    return unrolled(params, range(BURN_IN, BURN_IN + LENGTH), carry)[0]


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_whole_update_of_r2d2_against_numpy(reduction):
    """Adam's step down the sum over time, with no gradient through the burn-in, and the target's part of the way."""
    assert jaxrl.R2D2().time_reduction == "sum", "Acme's and SEED's"
    algo = jaxrl.R2D2(
        network=NETWORK,
        gamma=0.9,
        n_step=3,
        memory=Memory(length=LENGTH, burn_in=BURN_IN),
        learning_rate=0.1,
        optimizer=Adam(eps=EPS),
        max_grad_norm=None,
        target_period=1,
        target_update=0.25,
        time_reduction=reduction,
    )
    batch = sequences(11)
    batch = batch.replace(sample_info=batch.sample_info.replace(importance=jnp.float32([1.0, 0.25])))
    found = moves(batch, 3)
    after = np.asarray(batch.rows.terminated)[BURN_IN:], np.asarray(batch.rows.truncated)[BURN_IN:]
    cut = [row + steps == LENGTH - 1 for (row, _), (_, steps, _) in found.items()]
    assert after[0].any() and after[1].any() and any(cut), "an ending of each kind"
    resolved = resolve_schedules(algo, jnp.float32(0))
    state = resolved.init(jax.random.key(0), SPEC)
    slow = NETWORK.init(jax.random.key(1), SPEC)[0]
    state = state.replace(network=state.network.replace(target_params=slow))
    update = jax.jit(lambda state: resolved.update(state, {"replay": batch}, spec=SPEC, key=KEY, replicas=ONE))
    new, info = update(state)

    now = exact(state.network.params)
    online, targets = recurrent_values(now, batch, now), recurrent_values(exact(slow), batch, exact(slow))
    wanted = {}
    for (row, column), (rewards, steps, bootstrap) in found.items():
        total = sum(0.9**k * r for k, r in enumerate(rewards))
        if bootstrap:
            y = targets[row + steps, column, online[row + steps, column].argmax()]
            total += 0.9**steps * unscaled(y)
        wanted[row, column] = rescaled(total)

    def errors(params):
        """Return the weighted column of each transition, and its error."""
        outputs = recurrent_values(params, batch, now)
        taken = np.asarray(batch.rows.action)[BURN_IN:]
        return [(column, target - outputs[row, column, taken[row, column]]) for (row, column), target in wanted.items()]

    def loss(params):
        losses = [0.5 * error**2 * (1.0, 0.25)[column] for column, error in errors(params)]
        return np.mean(losses) if reduction == "mean" else np.sum(losses) / BATCH

    network = assert_learned(new.network.params, info.metrics["loss"], loss, now, 0.1)
    close(new.network.target_params, jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, exact(slow), network))
    sizes = [np.abs([error for place, error in errors(now) if place == column]) for column in range(BATCH)]
    mixed = [0.9 * size.max() + 0.1 * size.mean() + 1e-6 for size in sizes]
    np.testing.assert_allclose(info.priorities["replay"], mixed, rtol=1e-5)


def test_r2d2_needs_a_memory_and_takes_the_rules_of_dqn():
    assert jaxrl.R2D2().validate(SPEC, 8, 1) == []
    algo = jaxrl.R2D2(capacity=400, min_size=100, network=NETWORK)
    refused(lambda: jaxrl.Anakin(4).bind(algo, jaxrl.make("gymnax:MemoryChain-bsuite")), "capacity=400")
