"""Several agents: a policy that played itself alone beats random players, and teams learn as published."""

import numpy as np
import pytest

import jaxrl

SEEDS = 3


@pytest.fixture
def outcomes(kept_dir, record_rows):
    """Trains several seeds, writes down how often each beat random players and lost, and gives that."""

    def rows_of(name, run, algo, env, evaluate, **settings):
        rows = []
        for seed in range(SEEDS):
            run_dir = kept_dir / str(seed)
            found = evaluate(jaxrl.train(algo, env, seed=seed, evaluate_every=0, run_dir=run_dir, **settings))
            wins, losses = np.mean(found.returns > 0), np.mean(found.returns < 0)
            rows.append({"seed": seed, "return": round(found.return_mean, 3), "won": wins, "lost": losses})
        record_rows(name, rows, run=f"jaxrl train {run} --total-steps {settings['total_steps']}")
        return rows

    return rows_of


@pytest.mark.learning
def test_alphazero_beats_random_players(outcomes):
    """It searches tic-tac-toe by turns; a perfect player draws some games from the second seat."""
    rows = outcomes(
        "alphazero-tic-tac-toe",
        "alphazero --env pgx:tic_tac_toe --env-params opponent=turns --eval-env pgx:tic_tac_toe --num-envs 128",
        jaxrl.AlphaZero(),
        jaxrl.make("pgx:tic_tac_toe", opponent="turns"),
        lambda result: result.evaluation,
        eval_env=jaxrl.make("pgx:tic_tac_toe"),
        evaluation_episodes=1000,
        total_steps=300_000,
        num_envs=128,
    )
    assert all(row["won"] >= 0.9 for row in rows), rows


@pytest.mark.learning
@pytest.mark.parametrize(("game", "steps"), [("tic_tac_toe", 2_000_000), ("connect_four", 4_000_000)])
def test_self_play_beats_random_players(game, steps, outcomes):
    """With the entropy that self-play needs (docs/multi_agent.md)."""
    rows = outcomes(
        f"self-play-{game.replace('_', '-')}",
        f"ppo --env pgx:{game} --env-params opponent=self --entropy-cost 0.3",
        jaxrl.PPO(entropy_cost=0.3),
        jaxrl.make(f"pgx:{game}", opponent="self"),
        lambda result: result.evaluate(1000, opponent="random"),
        total_steps=steps,
    )
    assert all(row["won"] >= 0.9 for row in rows), rows
