"""Recurrent replay distributed DQN (Kapturowski et al., 2019, openreview.net/forum?id=r1lyTjAqYX)."""

from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimisers import Adam, Optimiser
from jaxrl.networks import LSTM, ActionValues, QNetwork
from jaxrl.schedules import Scalar
from jaxrl.types import EnvSpec, Network


@algorithm
class R2D2(DQN):
    """A recurrent DQN: stored states with burn-in, rescaled 5-step returns, prioritised sequences, many epsilons."""

    learning_rate: Scalar = number(1e-4, above=0, help="step size")
    gamma: Scalar = number(0.997, low=0, high=1, help="discount")
    epsilon: Scalar = number(0.4, low=0, high=1, help="chance of a random action")
    max_grad_norm: Scalar | None = number(80.0, above=0, help="largest global norm of a gradient; None: no limit")
    priority_exponent: Scalar = number(0.9, low=0, help="prioritised: chances are priorities to this power")
    importance_exponent: Scalar = number(0.6, low=0, high=1, help="prioritised: beta of the weights")
    target_period: int = static(2500, low=1, help="updates between two target updates")
    n_step: int = static(5, low=1, help="rewards summed before bootstrapping")
    prioritised: bool = static(True, help="draw transitions by how wrong the network was there")
    value_rescaling: bool = static(True, help="learn returns on a scale that flattens large ones")
    ladder: bool = static(True, help="epsilons fall from the first environment to the last")
    sequence_length: int = static(81, low=2, help="recurrent: rows that are learnt from, the last to bootstrap only")
    burn_in: int = static(40, low=0, help="recurrent: rows before these, to warm up the recurrent state")
    capacity: int = static(1_000_000, low=1, help="rows that the replay holds, over all environments")
    min_size: int = static(50_000, low=1, help="rows before the first update")
    batch_size: int = static(64, low=1, help="sequences an update")
    rollout_length: int = static(40, low=1, help="rows of every environment between two rounds of updates")
    optimiser: Optimiser = number(Adam(eps=1e-3))
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
