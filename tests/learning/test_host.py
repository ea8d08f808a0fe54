"""Algorithms learn through host environments what they learn where everything is compiled."""

import pytest
from helpers.experts import NARROW

import jaxrl
from jaxrl.algos.acting import GaussianNoise
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, Actor, QNetwork

PPO = jaxrl.PPO(learning_rate=Linear(1e-3, 0.0), rollout_length=64)
SMALL = {"learning_rate": 1e-3, "capacity": 20_000, "replay_ratio": 1}
LAGGING = jaxrl.Sebulba(num_envs=8, lockstep=True, lag=1)


def trained(algo, env, total_steps, topology, seed=0):
    settings = {"topology": topology, "seed": seed, "evaluate_every": 0, "evaluation_episodes": 128, "progress": False}
    result = jaxrl.train(algo, env, total_steps=total_steps, **settings)
    assert result.stopped == "finished"
    return result.evaluation.return_mean


def test_ppo_in_envpool():
    """Issue 4: the mark of Anakin, 475; actors and learner overlap, and yet it is the same run every time."""
    topology = jaxrl.Sebulba(num_envs=32, actors=2, lockstep=True, lag=1)
    assert trained(PPO, "envpool:CartPole-v1", 300_000, topology) >= 475


def test_sac_in_gymnasium():
    """Issue 4: the mark of Anakin, -165, here after 10k rows, with networks of 64 and four updates every four rows."""
    algo = jaxrl.SAC(**NARROW, rollout_length=4, **SMALL)
    topology = jaxrl.Sebulba(num_envs=1, lockstep=True)
    assert trained(algo, "gymnasium:Pendulum-v1", 10_000, topology) >= -165


@pytest.mark.learning
def test_dqn_in_envpool():
    """Issue 3's settings, where one seed of ten may stay under 475; here the middle one of three does not."""
    algo = jaxrl.DQN(
        learning_rate=2.5e-4,
        n_step=1,
        double=False,
        epsilon=Linear(1.0, 0.05, 0.5),
        rollout_length=5,
        replay_ratio=0.1,
        target_period=50,
        capacity=10_000,
        min_size=10_000,
        network=QNetwork(MLP((64, 64), activation="relu")),
    )
    scores = [trained(algo, "envpool:CartPole-v1", 500_000, LAGGING, seed=seed) for seed in range(3)]
    assert sorted(scores)[1] >= 475, scores


IMPALA = jaxrl.IMPALA(learning_rate=Linear(2e-3, 0.0))  # its actors are an update behind, which V-trace corrects for
A2C = jaxrl.A2C(learning_rate=Linear(3e-3, 0.0), rollout_length=16, gae_lambda=0.95)
TD3 = jaxrl.TD3(
    **NARROW | {"policy": Actor(widths=(64, 64), stochastic=False)},
    noise=GaussianNoise(correlation=0.9, std=0.2),
    **SMALL,
)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algo", "env", "total_steps", "topology", "least"),
    [
        (IMPALA, "envpool:CartPole-v1", 300_000, LAGGING, 475),
        (A2C, "envpool:CartPole-v1", 500_000, jaxrl.Sebulba(num_envs=32, actors=2), 475),
        (TD3, "gymnasium:Pendulum-v1", 20_000, jaxrl.Sebulba(num_envs=1), -165),
    ],
    ids=["impala", "a2c", "td3"],
)
def test_others_on_the_host(algo, env, total_steps, topology, least):
    """Issue 4: the marks of Anakin."""
    assert trained(algo, env, total_steps, topology) >= least
