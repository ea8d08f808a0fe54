"""jaxrl: reinforcement learning in JAX, environment, replay and learner in one compiled program."""

from jaxrl import envs, networks, schedules
from jaxrl.algos import (
    A2C,
    ALGORITHMS,
    BC,
    CQL,
    CRR,
    D4PG,
    DDPG,
    DQN,
    IMPALA,
    IQL,
    MPO,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    TD3BC,
    make_algorithm,
)
from jaxrl.data import Dataset, Record, export_minari, export_replay, export_rlds, load_dataset
from jaxrl.envs import check_env, environments, make, register
from jaxrl.errors import JaxrlError
from jaxrl.evaluation import Evaluation, evaluate
from jaxrl.loading import load
from jaxrl.parallel.anakin import Anakin
from jaxrl.parallel.offline import Offline
from jaxrl.parallel.remote import Remote
from jaxrl.parallel.sebulba import Sebulba
from jaxrl.policy import Policy
from jaxrl.pure import make_train
from jaxrl.rendering import render
from jaxrl.result import Result
from jaxrl.search import LogUniform, Uniform
from jaxrl.sweep import SweepResult, sweep
from jaxrl.training import train

__version__ = "0.1.0"

__all__ = [
    "A2C",
    "ALGORITHMS",
    "BC",
    "CQL",
    "CRR",
    "D4PG",
    "DDPG",
    "DQN",
    "IMPALA",
    "IQL",
    "MPO",
    "PPO",
    "PQN",
    "R2D2",
    "SAC",
    "TD3",
    "TD3BC",
    "Anakin",
    "Dataset",
    "Evaluation",
    "JaxrlError",
    "LogUniform",
    "Offline",
    "Policy",
    "Record",
    "Remote",
    "Result",
    "Sebulba",
    "SweepResult",
    "Uniform",
    "check_env",
    "environments",
    "envs",
    "evaluate",
    "export_minari",
    "export_replay",
    "export_rlds",
    "load",
    "load_dataset",
    "make",
    "make_algorithm",
    "make_train",
    "networks",
    "register",
    "render",
    "schedules",
    "sweep",
    "train",
]
