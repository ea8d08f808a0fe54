"""Algorithms: losses, targets and exploration, one file each."""

from jaxrl.algos.a2c import A2C
from jaxrl.algos.base import ALGORITHMS, make_algorithm
from jaxrl.algos.dqn import DQN
from jaxrl.algos.ppo import PPO

__all__ = ["A2C", "ALGORITHMS", "DQN", "PPO", "make_algorithm"]
