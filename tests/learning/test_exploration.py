"""Random network distillation at its defaults finds a reward that random actions never meet."""

import pytest
from helpers.experts import figures

import jaxrl
from jaxrl.algos.rnd import RND


@pytest.mark.learning
def test_the_bonus_alone_solves_deep_sea(record_rows):
    """A reward once in 2^20 episodes of random actions; five seeds with the bonus, and five without."""
    env, rows = jaxrl.make("gymnax:DeepSea-bsuite", size=20), []
    for algo in (jaxrl.PPO(), jaxrl.PPO(exploration_bonus=RND())):
        scores = jaxrl.sweep(algo, env, total_steps=300_000, seeds=5, num_envs=64, progress=False).scores[0]
        rows.append({"exploration_bonus": str(algo.exploration_bonus)} | figures(scores))
    record_rows("deepsea-rnd-defaults", rows, total_steps=300_000)
    assert max(rows[0]["scores"]) <= 0.1 and rows[1]["worst"] >= 0.9, rows
