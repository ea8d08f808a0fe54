"""Of CleanRL: the defaults of its single files."""

import math
from typing import Any

from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.pqn import PQN
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActionValues, ActorCritic, CategoricalValues, NatureCNN, QNetwork
from jaxrl.networks.q_heads import QHead
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_SOURCE = "github.com/vwxyzjn/cleanrl, cleanrl/{file}.py."


def _dqn(head: QHead, optimizer: Adam, **fields: Any) -> DQN:
    return DQN(
        learning_rate=2.5e-4,
        gamma=0.99,
        epsilon=Linear(1.0, 0.05, 0.5),
        max_grad_norm=None,
        target_period=50,  # updates, of 10 environment steps each
        capacity=10_000,
        min_size=10_000,
        batch_size=128,
        rollout_length=10,
        replay_ratio=0.1,
        optimizer=optimizer,
        network=QNetwork(torso=MLP((120, 84), activation="relu"), core=None, head=head),
        **plain.DQN | fields,
    )


PRESETS = (
    Preset(
        name="cleanrl-ppo-continuous",
        algorithm=plain.ppo(
            plain.separate(MLP((64, 64), activation="tanh")),
            normalized=True,
            learning_rate=Linear(3e-4, 0.0),
            entropy_cost=0.0,
            bootstrap_truncated=False,
            rollout_length=2048,
            epochs=10,
            minibatches=32,
        ),
        env="envpool:HalfCheetah-v4",
        total_steps=1_000_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="ppo_continuous_action") + plain.BATCHES,
    ),
    Preset(
        name="cleanrl-ppo-atari",
        algorithm=plain.ppo(
            ActorCritic(torso=NatureCNN(), core=None, shared=True, policy_gain=0.01, value_gain=1.0),
            learning_rate=Linear(2.5e-4, 0.0),
            clip=0.1,
            entropy_cost=0.01,
            bootstrap_truncated=False,
            rollout_length=128,
            epochs=4,
            minibatches=4,
        ),
        env="envpool:Breakout-v5",
        total_steps=10_000_000,
        topology={"num_envs": 8},
        source=_SOURCE.format(file="ppo_atari") + " Its episodes end with a life and its rewards are clipped to their "
        "sign: --env-params preset=classic.",
    ),
    Preset(
        name="cleanrl-pqn",
        algorithm=PQN(
            learning_rate=Linear(2.5e-4, 0.0),
            gamma=0.99,
            return_lambda=0.65,
            epsilon=Linear(1.0, 0.05, 0.5),
            max_grad_norm=5.0,  # its 10, of the whole squared error
            rollout_length=128,
            epochs=4,
            minibatches=4,
            ladder=False,
            random_persistence=0.0,
            optimizer=plain.RADAM,
            network=QNetwork(
                torso=MLP((120, 84), activation="relu", normalization="layer"),
                core=None,
                head=ActionValues(dueling=False, widths=(), gain=math.sqrt(2.0), noisy=False),
            ),
        ),
        env="gymnax:CartPole-v1",
        total_steps=500_000,
        topology={"num_envs": 4},
        source=_SOURCE.format(file="pqn") + " It treats time limits as terminations.",
    ),
    Preset(
        name="cleanrl-dqn",
        algorithm=_dqn(ActionValues(dueling=False, widths=(), noisy=False), plain.ADAM),
        env="gymnax:CartPole-v1",
        total_steps=500_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="dqn") + plain.ORTHOGONAL,
    ),
    Preset(
        name="cleanrl-c51",
        algorithm=_dqn(
            CategoricalValues(atoms=101, dueling=False, widths=(), noisy=False),
            Adam(b1=0.9, b2=0.999, eps=0.01 / 128),
            v_min=-100.0,
            v_max=100.0,
        ),
        env="gymnax:CartPole-v1",
        total_steps=500_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="c51") + plain.ORTHOGONAL,
    ),
    Preset(
        name="cleanrl-sac",
        algorithm=plain.sac(
            (256, 256),
            initial_log_std=-1.5,
            learning_rate=1e-3,
            policy_learning_rate=3e-4,
            temperature_learning_rate=1e-3,
            min_size=5_000,
        ),
        env="envpool:Hopper-v4",
        total_steps=1_000_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="sac_continuous_action") + " It updates the policy and the temperature twice every "
        "other step, here once every step. Its logarithm of the deviation is squashed into -5 to 2." + plain.ORTHOGONAL,
    ),
    Preset(
        name="cleanrl-td3",
        algorithm=plain.td3((256, 256), learning_rate=3e-4, policy_learning_rate=3e-4, min_size=25_000),
        env="envpool:Hopper-v4",
        total_steps=1_000_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="td3_continuous_action") + plain.ORTHOGONAL,
    ),
)
