"""Learning from data alone: an expert's, and a little of it among noise. A score of 0 is random, of 1 the expert."""

import _record
import pytest
from helpers.experts import NARROW, PENDULUM, figures

import jaxrl
from jaxrl.core.schedules import Cosine
from jaxrl.networks import Actor, Critic

SEEDS, UPDATES = 5, 20_000
UPDATES_OF_CQL = 6_000  # each takes as long as ten of the others
CERTAIN, ONE = Actor(widths=(64, 64), stochastic=False), Critic(widths=(64, 64), ensemble=1)
COMMON = {"learning_rate": 1e-3, "batch_size": 128}
BC = jaxrl.BC(**COMMON, policy=NARROW["policy"])
ON_MIXED = {
    "bc": BC,
    "td3bc": jaxrl.TD3BC(**COMMON, **NARROW | {"policy": CERTAIN}),
    "iql": jaxrl.IQL(
        **COMMON,
        policy_learning_rate=Cosine(1e-3, 0.0),
        inverse_temperature=10.0,
        expectile=0.9,
        **NARROW,
        value=ONE,
    ),
    "cql": jaxrl.CQL(**COMMON, policy_learning_rate=1e-3, samples=4, **NARROW),
}


@pytest.mark.learning
def test_pendulum_from_data(expert, tmp_path):
    """Cloning 40 episodes of an expert is nearly as good; of 10 among 30 random ones it is worse than using rewards."""

    def scores(algo, dataset, updates=UPDATES):
        return expert.scores(algo, dataset, SEEDS, eval_env=PENDULUM, total_steps=updates)

    found = {"bc on expert data": scores(BC, expert.export(tmp_path / "expert", 40, seed=1))}
    expert.export(tmp_path / "mixed" / "expert", 10, seed=2)
    expert.export(tmp_path / "mixed" / "random", 30, seed=3, explore=True)
    mixed = jaxrl.load_dataset(f"rlds:{tmp_path / 'mixed'}")
    for name, algo in ON_MIXED.items():
        found[f"{name} on mixed data"] = scores(algo, mixed, UPDATES_OF_CQL if name == "cql" else UPDATES)
    rows = [{"run": run} | figures(each) for run, each in found.items()]
    print(*rows, sep="\n")
    _record.save(
        "learning-offline-pendulum",
        rows,
        seeds=list(range(SEEDS)),
        updates=UPDATES,
        updates_of_cql=UPDATES_OF_CQL,
        random_return=round(expert.returns[0], 1),
        expert_return=round(expert.returns[1], 1),
        settings="tests/learning/test_offline.py",
        reference={"score": 0.9, "source": "issue 5: cloning expert data; on mixed data, more than cloning"},
    )
    mean = {run: each.mean() for run, each in found.items()}
    assert mean["bc on expert data"] >= 0.9
    for name in ("td3bc", "iql", "cql"):
        assert mean[f"{name} on mixed data"] > mean["bc on mixed data"], name
