"""Recurrent replay distributed DQN (Kapturowski et al., 2019, openreview.net/forum?id=r1lyTjAqYX)."""

from typing import Literal

from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import EnvSpec, Network
from jaxrl.networks import LSTM, ActionValues, QNetwork


@algorithm
class R2D2(DQN):
    """Recurrent DQN on prioritized sequences: stored states, burn-in, rescaled 5-step returns, a ladder of epsilons."""

    learning_rate: Scalar = number(1e-4, above=0, help="learning rate")
    gamma: Scalar = number(0.997, low=0, high=1, help="discount factor")
    epsilon: Scalar = number(0.4, low=0, high=1, help="probability of a random action")
    max_grad_norm: Scalar | None = number(80.0, above=0, help="clip gradients to this global norm; None: no clipping")
    priority_exponent: Scalar = number(0.9, low=0, only_with="prioritized", help="exponent of the priorities (alpha)")
    importance_exponent: Scalar = number(0.6, low=0, high=1, only_with="prioritized", help="importance exponent (beta)")
    initial_priorities: Literal["max", "td_error"] = static(
        "td_error",
        choices=("max", "td_error"),
        only_with="prioritized",
        help="of new items: the largest so far, or by the actor's own TD errors",
        before="max",
    )
    target_period: int = static(2500, low=1, help="updates between target updates")
    n_step: int = static(5, low=1, help="number of rewards summed before bootstrapping")
    prioritized: bool = static(True, help="prioritized replay: sample by the last error")
    value_rescaling: bool = static(True, help="learn rescaled values, for returns of very different sizes")
    ladder: bool = static(True, help="Ape-X ladder: epsilon decreases from the first environment to the last")
    sequence_length: int = static(81, low=2, help="time steps per sequence, the last of which only bootstraps")
    burn_in: int = static(40, low=0, help="steps before each sequence that only warm up the recurrent state")
    time_reduction: Literal["mean", "sum"] = static(
        "sum", choices=("mean", "sum"), help="mean or sum of the loss over the time steps of a sequence"
    )
    capacity: int = static(1_000_000, low=1, help="transitions that the replay buffer holds, over all environments")
    min_size: int = static(50_000, low=1, help="transitions collected before the first update")
    batch_size: int = static(64, low=1, help="sequences per update")
    rollout_length: int | None = static(
        40, low=1, help="steps of each environment per iteration; None: a quarter of a sequence"
    )
    replay_ratio: float | None = static(0.003125, above=0, help="gradient updates per environment step")
    optimizer: Optimizer = number(Adam(eps=1e-3))
    network: Network = static(
        QNetwork(
            core=LSTM(512),
            head=ActionValues(dueling=True, widths=(512,)),
            previous_action=True,
            previous_reward=True,
        )
    )

    def validate(self, spec: EnvSpec, num_envs: int, shards: int) -> list[str]:
        problems = super().validate(spec, num_envs, shards)
        if not self.network.recurrent:
            problems.append(f"R2D2.network={self.network!r} is not recurrent; give it a core, or use DQN")
        return problems
