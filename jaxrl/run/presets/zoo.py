"""Of RL Zoo: the tuned settings of Stable-Baselines3 for classic control, with what that library's defaults add."""

from typing import Any

from jaxrl.algos.dqn import DQN
from jaxrl.algos.ppo import PPO
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActionValues, QNetwork
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_SOURCE = "github.com/DLR-RM/rl-baselines3-zoo, hyperparams/{file}.yml, and Stable-Baselines3's own defaults."


def _ppo(**fields: Any) -> PPO:
    settings: dict[str, Any] = {
        "learning_rate": 3e-4,
        "value_cost": 1.0,  # its 0.5, of the whole squared error
        "entropy_cost": 0.0,
        "clip_value": False,
    }
    settings.update(fields)
    return plain.ppo(plain.separate(MLP((64, 64), activation="tanh")), **settings)


def _dqn(**fields: Any) -> DQN:
    head = ActionValues(dueling=False, widths=(), gain=1.0, noisy=False)
    settings: dict[str, Any] = plain.DQN | {"huber": 1.0, "max_grad_norm": 10.0, "optimizer": plain.ADAM}
    settings["network"] = QNetwork(torso=MLP((256, 256), activation="relu"), core=None, head=head)
    return DQN(**settings | fields)


PRESETS = (
    Preset(
        name="zoo-ppo-cartpole",
        algorithm=_ppo(
            learning_rate=Linear(1e-3, 0.0),
            clip=Linear(0.2, 0.0),
            gamma=0.98,
            gae_lambda=0.8,
            rollout_length=32,
            epochs=20,
            minibatches=1,
        ),
        env="gymnax:CartPole-v1",
        total_steps=100_000,
        topology={"num_envs": 8},
        source=_SOURCE.format(file="ppo"),
    ),
    Preset(
        name="zoo-ppo-pendulum",
        algorithm=_ppo(learning_rate=1e-3, gamma=0.9, gae_lambda=0.95, rollout_length=1024, epochs=10, minibatches=64),
        env="gymnax:Pendulum-v1",
        total_steps=100_000,
        topology={"num_envs": 4},
        source=_SOURCE.format(file="ppo") + " Its noise depends on the state (gSDE); here it is drawn at every step.",
    ),
    Preset(
        name="zoo-ppo-mountaincar",
        algorithm=_ppo(normalized=True, gae_lambda=0.98, rollout_length=16, epochs=4, minibatches=4),
        env="gymnax:MountainCar-v0",
        total_steps=1_000_000,
        topology={"num_envs": 16},
        source=_SOURCE.format(file="ppo") + plain.BATCHES,
    ),
    Preset(
        name="zoo-ppo-acrobot",
        algorithm=_ppo(normalized=True, gae_lambda=0.94, rollout_length=256, epochs=4, minibatches=64),
        env="gymnax:Acrobot-v1",
        total_steps=1_000_000,
        topology={"num_envs": 16},
        source=_SOURCE.format(file="ppo") + plain.BATCHES,
    ),
    Preset(
        name="zoo-ppo-lunarlander",
        algorithm=_ppo(gamma=0.999, gae_lambda=0.98, entropy_cost=0.01, rollout_length=1024, epochs=4, minibatches=256),
        env="envpool:LunarLander-v3",
        total_steps=1_000_000,
        topology={"num_envs": 16},
        source=_SOURCE.format(file="ppo"),
    ),
    Preset(
        name="zoo-dqn-cartpole",
        algorithm=_dqn(
            learning_rate=2.3e-3,
            gamma=0.99,
            epsilon=Linear(1.0, 0.04, 0.16),
            target_period=128,  # it copies every 10 steps, but between the updates of two rollouts only the last counts
            capacity=100_000,
            min_size=1_000,
            batch_size=64,
            rollout_length=256,
            replay_ratio=0.5,
        ),
        env="gymnax:CartPole-v1",
        total_steps=50_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="dqn") + plain.ORTHOGONAL,
    ),
    Preset(
        name="zoo-dqn-mountaincar",
        algorithm=_dqn(
            learning_rate=4e-3,
            gamma=0.98,
            epsilon=Linear(1.0, 0.07, 0.2),
            target_period=300,  # updates, of 2 environment steps each
            capacity=10_000,
            min_size=1_000,
            batch_size=128,
            rollout_length=16,
            replay_ratio=0.5,
        ),
        env="gymnax:MountainCar-v0",
        total_steps=120_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="dqn") + plain.ORTHOGONAL,
    ),
    Preset(
        name="zoo-dqn-acrobot",
        algorithm=_dqn(
            learning_rate=6.3e-4,
            gamma=0.99,
            epsilon=Linear(1.0, 0.1, 0.12),
            target_period=250,
            capacity=50_000,
            min_size=1,
            batch_size=128,
            rollout_length=4,
            replay_ratio=1.0,
        ),
        env="gymnax:Acrobot-v1",
        total_steps=100_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="dqn") + plain.ORTHOGONAL,
    ),
    Preset(
        name="zoo-sac-pendulum",
        algorithm=plain.sac(
            (256, 256),
            learning_rate=1e-3,
            policy_learning_rate=1e-3,
            temperature_learning_rate=1e-3,
            min_size=100,
        ),
        env="gymnax:Pendulum-v1",
        total_steps=20_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="sac") + plain.ORTHOGONAL,
    ),
    Preset(
        name="zoo-td3-pendulum",
        algorithm=plain.td3(
            (400, 300),
            learning_rate=1e-3,
            policy_learning_rate=1e-3,
            gamma=0.98,
            capacity=200_000,
            min_size=10_000,
        ),
        env="gymnax:Pendulum-v1",
        total_steps=20_000,
        topology={"num_envs": 1},
        source=_SOURCE.format(file="td3") + plain.ORTHOGONAL,
    ),
)
