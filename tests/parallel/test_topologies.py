"""One algorithm, one seed, one run: whatever it runs on."""

import functools

import jax
import pytest
from helpers import programs
from helpers.discounted import Discounted
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, anakin, assert_equal, plain
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.rnd import RND
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.networks import (
    Actor,
    CategoricalValues,
    Critic,
    ImplicitQuantileValues,
    InvertedResidual,
    ModelNetwork,
    QNetwork,
    SelfPredictiveValues,
)

pytestmark = pytest.mark.exact

UPDATES = 10
A2C = jaxrl.A2C(rollout_length=8, entropy_cost=0.01, learning_rate=1e-2, network=programs.PPO.network)
VMPO = jaxrl.VMPO(
    rollout_length=8,
    epochs=1,
    minibatches=2,
    target_period=2,
    entropy_cost=0.01,
    learning_rate=1e-3,
    network=programs.PPO.network,
)
# Devices share the statistics of a batch. A large eps, as rounding decides the sign of what is all but 0.
CROSSQ = jaxrl.CrossQ(
    learning_rate=1e-2,
    optimizer=Adam(b1=0.5, eps=1e-2),
    policy_delay=2,
    rollout_length=8,
    n_step=3,
    capacity=NUM_ENVS * 32,
    min_size=NUM_ENVS * 16,
    batch_size=32,
    replay_ratio=2 / programs.ROWS,
    policy=Actor(widths=(8,), normalization="batch_renorm", normalize_inputs=True),
    critic=Critic(widths=(8,), normalization="batch_renorm", normalize_inputs=True),
)
# All parts at once: returns that acting keeps, held noise, critics over both ends, weights of unit norm.
FLASHSAC = jaxrl.SAC(
    learning_rate=1e-2,
    optimizer=Adam(eps=1e-2),
    policy_delay=2,
    joint_batch=True,
    joint_policy=True,
    normalize_reward=True,
    noise_hold=4,
    v_min=-5.0,
    v_max=5.0,
    rollout_length=8,
    capacity=NUM_ENVS * 32,
    min_size=NUM_ENVS * 16,
    batch_size=32,
    replay_ratio=2 / programs.ROWS,
    policy=Actor(torso=InvertedResidual(4, 1, 2), widths=(), gain=None),
    critic=Critic(trunk=InvertedResidual(4, 1, 2), widths=(), head=CategoricalValues(11, gain=None)),
)
REPPO = jaxrl.REPPO(
    learning_rate=1e-2,
    optimizer=Adam(eps=1e-2),
    rollout_length=8,
    epochs=1,
    minibatches=2,
    v_min=-5.0,
    v_max=5.0,
    policy=Actor(widths=(8,)),
    critic=Critic(widths=(8,), ensemble=1, head=SelfPredictiveValues(11, widths=(8,))),
)
RND_PPO = programs.PPO.replace(exploration_bonus=RND(learning_rate=1e-3, features=8, widths=(8,), torso=programs.SMALL))
BTR = programs.DQN.replace(
    munchausen=True,
    network=QNetwork(programs.SMALL, head=ImplicitQuantileValues(4, 8, dueling=True, widths=(8,), noisy=True)),
)
# Which plans in the environments, so never on the host.
ALPHAZERO = jaxrl.AlphaZero(
    simulations=4, rollout_length=8, epochs=1, minibatches=2, learning_rate=1e-3, network=programs.PPO.network
)
MUZERO = jaxrl.MuZero(
    simulations=4,
    learning_rate=1e-3,
    optimizer=Adam(eps=1e-2),
    rollout_length=8,
    unroll_steps=2,
    n_step=3,
    capacity=NUM_ENVS * 32,
    min_size=NUM_ENVS * 16,
    batch_size=16,
    replay_ratio=1 / programs.ROWS,
    network=ModelNetwork(programs.SMALL, width=8, widths=(8,), atoms=11),
)
# Episodes have at most 12 transitions; those that are still going on when a batch is taken are in the next one.
WHOLE = programs.PPO.replace(whole_episodes=8, max_episode_length=12, rollout_length=14)
# In an environment that discounts by itself.
DISCOUNTED = {
    f"discounted_{name}": algo
    for name, algo in {**ALGORITHMS, "r2d2": programs.R2D2, "dreamer": programs.DREAMER}.items()
}
OTHERS = {
    "a2c": A2C,
    "alphazero": ALPHAZERO,
    "muzero": MUZERO,
    "crossq": CROSSQ,
    "flashsac": FLASHSAC,
    "reppo": REPPO,
    "vmpo": VMPO,
    "r2d2": programs.R2D2,
    "whole_episodes": WHOLE,
}
OTHERS |= {"rnd": RND_PPO, "btr": BTR}
OTHERS |= {"dreamer": programs.DREAMER}
ON_HOST = ALGORITHMS | OTHERS | DISCOUNTED
HOST_KINDS = [
    "recurrent_ppo",
    "discounted_dqn",
    "r2d2",
    "dreamer",
    "flashsac",
]  # rollouts, transitions, sequences and extras


