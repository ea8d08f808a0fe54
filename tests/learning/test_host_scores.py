"""Long real trainings in EnvPool's environments, against the scores of others."""

import numpy as np
import pytest

import jaxrl
from jaxrl.networks import ActorCritic, NatureCNN
from jaxrl.schedules import Linear

CLEANRL = "CleanRL's documentation"


class Scores:
    """Several runs as a sweep would give them; host environments cannot be swept in one program."""

    def __init__(self, results):
        self.configurations, self.seeds = [{}], len(results)
        self.scores = np.asarray([[result.evaluation.return_mean for result in results]])
        self.interquartile_means = [float(np.mean(self.scores))]
        self.steps_per_second = float(np.mean([result.steps_per_second for result in results]))
        self.wall_seconds = float(sum(result.wall_seconds for result in results))


def trained(algo, env, total_steps, seeds, topology, **settings):
    results = [
        jaxrl.train(
            algo,
            env,
            total_steps=total_steps,
            seed=seed,
            topology=topology,
            evaluate_every=0,
            progress=False,
            **settings,
        )
        for seed in range(seeds)
    ]
    assert all(result.stopped == "finished" for result in results)
    return Scores(results)


@pytest.mark.learning
def test_ppo_in_halfcheetah(record):
    """1M rows, 3 seeds; CleanRL's settings for continuous actions, in 8 environments instead of one."""
    algo = jaxrl.PPO(
        learning_rate=Linear(3e-4, 0.0),
        rollout_length=256,
        epochs=10,
        minibatches=32,
        entropy_cost=0.0,
        normalize_observation=True,
        normalize_reward=True,
    )
    scores = trained(algo, "envpool:HalfCheetah-v4", 1_000_000, 3, jaxrl.Sebulba(num_envs=8), evaluation_episodes=16)
    record(
        "halfcheetah-ppo",
        scores,
        total_steps=1_000_000,
        reference=1443,
        source=CLEANRL,
        settings={"algorithm": str(algo), "num_envs": 8},
    )
    assert scores.scores.mean() >= 1000, scores.scores


@pytest.mark.learning
def test_ppo_in_pong(record):
    """2M rows on a CPU, issue 4: above -15; CleanRL's settings for Atari, in 16 environments."""
    algo = jaxrl.PPO(
        learning_rate=Linear(5e-4, 0.0),
        clip=0.1,
        rollout_length=128,
        minibatches=8,
        network=ActorCritic(NatureCNN(filters=(16, 32, 32), width=256), shared=True),
    )
    env = jaxrl.make("envpool:Pong-v5", preset="classic")
    scores = trained(algo, env, 2_000_000, 1, jaxrl.Sebulba(num_envs=16, actors=2), evaluation_episodes=8)
    record(
        "pong-ppo",
        scores,
        total_steps=2_000_000,
        reference=-15,
        source="issue 4",
        settings={"algorithm": str(algo), "num_envs": 16, "preset": "classic"},
    )
    assert scores.scores.mean() > -15, scores.scores
