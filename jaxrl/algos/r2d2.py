"""Recurrent replay distributed DQN (Kapturowski et al., 2019, openreview.net/forum?id=r1lyTjAqYX)."""

from typing import Literal

from jaxrl.algos.base import algorithm, changed
from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.q_learning import Ladder, QMemory, QPrioritizedReplay
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Network
from jaxrl.networks import LSTM, ActionValues, QNetwork


@algorithm
class R2D2(DQN):
    """Recurrent DQN on prioritized sequences: stored states, burn-in, rescaled 5-step returns, a ladder of epsilons."""

    learning_rate: Scalar = changed(1e-4, help="learning rate")
    gamma: Scalar = changed(0.997)
    epsilon: Scalar = changed(0.4)
    ladder: Ladder | None = changed(Ladder())
    max_grad_norm: Scalar | None = changed(80.0)
    prioritized: QPrioritizedReplay | None = changed(QPrioritizedReplay(exponent=0.9, beta=0.6, initial="td_error"))
    target_period: int = changed(2500)
    n_step: int = changed(5, help="number of rewards summed before bootstrapping")
    value_rescaling: bool = changed(True)
    memory: QMemory = changed(QMemory(length=81, burn_in=40), only_with=None)
    time_reduction: Literal["mean", "sum"] = changed("sum", only_with=None)
    capacity: int = changed(1_000_000)
    min_size: int = changed(50_000)
    batch_size: int = changed(64, help="sequences per update")
    rollout_length: int | None = changed(
        40, help="steps per environment and iteration; None: a quarter of memory.length"
    )
    replay_ratio: float | None = changed(0.003125)
    optimizer: Optimizer = changed(Adam(eps=1e-3))
    network: Network = changed(
        QNetwork(
            core=LSTM(512),
            head=ActionValues(dueling=True, widths=(512,)),
            previous_action=True,
            previous_reward=True,
        )
    )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards)
        if not self.recurrent:
            problems.append(f"R2D2.network={self.network!r} is not recurrent; set a core, or use DQN")
        return problems
