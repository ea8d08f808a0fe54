"""Long real trainings of the off-policy actor-critics on Pendulum, against the scores of others."""

import pytest

import jaxrl
from jaxrl.networks import Actor, CategoricalValues, Critic

SETTINGS = {"learning_rate": 1e-3, "capacity": 20_000, "replay_ratio": 1}
# MPO asks its critic for 40 actions an observation, others for one or two.
SMALL = {"policy": Actor(widths=(64, 64)), "critic": Critic(widths=(64, 64), ensemble=1)}
DISTRIBUTION = Critic(ensemble=1, head=CategoricalValues(101))
ZOO = "RL Zoo's benchmark.md, 20k steps"


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algo", "least", "reference", "source"),
    [
        (jaxrl.SAC(**SETTINGS), -165, -157, ZOO),
        (jaxrl.MPO(**SETTINGS, **SMALL), -165, -157, f"SAC in {ZOO}"),
        (jaxrl.TD3(**SETTINGS), -165, -152, ZOO),
        (jaxrl.DDPG(**SETTINGS), -250, -250, "issue 3"),
        # A cost of up to 16 a row, for ever: -1600 is the least that there can be.
        (jaxrl.D4PG(v_min=-1600.0, v_max=0.0, critic=DISTRIBUTION, **SETTINGS), -250, -250, "issue 3"),
    ],
    ids=["sac", "mpo", "td3", "ddpg", "d4pg"],
)
def test_pendulum_swings_up(algo, least, reference, source, record):
    """5 seeds, 20k rows, one environment, one update a row from the thousandth on."""
    result = jaxrl.sweep(algo, "gymnax:Pendulum-v1", total_steps=20_000, seeds=5, num_envs=1, progress=False)
    name = f"{type(algo).__name__.lower()}-pendulum"
    settings = SETTINGS | {"widths": algo.policy.widths}
    record(name, result, total_steps=20_000, reference=reference, source=source, settings=settings)
    assert not result.failed.any()
    assert result.scores.mean() >= least, result.scores
