"""MinAtar, 10M steps, against the returns of gymnax's published checkpoints (its README; gymnax-blines' settings)."""

import pytest

import jaxrl
from jaxrl.networks import MLP, ActorCritic
from jaxrl.schedules import Linear

SOURCE = "gymnax README, column 'Ckpt (Return)'"
PUBLISHED = {"Breakout": 28, "Asterix": 15, "SpaceInvaders": 131, "Freeway": 58}


def train(game, seeds):
    """64 environments x 128 steps, 8 minibatches of 4 epochs, two ReLU networks of 2 x 64 (purejaxrl's)."""
    algo = jaxrl.PPO(
        learning_rate=Linear(5e-3, 0.0),
        minibatches=8,
        network=ActorCritic(MLP((64, 64), activation="relu")),
    )
    return jaxrl.sweep(
        algo,
        f"gymnax:{game}-MinAtar",
        total_steps=10_000_000,
        seeds=seeds,
        num_envs=64,
        devices=2,
        explore_in_evaluation=True,
        progress=False,
    )


@pytest.mark.learning
@pytest.mark.parametrize("game", PUBLISHED)
def test_ppo_in_minatar(game, record):
    result = train(game, seeds=3 if game == "Breakout" else 2)
    record(
        f"minatar-{game.lower()}",
        result,
        total_steps=10_000_000,
        reference=PUBLISHED[game],
        source=SOURCE,
        settings=train.__doc__,
    )
    assert not result.failed.any()
    if game == "Breakout":
        assert result.scores.mean() >= 28, result.scores
