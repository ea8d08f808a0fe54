"""Learning from data alone: an expert's, and a little of it among noise. A score of 0 is random, of 1 the expert."""

import dataclasses

import _record
import numpy as np
import pytest
from helpers.recorded import untrained

import jaxrl
from jaxrl.core.schedules import Cosine
from jaxrl.networks import Actor, Critic

ENV, SEEDS, UPDATES = "gymnax:Pendulum-v1", 5, 20_000
UPDATES_OF_CQL = 6_000  # each takes as long as ten of the others
ACTOR, CERTAIN = Actor(widths=(64, 64)), Actor(widths=(64, 64), stochastic=False)
TWO, ONE = Critic(widths=(64, 64)), Critic(widths=(64, 64), ensemble=1)
COMMON = {"learning_rate": 1e-3, "batch_size": 128}
EXPERT = jaxrl.SAC(**COMMON, capacity=20_000, replay_ratio=1, policy=ACTOR, critic=TWO)
BC = jaxrl.BC(**COMMON, policy=ACTOR)
ON_MIXED = {
    "bc": BC,
    "td3bc": jaxrl.TD3BC(**COMMON, policy=CERTAIN, critic=TWO),
    "iql": jaxrl.IQL(
        **COMMON,
        policy_learning_rate=Cosine(1e-3, 0.0),
        inverse_temperature=10.0,
        expectile=0.9,
        policy=ACTOR,
        critic=TWO,
        value=ONE,
    ),
    "cql": jaxrl.CQL(**COMMON, policy_learning_rate=1e-3, samples=4, policy=ACTOR, critic=TWO),
}


@dataclasses.dataclass
class Data:
    """What was recorded, and the returns that are a score of 0 and of 1."""

    expert: jaxrl.Dataset
    mixed: jaxrl.Dataset
    random_return: float
    expert_return: float

    def scores(self, algo, dataset, updates=UPDATES):
        """One a seed, each of 128 episodes."""
        returns = []
        for seed in range(SEEDS):
            result = jaxrl.train(
                algo, dataset=dataset, eval_env=ENV, total_steps=updates, seed=seed, evaluate_every=0, progress=False
            )
            assert result.stopped == "finished"
            returns.append(result.evaluation.return_mean)
        print(type(algo).__name__, np.round(returns, 1), flush=True)
        return (np.asarray(returns) - self.random_return) / (self.expert_return - self.random_return)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 episodes of an expert, and 10 others of it with 30 of uniform actions."""
    folder = tmp_path_factory.mktemp("data")
    result = jaxrl.train(EXPERT, ENV, total_steps=15_000, num_envs=1, evaluate_every=0, progress=False)
    random = untrained(jaxrl.make(ENV), EXPERT)  # and so it acts at random where it explores
    jaxrl.export_rlds(result.policy, ENV, folder / "expert", episodes=40, seed=1, progress=False)
    jaxrl.export_rlds(result.policy, ENV, folder / "mixed" / "expert", episodes=10, seed=2, progress=False)
    jaxrl.export_rlds(random, ENV, folder / "mixed" / "random", episodes=30, seed=3, explore=True, progress=False)
    worst = jaxrl.evaluate(random.algo, random.actor, jaxrl.make(ENV), random.spec, episodes=128, explore=True)
    datasets = (jaxrl.load_dataset(f"rlds:{folder / name}") for name in ("expert", "mixed"))
    return Data(*datasets, worst.return_mean, result.evaluation.return_mean)


@pytest.mark.learning
def test_pendulum_from_data(data):
    """5 seeds: cloning an expert is nearly as good, and of the mix cloning is worse than what looks at rewards."""
    scores = {"bc on expert data": data.scores(BC, data.expert)}
    scores |= {
        f"{name} on mixed data": data.scores(algo, data.mixed, UPDATES_OF_CQL if name == "cql" else UPDATES)
        for name, algo in ON_MIXED.items()
    }
    rows = [
        {"run": run, "scores": [round(float(x), 3) for x in each], "mean": round(float(each.mean()), 3)}
        for run, each in scores.items()
    ]
    print(*rows, sep="\n")
    _record.save(
        "learning-offline-pendulum",
        rows,
        seeds=list(range(SEEDS)),
        updates=UPDATES,
        updates_of_cql=UPDATES_OF_CQL,
        random_return=round(float(data.random_return), 1),
        expert_return=round(float(data.expert_return), 1),
        settings="tests/learning/test_offline.py",
        reference={"score": 0.9, "source": "issue 5: cloning expert data; on mixed data, more than cloning"},
    )
    mean = {run: each.mean() for run, each in scores.items()}
    assert mean["bc on expert data"] >= 0.9
    for name in ("td3bc", "iql", "cql"):
        assert mean[f"{name} on mixed data"] > mean["bc on mixed data"], name
