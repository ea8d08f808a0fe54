"""CrossQ (Bhatt et al., 2024, arXiv:1902.05605v4): soft actor-critic with batch normalization, without targets.

The observation and the next observation of a transition pass through the critics in one batch, so that batch
normalization sees the actions of the data and of the policy. This makes target networks unnecessary.
"""

from jaxrl.algos.acting import Noise
from jaxrl.algos.base import algorithm, changed
from jaxrl.algos.optimizers import Adam, Optimizer
from jaxrl.algos.sac import SAC
from jaxrl.core.schedules import Scalar
from jaxrl.core.types import Network
from jaxrl.networks import Actor, Critic


@algorithm
class CrossQ(SAC):
    """SAC without target networks: wide critics with batch renormalization over observations and next observations."""

    learning_rate: Scalar = changed(1e-3)
    tau: Scalar | None = changed(None)
    joint_batch: bool = changed(True)
    policy_delay: int = changed(3)
    min_size: int = changed(5_000)
    noise: Noise = changed(Noise())
    optimizer: Optimizer = changed(Adam(b1=0.5, eps=1e-8))
    policy: Network = changed(Actor(normalization="batch_renorm", normalize_inputs=True))
    critic: Critic = changed(Critic(widths=(2048, 2048), normalization="batch_renorm", normalize_inputs=True))
