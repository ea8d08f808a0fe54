"""MinAtar, 10M steps, against the returns of gymnax's published checkpoints (its README; gymnax-blines' settings)."""

import pytest

import jaxrl
from jaxrl.algos.optimizers import Adam
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActorCritic
from jaxrl.run.presets import PRESETS

SOURCE = "gymnax README, column 'Ckpt (Return)'"
PUBLISHED = {"Breakout": 28, "Asterix": 15, "SpaceInvaders": 131, "Freeway": 58}
PPO = jaxrl.PPO(
    learning_rate=Linear(5e-3, 0.0),
    minibatches=8,
    network=ActorCritic(MLP((64, 64), activation="relu")),
)


def train(game, seeds):
    """64 environments x 128 steps, 8 minibatches of 4 epochs, two ReLU networks of 2 x 64 (purejaxrl's)."""
    return jaxrl.sweep(
        PPO,
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


BESIDE = {"optimizer": Adam(eps=1.5e-4), "capacity": 100_000, "min_size": 5_000, "batch_size": 32}
BESIDE |= {"rollout_length": 4, "replay_ratio": 1 / 16, "learning_rate": 2.5e-4, "target_period": 250}


@pytest.mark.learning
def test_rainbow_is_above_dqn(record):
    """Breakout, 5M rows, an update of 32 transitions every 16 rows; PPO at the same number of rows beside them.

    What the two share is fixed; each keeps what it consists of, Rainbow's targets of three steps among it.
    """
    algorithms = {
        "dqn": jaxrl.DQN(epsilon=Linear(1.0, 0.05, 0.1), **BESIDE),
        "rainbow": PRESETS["rainbow"].algorithm.replace(**BESIDE),
        "ppo": PPO,
    }
    scores = {}
    for name, algo in algorithms.items():
        result = jaxrl.sweep(
            algo,
            "gymnax:Breakout-MinAtar",
            total_steps=5_000_000,
            seeds=3,
            num_envs=64 if name == "ppo" else 8,
            progress=False,
        )
        assert not result.failed.any()
        scores[name] = result.scores.mean()
        record(
            f"minatar-breakout-5m-{name}",
            result,
            total_steps=5_000_000,
            reference=PUBLISHED["Breakout"],
            source=SOURCE + ", PPO at 10M steps",
            settings=str(algo),
        )
    assert scores["rainbow"] > scores["dqn"], scores
