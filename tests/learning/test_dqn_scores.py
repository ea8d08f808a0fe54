"""The DQN family on CartPole, against the scores of issue 3: 500k rows, last parameters, greedy.

CleanRL's documentation has 498.38 ± 2.29 for DQN, 491.07 ± 9.70 for C51 and 495.13 ± 6.89 for PQN at 500k steps.
"""

import numpy as np
import pytest

import jaxrl
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActionValues, CategoricalValues, QNetwork, QuantileValues

TORSO = MLP((64, 64), activation="relu")
# CleanRL's settings: an update every 10 rows, a new target every 500. Larger rates and replays, and a rate that falls
# to 0, leave up to half of the seeds under 475.
DQN = jaxrl.DQN(
    learning_rate=2.5e-4,
    epsilon=Linear(1.0, 0.05, 0.5),
    rollout_length=5,
    replay_ratio=0.1,
    target_period=50,
    capacity=10_000,
    min_size=10_000,
    v_min=0.0,
    v_max=100.0,
    quantile_huber=10.0,  # of returns up to 100; with 1 the few ends among the targets count for too little
    network=QNetwork(TORSO),
)
# Algorithm and environments.
RUNS = {
    "dqn": (DQN.replace(double=False), 8),
    "double-dueling": (DQN.replace(network=QNetwork(TORSO, head=ActionValues(dueling=True))), 8),
    "c51": (DQN.replace(network=QNetwork(TORSO, head=CategoricalValues())), 8),
    "qr-dqn": (DQN.replace(network=QNetwork(TORSO, head=QuantileValues(16))), 8),
    "pqn": (jaxrl.PQN(network=QNetwork(MLP((120, 84), activation="relu", normalization="layer"))), 4),
}


TOTAL_STEPS = 500_000
PUBLISHED = {"dqn": 498.38, "c51": 491.07, "pqn": 495.13}


def run(name, seeds):
    algo, num_envs = RUNS[name]
    result = jaxrl.sweep(
        algo, "gymnax:CartPole-v1", total_steps=TOTAL_STEPS, seeds=seeds, num_envs=num_envs, progress=False
    )
    assert not result.failed.any()
    return result


@pytest.mark.learning
@pytest.mark.parametrize("name", RUNS)
def test_cartpole_over_ten_seeds(name, record):
    """Issue 3: interquartile mean at least 495, at most one seed under 475."""
    result = run(name, 10)
    record(
        f"cartpole-{name}",
        result,
        total_steps=TOTAL_STEPS,
        reference=PUBLISHED.get(name, 495),
        source="CleanRL's documentation" if name in PUBLISHED else "issue 3",
        settings={"algorithm": str(RUNS[name][0]), "num_envs": RUNS[name][1]},
    )
    found = np.sort(result.scores.reshape(-1))
    quarter = len(found) // 4
    assert found[quarter:-quarter].mean() >= 495, found
    assert (found < 475).sum() <= 1, found


@pytest.mark.long
def test_pqn_solves_cartpole():
    """Issue 3: one seed at 475 or more; the quickest of the family stands for all in the short tests."""
    assert run("pqn", 1).scores.reshape(-1)[0] >= 475
