"""Any algorithm on the host: the probes served from there are the same run as compiled."""

import jax
import numpy as np
import pytest
from helpers.continuous import CROSSQ, D4PG, DDPG, MPO, NETWORKS
from helpers.programs import NUM_ENVS, actor_threads, all_finite, anakin, assert_equal, plain
from helpers.tiers import few

import jaxrl
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.networks import GRU, MLP, ActorCritic, Critic, ModelNetwork, QNetwork, SelfPredictiveValues

pytestmark = pytest.mark.exact

SMALL = {"capacity": 256, "min_size": 32, "batch_size": 16, "rollout_length": 4, "replay_ratio": 1 / 32}
DISCRETE = jaxrl.make("probe:Truncated", max_steps=3)
BOX = jaxrl.make("probe:Truncated", max_steps=3, continuous=True)
RUNS = {
    "crossq": (CROSSQ.replace(**SMALL), BOX),
    "d4pg": (D4PG.replace(**SMALL), BOX),
    "ddpg": (DDPG.replace(**SMALL), BOX),
    "mpo": (MPO.replace(**SMALL), BOX),
    "sac-discrete": (jaxrl.SAC(**NETWORKS, **SMALL), DISCRETE),
    "pqn": (
        jaxrl.PQN(random_persistence=0.9, rollout_length=4, epochs=2, minibatches=2, network=QNetwork(MLP((8,)))),
        DISCRETE,
    ),
    "muzero": (
        jaxrl.MuZero(
            **SMALL,
            simulations=4,
            unroll_steps=2,
            n_step=2,
            network=ModelNetwork(MLP((8,)), width=4, widths=(8,), atoms=11),
        ),
        DISCRETE,
    ),
    "vmpo": (
        jaxrl.VMPO(
            rollout_length=4,
            epochs=2,
            minibatches=2,
            target_period=2,
            entropy_cost=0.01,
            network=ActorCritic(MLP((8,))),
        ),
        BOX,
    ),
    "reppo": (
        jaxrl.REPPO(
            rollout_length=4,
            epochs=2,
            minibatches=2,
            policy=NETWORKS["policy"],
            critic=Critic(widths=(8,), ensemble=1, head=SelfPredictiveValues(11, widths=(8,))),
        ),
        BOX,
    ),
    "r2d2": (
        jaxrl.R2D2(
            **SMALL,
            sequence_length=6,
            burn_in=1,
            n_step=2,
            cross_episodes=False,
            network=QNetwork(MLP((8,)), core=GRU(4), previous_action=True, previous_reward=True),
        ),
        DISCRETE,
    ),
}
UPDATES = 6


def run(topology, algo, env):
    """The parameters at first, the state after some updates, and the report of all of them."""
    program = topology.bind(algo, env)
    iterations = UPDATES if isinstance(algo, jaxrl.PQN | jaxrl.VMPO | jaxrl.REPPO) else 12
    try:
        state = program.start(algo, env, 3)
        before = plain(state.learner)
        state, report = program.chunk(algo, env, state, iterations, 100)
        return before, *plain((state, report))
    finally:
        program.close()
        assert not actor_threads()


@pytest.mark.long
@pytest.mark.parametrize("name", few(RUNS, "pqn"))
def test_on_the_host_it_is_the_compiled_run(name):
    algo, env = RUNS[name]
    _, compiled, report = run(anakin(), algo, env)
    before, state, host_report = run(
        jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, actors=2, lockstep=True), algo, ServedFromHost(env)
    )
    assert host_report.made >= UPDATES and host_report.episodes.count >= NUM_ENVS and all_finite(state.learner)
    moved = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, state.learner)), strict=True)]
    assert any(moved), "it learns"
    assert_equal(compiled.replace(env_state=()), state, 1e-5)
    assert_equal(report, host_report.replace(actors={}), 1e-5)
