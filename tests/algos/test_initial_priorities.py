"""Priorities at insertion: the actor's own TD errors, against numpy; and where they lie in the replay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.oracle import rescaled, unscaled
from helpers.programs import ENV, NUM_ENVS

import jaxrl
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import NetworkInputs, env_spec
from jaxrl.parallel import rollout as ro

SPEC = env_spec(ENV)
LENGTH = 16
# At random, so that episodes end in both ways.
ALGORITHMS = {
    "r2d2": programs.R2D2.replace(epsilon=1.0),
    "dqn": programs.DQN.replace(epsilon=1.0, prioritized=programs.DQN.prioritized.replace(initial="td_error")),
}


def collected(algo, steps=LENGTH, seed=0):
    """A rollout in which episodes end, what it was acted with, and the carry before it."""
    key = jax.random.key(seed)
    roots = jax.random.split(key, NUM_ENVS)
    env_index = jnp.arange(NUM_ENVS, dtype=jnp.int32)
    actor = algo.actor(algo.init(key, SPEC))

    @jax.jit
    def unroll():
        acting = ro.begin(algo, ENV, roots, env_index, spec=SPEC, num_envs=NUM_ENVS)
        keys = jax.random.split(jax.random.fold_in(key, 1), (2, steps, NUM_ENVS))
        return ro.unroll(algo, actor, ENV, acting, (keys[0], keys[1]), spec=SPEC, explore=True)

    return actor, unroll()[1]


def values_of(algo, actor, rollout):
    """Action values [T + 1, B, A], the network unrolled one time step after another."""
    carry, found = rollout.carry.network, []
    apply = jax.jit(
        lambda inputs, carry: algo.network.apply(
            actor.params, inputs, carry, spec=SPEC, model_state=actor.model_state, train=False
        )
    )
    for t in range(LENGTH + 1):
        inputs = NetworkInputs.of_timesteps(rollout.timesteps[t : t + 1])
        values, carry, _ = apply(inputs, carry)
        found.append(np.asarray(values[0], np.float64))
    return np.stack(found)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_they_are_the_actors_own_td_errors(name):
    algo = resolve_schedules(ALGORITHMS[name], jnp.float32(0.5))
    actor, rollout = collected(algo)
    rows, values = jax.tree.map(np.asarray, rollout.rows), values_of(algo, actor, rollout)
    assert rows.terminated.any() and rows.truncated.any() and not rows.weight.all()
    unscale, scale = (unscaled, rescaled) if algo.value_rescaling else (lambda x: x, lambda x: x)
    expected = np.zeros(rows.reward.shape)
    for t, env in zip(*np.nonzero(rows.weight), strict=True):
        total, k, ended = 0.0, 0, False
        # Up to n steps, the end of the episode, or that of the rollout.
        while k < algo.n_step and t + k < LENGTH and rows.weight[t + k, env] and not ended:
            total += algo.gamma**k * rows.reward[t + k, env]
            ended = rows.terminated[t + k, env] or rows.truncated[t + k, env]
            k += 1
        if not rows.terminated[t + k - 1, env]:
            total += algo.gamma**k * unscale(values[t + k, env].max())
        expected[t, env] = abs(scale(total) - values[t, env, rows.action[t, env]])
    found = np.where(rows.weight, rows.extras["priority"], 0.0)
    np.testing.assert_allclose(found, np.where(rows.weight, expected + 1e-6, 0.0), rtol=1e-4, atol=1e-5)
    assert len(set(np.round(found[rows.weight], 4))) > 20


@pytest.mark.long
def test_a_new_sequence_has_the_priority_that_the_learner_would_give_it():
    """eta max + (1 - eta) mean over the rows that are learned from, as the ring has it after the first rollouts."""
    algo = resolve_schedules(programs.R2D2, jnp.float32(0.5))
    program = jaxrl.Anakin(NUM_ENVS, devices=1, shards=1).bind(algo, ENV)
    state, _ = program.chunk(algo, ENV, program.start(algo, ENV, 0), 1, 100)
    held = jax.device_get(state.buffers["replay"])
    priority, extras = held.index.priority[0].reshape(-1, NUM_ENVS), held.ring.rows.extras["priority"].T
    weight = held.ring.rows.weight.T
    slots, envs = np.nonzero(priority >= 0)
    assert not slots.any(), "sequences begin with rollouts"
    learned = slice(algo.memory.burn_in, algo.memory.burn_in + algo.memory.length - 1)
    for env in envs:
        errors = extras[learned, env][weight[learned, env]]
        expected = algo.prioritized.eta * errors.max() + (1 - algo.prioritized.eta) * errors.mean()
        np.testing.assert_allclose(priority[0, env], expected, rtol=1e-5)
    assert len(envs) == NUM_ENVS == len(set(priority[0]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_them_nothing_is_kept(name):
    algo = ALGORITHMS[name]
    algo = algo.replace(prioritized=algo.prioritized.replace(initial="max"))
    _, rollout = jax.eval_shape(lambda: collected(resolve_schedules(algo, jnp.float32(0.0)), steps=2))
    assert not rollout.extras and algo.experience["replay"].sampler.insertion is None
