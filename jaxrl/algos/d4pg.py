"""Distributed distributional deterministic policy gradients (Barth-Maron et al., 2018, arXiv:1804.08617)."""

from jaxrl.algos import q_learning
from jaxrl.algos.base import algorithm, number, static
from jaxrl.algos.ddpg import DDPG
from jaxrl.networks import CategoricalValues, Critic
from jaxrl.schedules import Linear, Scalar
from jaxrl.sources import Prioritised, Sampler


@algorithm
class D4PG(DDPG):
    """DDPG whose critic predicts the distribution of returns, several steps ahead, from a prioritised replay."""

    exploration_noise: Scalar = number(0.3, low=0, help="deviation of the actions' noise, over half their range")
    v_min: Scalar = number(-150.0, help="categorical head: lowest return")
    v_max: Scalar = number(150.0, help="categorical head: highest return")
    quantile_huber: Scalar = number(1.0, above=0, help="quantile head: error from which the loss is linear")
    priority_exponent: Scalar = number(0.6, low=0, help="prioritised: chances are priorities to this power")
    importance_exponent: Scalar = number(Linear(0.4, 1.0), low=0, high=1, help="prioritised: beta of the weights")
    prioritised: bool = static(True, help="draw transitions by how wrong the critic was there")
    n_step: int = static(5, low=1, help="rewards summed before bootstrapping")
    critic: Critic = static(Critic(ensemble=1, head=CategoricalValues(51)))

    def support_problems(self) -> list[str]:
        return q_learning.support_problems(self)

    @property
    def sampler(self) -> Sampler:
        if not self.prioritised:
            return super().sampler
        return Prioritised(exponent=self.priority_exponent, beta=self.importance_exponent)
