"""Every algorithm learns the values of the probes: one link of it each, known exactly, in seconds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl import envs, networks
from jaxrl.parallel import anakin

GAMMA = 0.9
TOPOLOGY = jaxrl.Anakin(num_envs=16, devices=1)

SMALL = networks.MLP((32,))
ON_POLICY = {
    "gamma": GAMMA,
    "learning_rate": jaxrl.schedules.Linear(1e-2, 0.0),
    "entropy_cost": 0.0,
    "rollout_length": 16,
    "max_grad_norm": None,
}
PPO = jaxrl.PPO(clip_value=False, epochs=4, minibatches=2, **ON_POLICY)
A2C = jaxrl.A2C(**ON_POLICY)
ALGORITHMS = {
    "ppo": (PPO.replace(network=networks.ActorCritic(torso=SMALL)), 200),
    "recurrent_ppo": (PPO.replace(network=networks.ActorCritic(torso=SMALL, core=networks.GRU(16), shared=True)), 150),
    "a2c": (A2C.replace(network=networks.ActorCritic(torso=SMALL)), 800),
    "recurrent_a2c": (A2C.replace(network=networks.ActorCritic(torso=SMALL, core=networks.GRU(16), shared=True)), 600),
    "dqn": (
        jaxrl.DQN(
            gamma=GAMMA,
            learning_rate=jaxrl.schedules.Linear(3e-3, 0.0),
            network=networks.QNetwork(torso=SMALL),
            capacity=4096,
            min_size=256,
            batch_size=64,
            rollout_length=4,
            updates=4,
            target_period=20,
            max_grad_norm=None,
        ),
        400,
    ),
}
# What each probe is worth where its observation is seen, under the best policy.
TRUTH = {
    "Constant": lambda observation: np.ones_like(observation),
    "RewardIsObservation": lambda observation: observation,
    "TwoStepDiscount": lambda observation: np.where(observation == 0, GAMMA, 1.0),
    "ActionReward": lambda observation: np.ones_like(observation),
    "Truncated": lambda observation: np.full_like(observation, 1.0 / (1.0 - GAMMA)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_values(name):
    algo, iterations = ALGORITHMS[name]
    before = anakin._chunk._cache_size()
    for probe, truth in TRUTH.items():
        env = envs.prepared(envs.make(f"probe:{probe}"))
        program = TOPOLOGY.bind(algo, env)
        ticks = iterations * program.rows_per_iteration(algo) // program.num_envs
        state, report = program.chunk(algo, env, program.start(algo, env, 0), iterations, ticks)
        assert report.failed_at == -1
        observation, value, action = played(algo, program.spec, env, state.learner)
        wanted = truth(observation)
        np.testing.assert_allclose(value, wanted, atol=0.1, err_msg=probe)
        assert set(np.unique(observation)) == {
            "RewardIsObservation": {-1.0, 1.0},
            "TwoStepDiscount": {0.0, 1.0},
        }.get(probe, {0.0})
        if probe == "ActionReward":
            assert (action == 0).mean() > 0.9
    assert anakin._chunk._cache_size() == before + 1, "the probes must share one program"


def played(algo, spec, env, learner):
    """Observations, values and actions at the rows that count, of a few environments over some ticks."""
    observation, value, action, counts = _play(jaxrl.schedules.at(algo, jnp.float32(1.0)), env, learner, spec=spec)
    counts = np.asarray(counts)
    return np.asarray(observation)[..., 0][counts], np.asarray(value)[counts], np.asarray(action)[counts]


@functools.partial(jax.jit, static_argnames="spec")
def _play(algo, env, learner, *, spec):
    actor = algo.actor(learner)
    keys = jax.random.split(jax.random.key(1), (24, 8))
    env_state, timestep = jax.vmap(env.reset)(keys[0])
    carry = jax.vmap(lambda index: algo.initial_carry(spec, index, 8))(jnp.arange(8))

    def step(moment, keys):
        env_state, timestep, carry = moment
        output = algo.act(actor, timestep, carry, keys, spec=spec, explore=True)
        if "value" in output.extras:
            value = output.extras["value"]
        else:
            seen = jax.tree.map(lambda x: x[None], timestep)
            value = algo.network.apply(actor.params, seen, carry, spec=spec)[0][0].max(axis=-1)
        env_state, following = jax.vmap(env.step)(env_state, output.action, keys)
        row = timestep.observation, value, output.action, ~timestep.last
        return (env_state, following, output.carry), row

    return jax.lax.scan(step, (env_state, timestep, carry), keys[1:])[1]
