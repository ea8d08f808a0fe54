"""What a newcomer tries first must come out right: CartPole, against published scores."""

import pytest

import jaxrl
from jaxrl.core.schedules import Linear


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_pqn_solves_cartpole_at_its_defaults():
    """One seed; ten are a row of docs/results.md. The quickest of the Q-learning family stands for all of it here."""
    result = jaxrl.sweep("pqn", "gymnax:CartPole-v1", total_steps=500_000, seeds=1, progress=False)
    assert not result.failed.any()
    assert result.scores.min() >= 475, result.scores


@pytest.mark.learning
def test_impala_solves_cartpole_with_the_papers_settings():
    """10 seeds, 500k steps, 8 environments, greedy: gymnasium calls an average of 475 solved."""
    algo = jaxrl.IMPALA(learning_rate=Linear(2e-3, 0.0))  # the paper's fields, but for a step size of small networks
    result = jaxrl.sweep(
        algo, "gymnax:CartPole-v1", total_steps=500_000, seeds=10, num_envs=8, devices=1, progress=False
    )
    assert not result.failed.any()
    assert result.scores.mean() >= 475, result.scores