@functools.cache
def run(name, topology, host=False, seed=3):
    """The state after some updates, and the report of all of them, as numpy."""
    algo, env = ON_HOST[name], Discounted(ENV, 0.7) if name in DISCOUNTED else ENV
    env = ServedFromHost(env) if host else env
    program = topology.bind(algo, env)
    iterations = UPDATES + ("replay" in algo.experience)  # whose first iteration only fills it
    try:
        state = program.start(algo, env, seed)
        steps_per_env = 2 * iterations * program.steps_per_iteration(algo) // program.layout.num_envs
        state, report = program.chunk(algo, env, state, iterations, steps_per_env)
        assert report.iterations == UPDATES
        assert report.episodes.count > 20, "no episode boundary was met"
        return plain((state, report))
    finally:
        program.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    one_quick(
        [
            *ALGORITHMS,
            "a2c",
            "dreamer",
            "flashsac",
            "reppo",
            "vmpo",
            "r2d2",
            "whole_episodes",
            "rnd",
            "btr",
            *DISCOUNTED,
        ],
        "ppo",
        rest=HOST_KINDS,
    ),
)
def test_host_lockstep_is_the_compiled_run(name):
    state, report = run(name, anakin())
    on_host, host_report = run(name, jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True), host=True)
    assert_equal(state.replace(env_state=()), on_host, 1e-5)
    assert host_report.actors["policy_lag"] == 0
    assert_equal(report, host_report.replace(actors={}), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    one_quick(
        [
            *ALGORITHMS,
            "alphazero",
            "muzero",
            "crossq",
            "dreamer",
            "flashsac",
            "reppo",
            "vmpo",
            "whole_episodes",
            "rnd",
            "btr",
            *DISCOUNTED,
        ],
        rest=[
            "dqn",
            "alphazero",
            "muzero",
            "crossq",
            "dreamer",
            "flashsac",
            "whole_episodes",
            "rnd",
            "btr",
            "discounted_recurrent_ppo",
        ],
    ),
)
def test_four_devices_are_one(name):
    one, one_report = run(name, anakin())
    four, four_report = run(name, anakin(devices=4))
    assert_equal(one, four, 1e-5)
    assert_equal(one_report, four_report, 1e-5)


@pytest.mark.long
def test_the_comparison_can_fail():
    one, _ = run("ppo", anakin())
    other, _ = run("ppo", anakin(), seed=4)
    with pytest.raises(AssertionError):
        assert_equal(one, other, 1e-5)


@pytest.mark.long
def test_devices_share_the_environments():
    algo = programs.DQN
    program = anakin(devices=4).bind(algo, ENV)
    state = program.start(algo, ENV, 0)
    for _ in range(2):
        assert all(len(x.addressable_shards) == 4 for x in jax.tree.leaves(state))
        assert state.timestep.observation.addressable_shards[0].data.shape == (2, 4)
        for stored in jax.tree.leaves(state.buffers["replay"].ring.rows):
            assert stored.addressable_shards[0].data.size == stored.size // 4, "each device holds its own rows"
        params = jax.tree.leaves(state.learner.network.params)[0]
        assert params.addressable_shards[0].data.shape == params.shape
        state, _ = program.chunk(algo, ENV, state, 1, 100)
