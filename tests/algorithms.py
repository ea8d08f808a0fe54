"""The registry of algorithms at a tiny size, and the environment that each acts in.

Tests that go over algorithms, and whose numbers do not matter, take these, so that what one compiles others find.
"""

from helpers import continuous, offline, programs
from helpers.continuous import NETWORKS
from helpers.programs import DQN, ENV, PPO, REPLAY, ROWS

import jaxrl
from jaxrl.algos.acting import Noise
from jaxrl.algos.kl_penalty import KLPenalty
from jaxrl.algos.munchausen import Munchausen
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.reward_scale import RewardScale
from jaxrl.algos.rnd import RND
from jaxrl.algos.search import TreeSearch
from jaxrl.networks import (
    GRU,
    Actor,
    ActorCritic,
    CategoricalValues,
    Critic,
    ImplicitQuantileValues,
    InvertedResidual,
    ModelNetwork,
    QNetwork,
    SelfPredictiveValues,
)

BOX = jaxrl.make("probe:Truncated", max_steps=3, continuous=True)
ROLLOUTS = {"rollout_length": 8, "learning_rate": 1e-3, "network": PPO.network}
MINIBATCHES = {"epochs": 1, "minibatches": 2}
# A large eps, as rounding decides the sign of what is all but 0.
COARSE = {"learning_rate": 1e-2, "optimizer": Adam(eps=1e-2)}
WITH_RENORM = {"widths": (8,), "normalization": "batch_renorm", "normalize_inputs": True}

VMPO = jaxrl.VMPO(**ROLLOUTS, **MINIBATCHES, target_period=2, entropy_cost=0.01)
REPPO = jaxrl.REPPO(
    **COARSE,
    **MINIBATCHES,
    rollout_length=8,
    v_min=-5.0,
    v_max=5.0,
    policy=Actor(widths=(8,)),
    critic=Critic(widths=(8,), ensemble=1, head=SelfPredictiveValues(11, widths=(8,))),
)
ALGORITHMS = {
    "ppo": PPO,
    "recurrent_ppo": programs.RECURRENT_PPO,
    # Episodes have at most 12 transitions; those that are still going on when a batch is taken are in the next one.
    "whole_episodes": PPO.replace(whole_episodes=WholeEpisodes(episodes=8, max_length=12), rollout_length=14),
    "rnd": PPO.replace(exploration_bonus=RND(learning_rate=1e-3, features=8, widths=(8,), torso=programs.SMALL)),
    "a2c": jaxrl.A2C(**ROLLOUTS | {"learning_rate": 1e-2}, entropy_cost=0.01),
    "impala": jaxrl.IMPALA(**ROLLOUTS | {"learning_rate": 1e-2}, entropy_cost=0.01),
    "vmpo": VMPO,
    "reppo": REPPO,
    "pqn": jaxrl.PQN(**MINIBATCHES, rollout_length=8, random_persistence=0.9, network=QNetwork(programs.SMALL)),
    # Which plans in the environments, so never on the host.
    "alphazero": jaxrl.AlphaZero(**ROLLOUTS, **MINIBATCHES, tree_search=TreeSearch(simulations=4)),
    "dqn": DQN,
    "btr": DQN.replace(
        munchausen=Munchausen(),
        network=QNetwork(programs.SMALL, head=ImplicitQuantileValues(4, 8, dueling=True, widths=(8,), noisy=True)),
    ),
    "r2d2": programs.R2D2,
    "r2d2_within_episodes": programs.R2D2.replace(memory=programs.R2D2.memory.replace(cross_episodes=False)),
    "dreamer": programs.DREAMER,
    "muzero": jaxrl.MuZero(
        **REPLAY | {"batch_size": 16, "replay_ratio": 1 / ROWS},
        **COARSE | {"learning_rate": 1e-3},
        tree_search=TreeSearch(simulations=4, epsilon=0.0),
        unroll_steps=2,
        n_step=3,
        network=ModelNetwork(programs.SMALL, width=8, widths=(8,), atoms=11),
    ),
    # Devices share the statistics of a batch.
    "crossq": jaxrl.CrossQ(
        **REPLAY,
        learning_rate=1e-2,
        optimizer=Adam(b1=0.5, eps=1e-2),
        policy_delay=2,
        n_step=3,
        policy=Actor(**WITH_RENORM),
        critic=Critic(**WITH_RENORM),
    ),
    # All parts at once: returns that acting keeps, held noise, critics over both ends, weights of unit norm.
    "flashsac": jaxrl.CrossQ(
        **REPLAY,
        **COARSE,
        tau=0.005,
        policy_delay=2,
        joint_policy=True,
        reward_scale=RewardScale(),
        noise=Noise(random_correlation=0.9, hold=4),
        v_min=-5.0,
        v_max=5.0,
        policy=Actor(torso=InvertedResidual(4, 1, 2), widths=(), gain=None),
        critic=Critic(trunk=InvertedResidual(4, 1, 2), widths=(), head=CategoricalValues(11, gain=None)),
    ),
    "sac_discrete": jaxrl.SAC(**NETWORKS, **REPLAY),
}
FROM_DATA = {"gail": continuous.GAIL.replace(**REPLAY), **offline.ALGORITHMS}
IN_BOX = {"vmpo_continuous": VMPO, "reppo_continuous": REPPO, "crossq_continuous": continuous.CROSSQ.replace(**REPLAY)}
IN_BOX |= {name: continuous.ALGORITHMS[name].replace(**REPLAY) for name in ("sac", "mpo", "td3", "ddpg", "d4pg")}
ENVIRONMENTS = dict.fromkeys(ALGORITHMS, ENV) | dict.fromkeys(IN_BOX | FROM_DATA, BOX)
ENVIRONMENTS["composite"] = jaxrl.make("probe:ActionReward", composite=True, terminate_after=3)
ALGORITHMS |= IN_BOX | FROM_DATA
# With the KL of the whole action in its loss, and every part of the last action in its inputs.
NETWORK = ActorCritic(programs.SMALL, core=GRU(8), previous_action=True, shared=True)
ALGORITHMS["composite"] = PPO.replace(kl_penalty=KLPenalty(), network=NETWORK)
