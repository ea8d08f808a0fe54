"""What the shortest command gives, `jaxrl train ALGO --env ENV --total-steps N`: mean and worst of all seeds.

`jaxrl sweep ALGO --env ENV --total-steps N --seeds 10` runs a row; what a row sets besides is in it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

import jaxrl
from jaxrl.networks import ActionValues, CategoricalValues, QNetwork, QuantileValues
from jaxrl.run.presets import PRESETS

CARTPOLE, PENDULUM, ACROBOT = "gymnax:CartPole-v1", "gymnax:Pendulum-v1", "gymnax:Acrobot-v1"


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of several seeds, the score that each must reach, and the published one.

    `fields` are the algorithm's that are set, what makes it another algorithm or a preset.
    """

    name: str
    algo: str
    env: str
    total_steps: int
    least: float  # of the worst seed
    published: str
    seeds: int = 5
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_envs: int | None = None


def cartpole(name, published, algo=None, **fields):
    """Gymnasium calls 475 solved."""
    return Row(f"{name}-cartpole", algo or name, CARTPOLE, 500_000, 475.0, published, 10, fields)


def preset(name, least, published, seeds=5):
    found = PRESETS[name]
    fields = {field.name: getattr(found.algorithm, field.name) for field in dataclasses.fields(found.algorithm)}
    algo = type(found.algorithm).__name__.lower()
    return Row(name, algo, found.env, found.total_steps, least, published, seeds, fields, found.topology["num_envs"])


ROWS = [
    cartpole("ppo", "490.04 ± 6.12 (CleanRL)"),
    cartpole("a2c", "none"),
    cartpole("impala", "none"),
    cartpole("pqn", "495.13 ± 6.89 (CleanRL)"),
    cartpole("dqn", "498.38 ± 2.29 (CleanRL)"),
    cartpole("dueling", "none", "dqn", network=QNetwork(head=ActionValues(dueling=True))),
    cartpole(
        "c51", "491.07 ± 9.70 (CleanRL)", "dqn", network=QNetwork(head=CategoricalValues()), v_min=0.0, v_max=100.0
    ),
    cartpole("qr-dqn", "none", "dqn", network=QNetwork(head=QuantileValues(16))),
    Row("ppo-acrobot", "ppo", ACROBOT, 500_000, -100.0, "-86.36 ± 1.32 (CleanRL)"),
    Row("dqn-acrobot", "dqn", ACROBOT, 500_000, -100.0, "-88.89 ± 1.56 (CleanRL)"),
    Row("pqn-acrobot", "pqn", ACROBOT, 500_000, -100.0, "-95.63 (CleanRL)"),
    Row("ppo-pendulum", "ppo", PENDULUM, 500_000, -200.0, "-172 (RL Zoo)"),
    Row("sac-pendulum", "sac", PENDULUM, 20_000, -200.0, "-157 (RL Zoo)"),
    Row("td3-pendulum", "td3", PENDULUM, 20_000, -200.0, "-152 (RL Zoo)"),
    preset("zoo-ppo-mountaincar", -130.0, "-200.00 (CleanRL, PPO of its own settings, 500k steps)"),
]


@pytest.mark.learning
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_shortest_command(row, record):
    algo = jaxrl.make_algorithm(row.algo, **row.fields)
    options = {} if row.num_envs is None else {"num_envs": row.num_envs}
    result = jaxrl.sweep(algo, row.env, total_steps=row.total_steps, seeds=row.seeds, progress=False, **options)
    record(
        f"defaults-{row.name}",
        result,
        total_steps=row.total_steps,
        reference=row.published,
        source=f"each seed must reach {row.least}",
        settings={"environment": row.env, "algorithm": row.algo}
        | {name: str(value) for name, value in row.fields.items()}
        | options,
    )
    assert result.scores.min() >= row.least, result.scores
