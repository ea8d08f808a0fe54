"""Algorithms: losses, targets and exploration, one file each."""

from jaxrl.algos.a2c import A2C
from jaxrl.algos.alphazero import AlphaZero
from jaxrl.algos.base import ALGORITHMS, make_algorithm
from jaxrl.algos.bc import BC
from jaxrl.algos.cql import CQL
from jaxrl.algos.crossq import CrossQ
from jaxrl.algos.crr import CRR
from jaxrl.algos.ddpg import D4PG, DDPG, TD3
from jaxrl.algos.dqn import DQN
from jaxrl.algos.dreamer import Dreamer
from jaxrl.algos.gail import GAIL
from jaxrl.algos.impala import IMPALA
from jaxrl.algos.iql import IQL
from jaxrl.algos.mpo import MPO
from jaxrl.algos.muzero import MuZero
from jaxrl.algos.ppo import PPO
from jaxrl.algos.pqn import PQN
from jaxrl.algos.r2d2 import R2D2
from jaxrl.algos.reppo import REPPO
from jaxrl.algos.sac import SAC
from jaxrl.algos.td3_bc import TD3BC
from jaxrl.algos.vmpo import VMPO

__all__ = [
    "A2C",
    "ALGORITHMS",
    "BC",
    "CQL",
    "CRR",
    "D4PG",
    "DDPG",
    "DQN",
    "GAIL",
    "IMPALA",
    "IQL",
    "MPO",
    "PPO",
    "PQN",
    "R2D2",
    "REPPO",
    "SAC",
    "TD3",
    "TD3BC",
    "VMPO",
    "AlphaZero",
    "CrossQ",
    "Dreamer",
    "MuZero",
    "make_algorithm",
]


def __dir__() -> list[str]:
    return sorted(__all__)
