"""Recurrent networks remember, feed-forward ones cannot: MemoryChain, neither previous action nor reward as input."""

import numpy as np
import pytest

import jaxrl
from jaxrl.algos.optimizers import Adam
from jaxrl.core.schedules import Linear
from jaxrl.networks import GRU, MLP, Actor, ActorCritic, Critic, QNetwork


def memory(algo, total_steps):
    """Five seeds on MemoryChain of length 10: the first observation says which action is right at the end."""
    env = jaxrl.make("gymnax:MemoryChain-bsuite", memory_length=10)
    return jaxrl.sweep(
        algo, env, total_steps=total_steps, seeds=5, num_envs=64, devices=2, evaluation_episodes=256, progress=False
    ).scores


RECURRENT = ActorCritic(MLP((32,)), core=GRU(32))
FEED_FORWARD = ActorCritic(MLP((32,)))


def ppo(network):
    return jaxrl.PPO(learning_rate=Linear(3e-3, 0.0), rollout_length=64, network=network)


def a2c(network):
    return jaxrl.A2C(
        learning_rate=Linear(3e-3, 0.0), gae_lambda=0.95, rollout_length=24, optimizer=Adam(), network=network
    )


@pytest.mark.long
def test_recurrent_ppo_remembers():
    assert memory(ppo(RECURRENT), 160_000).min() >= 0.95


@pytest.mark.learning
def test_recurrent_a2c_remembers():
    assert memory(a2c(RECURRENT), 300_000).min() >= 0.95


@pytest.mark.learning
def test_feed_forward_policies_cannot():
    for algo in (ppo(FEED_FORWARD), a2c(FEED_FORWARD)):
        scores = memory(algo, 40_000)
        assert np.abs(scores).max() <= 0.2, scores


def q_learning(algorithm, core, **fields):
    """Q-learning with a small network; a stretch of 25 rows holds at least one whole episode of 12."""
    settings = {"capacity": 16_384, "min_size": 2_048, "batch_size": 64, "rollout_length": 8, "replay_ratio": 4 / 512}
    settings |= {"target_period": 50, "learning_rate": Linear(3e-3, 0.0), "network": QNetwork(MLP((32,)), core=core)}
    return algorithm(**(settings | fields))


@pytest.mark.long
def test_r2d2_remembers():
    algo = q_learning(jaxrl.R2D2, GRU(32), sequence_length=25, burn_in=8)
    assert memory(algo, 80_000).min() >= 0.9


@pytest.mark.learning
def test_r2d2_with_and_without_initial_priorities(record_rows):
    """Half way and at the end. Neither has to win."""
    rows = []
    for total_steps in (40_000, 80_000):
        for initial_priorities in ("td_error", "max"):
            algo = q_learning(jaxrl.R2D2, GRU(32), sequence_length=25, burn_in=8, initial_priorities=initial_priorities)
            scores = memory(algo, total_steps)
            rows.append(
                {
                    "initial_priorities": initial_priorities,
                    "total_steps": total_steps,
                    "scores": [round(float(score), 3) for score in scores[0]],
                    "mean": round(float(scores.mean()), 3),
                }
            )
    record_rows("r2d2-initial-priorities", rows)
    assert min(row["mean"] for row in rows if row["total_steps"] == 80_000) >= 0.9, rows


@pytest.mark.learning
def test_recurrent_dqn_remembers():
    algo = q_learning(jaxrl.DQN, GRU(32), sequence_length=25, n_step=3, epsilon=Linear(1.0, 0.05, 0.5))
    assert memory(algo, 80_000).min() >= 0.9


@pytest.mark.learning
def test_feed_forward_dqn_cannot():
    scores = memory(q_learning(jaxrl.DQN, None, rollout_length=1, replay_ratio=1 / 64), 20_000)
    assert np.abs(scores).max() <= 0.2, scores


@pytest.mark.learning
def test_a_memory_balances_without_seeing_velocities(record_rows):
    """Issue 18 asks for -250 of SAC, and for far less without a memory; where the velocity is seen, docs/results.md."""
    env = jaxrl.make("gymnax:Pendulum-v1", hide=2)
    memory = {"core": GRU(64), "previous_action": True}
    remembering = {"policy": Actor(**memory), "critic": Critic(**memory)}
    algorithms = {
        "SAC with a GRU of 64": jaxrl.SAC(**remembering),
        "TD3 with a GRU of 64": jaxrl.TD3(**remembering | {"policy": Actor(stochastic=False, **memory)}),
        "SAC without a memory": jaxrl.SAC(),
    }
    rows = []
    for name, algo in algorithms.items():
        # Eight environments are the default with a memory; one without.
        settings = {"num_envs": 8, "evaluation_episodes": 64, "progress": False}
        scores = jaxrl.sweep(algo, env, total_steps=15_000, seeds=5, **settings).scores[0]
        rows.append(
            {
                "run": name,
                "total_steps": 15_000,
                "scores": [round(float(score), 2) for score in scores],
                "mean": round(float(scores.mean()), 2),
                "worst": round(float(scores.min()), 2),
            }
        )
    record_rows("hidden-velocity", rows, settings={name: str(algo) for name, algo in algorithms.items()})
    assert min(row["mean"] for row in rows[:2]) >= -250, rows
    assert rows[2]["mean"] <= -400, rows
