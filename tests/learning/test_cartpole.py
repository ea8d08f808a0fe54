"""Trainings in CartPole, which a newcomer tries first, against published scores."""

import jaxrl
from jaxrl.core.schedules import Linear


def test_ppo_solves_cartpole_with_purejaxrls_settings():
    """5 seeds, 500k steps, 4 environments, sampled actions: 490 (CleanRL) to 497.5 (Baselines) are published."""
    result = jaxrl.sweep(
        jaxrl.PPO(learning_rate=Linear(2.5e-4, 0.0)),
        "gymnax:CartPole-v1",
        total_steps=500_000,
        seeds=5,
        num_envs=4,
        devices=2,
        explore_in_evaluation=True,
        progress=False,
    )
    assert not result.failed.any()
    assert result.scores.mean() >= 495, result.scores


def test_pqn_solves_cartpole_at_its_defaults():
    """One seed; ten are a row of docs/results.md. The quickest of the Q-learning family stands for all of it here."""
    result = jaxrl.sweep("pqn", "gymnax:CartPole-v1", total_steps=500_000, seeds=1, progress=False)
    assert not result.failed.any()
    assert result.scores.min() >= 475, result.scores
