"""A short real training in brax."""

import pytest

import jaxrl
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActorCritic


@pytest.mark.learning
def test_ppo_balances_braxs_inverted_pendulum():
    """3 seeds, 1M steps, greedy: 1000 is the most there is. Falling takes hundreds of steps, hence the discount,
    and values are then in the hundreds, hence the scaled reward. The settings are for one norm of both networks: with a
    norm for each, 5 seeds came to 947, 1000, 1000, 1000, 907, and 3 others to 874, 1000, 829."""
    result = jaxrl.sweep(
        jaxrl.PPO(
            learning_rate=Linear(1e-3, 0.0),
            gamma=0.999,
            gae_lambda=0.95,
            rollout_length=64,
            epochs=4,
            minibatches=8,
            entropy_cost=0.0,
            normalize_observation=True,
            normalize_reward=True,
            joint_grad_norm=True,
            network=ActorCritic(MLP((32, 32)), initial_log_std=-0.5),
        ),
        jaxrl.make("brax:inverted_pendulum", backend="spring"),
        total_steps=1_000_000,
        seeds=3,
        num_envs=64,
        devices=2,
        evaluation_episodes=32,
        progress=False,
    )
    assert result.scores.mean() >= 950, result.scores
