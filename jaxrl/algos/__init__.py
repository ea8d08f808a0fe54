"""Algorithms: losses, targets and exploration, one file each."""

from jaxrl.algos.a2c import A2C
from jaxrl.algos.base import ALGORITHMS, make_algorithm
from jaxrl.algos.ddpg import DDPG
from jaxrl.algos.dqn import DQN
from jaxrl.algos.ppo import PPO
from jaxrl.algos.pqn import PQN
from jaxrl.algos.sac import SAC
from jaxrl.algos.td3 import TD3

__all__ = ["A2C", "ALGORITHMS", "DDPG", "DQN", "PPO", "PQN", "SAC", "TD3", "make_algorithm"]
