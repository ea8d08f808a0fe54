"""Scores of trainings, and an expert whose episodes others learn from."""

import numpy as np

import jaxrl
from helpers.recorded import untrained
from jaxrl.networks import Actor, Critic

PENDULUM = "gymnax:Pendulum-v1"
NARROW = {"policy": Actor(widths=(64, 64)), "critic": Critic(widths=(64, 64))}
EXPERT = jaxrl.SAC(learning_rate=1e-3, batch_size=128, capacity=20_000, replay_ratio=1, **NARROW)


def figures(scores, digits=3):
    """Return the scores of all seeds, their mean and the worst, as records hold them."""
    scores = np.asarray(scores, float).round(digits)
    return {"scores": scores.tolist(), "mean": round(float(scores.mean()), digits), "worst": float(scores.min())}


class Expert:
    """A trained policy on Pendulum, and the returns that are scores of 0 and 1: of random actions, and its own."""

    def __init__(self):
        result = jaxrl.train(EXPERT, PENDULUM, total_steps=15_000, num_envs=1, evaluate_every=0, progress=False)
        self.policy, self.random = result.policy, untrained(jaxrl.make(PENDULUM), EXPERT)
        played = {"episodes": 128, "explore": True}  # so the untrained policy acts at random
        worst = jaxrl.evaluate(self.random.algo, self.random.actor, jaxrl.make(PENDULUM), self.random.spec, **played)
        self.returns = worst.return_mean, result.evaluation.return_mean

    def export(self, folder, episodes, seed, **settings):
        """Export episodes of its policy, or of the random one if they explore; return the dataset."""
        policy = self.random if settings else self.policy
        jaxrl.export_rlds(policy, PENDULUM, folder, episodes=episodes, seed=seed, progress=False, **settings)
        return jaxrl.load_dataset(f"rlds:{folder}")

    def scores(self, algo, dataset, seeds, **settings):
        """Return a score for each seed, of 128 episodes, of what an algorithm learns from a dataset."""
        worst, best = self.returns
        returns = []
        for seed in range(seeds):
            result = jaxrl.train(algo, dataset=dataset, seed=seed, evaluate_every=0, progress=False, **settings)
            assert result.stopped == "finished"
            returns.append(result.evaluation.return_mean)
        print(type(algo).__name__, np.round(returns, 1), flush=True)
        return (np.asarray(returns) - worst) / (best - worst)
