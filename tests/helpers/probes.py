"""Values that algorithms learn on the probes: each tests one link of theirs, and is known exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl import envs, networks
from jaxrl.algos.temperature import Temperature
from jaxrl.parallel import program as compiled

GAMMA = 0.9
TOPOLOGY = jaxrl.Anakin(num_envs=16, devices=1)
# What each probe is worth where its observation is seen, under the best policy.
TRUTH = {
    "Constant": lambda observation: np.ones_like(observation),
    "RewardIsObservation": lambda observation: observation,
    "TwoStepDiscount": lambda observation: np.where(observation == 0, GAMMA, 1.0),
    "ActionReward": lambda observation: np.ones_like(observation),
    "Truncated": lambda observation: np.full_like(observation, 1.0 / (1.0 - GAMMA)),
}
SEEN = {"RewardIsObservation": {-1.0, 1.0}, "TwoStepDiscount": {0.0, 1.0}}
POLICY, CRITIC = networks.Actor(widths=(32,)), networks.Critic(widths=(32,))
ONE_CRITIC = networks.Critic(widths=(32,), ensemble=1)
CALM = {"temperature": Temperature(initial=1e-3, learned=False)}  # all but 0, so that values are of the reward alone
# Of 1 and of 10 together a support has to be wide: 121 atoms, 0.13 apart. Of an observation of 0 only biases learn, in
# small steps.
REPPO = jaxrl.REPPO(
    gamma=GAMMA,
    learning_rate=jaxrl.schedules.Linear(1e-2, 0.0),
    **CALM,
    normalize_observation=False,
    normalize_reward=False,
    rollout_length=16,
    epochs=4,
    v_min=-4.0,
    v_max=12.0,
    policy=POLICY,
    critic=networks.Critic(widths=(32,), ensemble=1, head=networks.SelfPredictiveValues(121, widths=(32,), gain=1.0)),
)


def check_values(algo, iterations, act, is_right, tolerances=None, **parameters):
    """Assert that one program learns the values of every probe.

    Args:
      act: as of `trained`.
      is_right: whether actions are, where an action earns anything.
      tolerances: of the values, by probe; 0.1 of others.
      parameters: of the probes.
    """
    before = compiled._chunk._cache_size()
    for probe, truth in TRUTH.items():
        observation, value, action = trained(algo, iterations, envs.make(f"probe:{probe}", **parameters), act)
        tolerance = (tolerances or {}).get(probe, 0.1)
        np.testing.assert_allclose(value, truth(observation), atol=tolerance, err_msg=probe)
        assert set(np.unique(observation)) == SEEN.get(probe, {0.0})
        assert probe != "ActionReward" or is_right(action)
    assert compiled._chunk._cache_size() == before + 1, "the probes must share one program"


def trained(algo, iterations, env, act):
    """Train in an environment; return observations, values and actions at the rows that count.

    Args:
      act: gives an action, its value and the next carry from the algorithm, learner, actor, time step, carry, keys and
        spec.
    """
    env = envs.prepared(env)
    program = TOPOLOGY.bind(algo, env)
    algo = algo.resolve(program.layout.spec, program.layout.num_envs)
    steps_per_env = iterations * program.steps_per_iteration(algo) // program.layout.num_envs
    state, report = program.chunk(algo, env, program.start(algo, env, 0), iterations, steps_per_env)
    assert report.failed_at == -1
    algo = jaxrl.schedules.resolve_schedules(algo, jnp.float32(1.0))
    *rows, counts = map(np.asarray, _play(algo, env, state.learner, spec=program.layout.spec, act=act))
    observation, value, action = (x[counts] for x in rows)
    return observation[:, 0], value, action


@functools.partial(jax.jit, static_argnames=("spec", "act"))
def _play(algo, env, learner, *, spec, act):
    actor = algo.actor(learner)
    keys = jax.random.split(jax.random.key(1), (24, 8))
    env_state, timestep = jax.vmap(env.reset)(keys[0])
    carry = jax.vmap(lambda index: algo.initial_carry(spec, index, 8))(jnp.arange(8))

    def step(moment, keys):
        env_state, timestep, carry = moment
        action, value, carry = act(algo, learner, actor, timestep, carry, keys, spec)
        env_state, following = jax.vmap(env.step)(env_state, action, keys)
        return (env_state, following, carry), (timestep.observation, value, action, ~timestep.last)

    return jax.lax.scan(step, (env_state, timestep, carry), keys[1:])[1]
