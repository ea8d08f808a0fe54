"""Several agents: a policy that played itself alone beats random players, and teams learn as published."""

import numpy as np
import pytest

import jaxrl

SEEDS = 3


@pytest.mark.learning
def test_alphazero_beats_random_players(kept_dir, record_rows):
    """By its search, of tic-tac-toe by turns; a perfect player draws some games from the second seat."""
    rows = []
    for seed in range(SEEDS):
        env, against = jaxrl.make("pgx:tic_tac_toe", opponent="turns"), jaxrl.make("pgx:tic_tac_toe")
        settings = {"evaluate_every": 0, "evaluation_episodes": 1000, "run_dir": kept_dir / str(seed)}
        algo = jaxrl.AlphaZero()
        result = jaxrl.train(algo, env, total_steps=300_000, num_envs=128, seed=seed, eval_env=against, **settings)
        found = result.evaluation
        wins, losses = np.mean(found.returns > 0), np.mean(found.returns < 0)
        rows.append({"seed": seed, "return": round(found.return_mean, 3)} | {"won": wins, "lost": losses})
    run = "jaxrl train alphazero --env pgx:tic_tac_toe --env-params opponent=turns --eval-env pgx:tic_tac_toe"
    record_rows("alphazero-tic-tac-toe", rows, run=f"{run} --num-envs 128 --total-steps 300000")
    assert all(row["won"] >= 0.9 for row in rows), rows


@pytest.mark.learning
@pytest.mark.parametrize(("game", "steps"), [("tic_tac_toe", 2_000_000), ("connect_four", 4_000_000)])
def test_self_play_beats_random_players(game, steps, kept_dir, record_rows):
    """With the entropy that self-play needs (docs/multi_agent.md)."""
    rows = []
    for seed in range(SEEDS):
        env = jaxrl.make(f"pgx:{game}", opponent="self")
        result = jaxrl.train(
            jaxrl.PPO(entropy_cost=0.3),
            env,
            total_steps=steps,
            seed=seed,
            evaluate_every=0,
            run_dir=kept_dir / str(seed),
        )
        found = result.evaluate(1000, opponent="random")
        wins, losses = np.mean(found.returns > 0), np.mean(found.returns < 0)
        rows.append({"seed": seed, "return": round(found.return_mean, 3)} | {"won": wins, "lost": losses})
    record_rows(
        f"self-play-{game.replace('_', '-')}",
        rows,
        run=f"jaxrl train ppo --env pgx:{game} --env-params opponent=self --entropy-cost 0.3 --total-steps {steps}",
    )
    assert all(row["won"] >= 0.9 for row in rows), rows
