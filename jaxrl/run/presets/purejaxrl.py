"""Of the libraries of whole programs in JAX: purejaxrl, purejaxql and gymnax-blines."""

from jaxrl.algos.ppo import PPO
from jaxrl.algos.pqn import PQN
from jaxrl.core.schedules import Linear
from jaxrl.networks import MLP, ActionValues, MinAtarCNN, QNetwork
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset


def _purejaxrl_ppo(learning_rate: float, minibatches: int, activation: str) -> PPO:
    return plain.ppo(
        plain.separate(MLP((64, 64), activation=activation)),
        learning_rate=Linear(learning_rate, 0.0),
        entropy_cost=0.01,
        rollout_length=128,
        epochs=4,
        minibatches=minibatches,
    )


PRESETS = (
    Preset(
        name="purejaxrl-cartpole",
        algorithm=_purejaxrl_ppo(2.5e-4, minibatches=4, activation="tanh"),
        env="gymnax:CartPole-v1",
        total_steps=500_000,
        topology={"num_envs": 4},
        source="github.com/luchris429/purejaxrl, purejaxrl/ppo.py. It treats time limits as terminations; "
        "here they are bootstrapped (--no-bootstrap-truncated undoes it).",
    ),
    Preset(
        name="purejaxrl-minatar",
        algorithm=_purejaxrl_ppo(5e-3, minibatches=8, activation="relu"),
        env="gymnax:SpaceInvaders-MinAtar",
        total_steps=10_000_000,
        topology={"num_envs": 64},
        source="github.com/luchris429/purejaxrl, examples/brax_minatar.ipynb. It treats time limits "
        "as terminations; here they are bootstrapped (--no-bootstrap-truncated undoes it).",
    ),
    Preset(
        name="gymnax-minatar",
        algorithm=plain.ppo(
            plain.separate(MLP((256, 256), activation="relu")),
            learning_rate=5e-4,
            gamma=0.999,
            entropy_cost=0.01,
            rollout_length=128,
            epochs=4,
            minibatches=8,
        ),
        env="gymnax:Breakout-MinAtar",
        total_steps=10_000_000,
        topology={"num_envs": 64},
        source="github.com/RobertTLange/gymnax-blines, agents/Breakout-MinAtar/ppo.yaml. Its networks are separate "
        "too, and its warm-up of the learning rate does nothing. Initialization differs: here it is orthogonal. It "
        "treats time limits as terminations.",
    ),
    Preset(
        name="purejaxrl-brax",
        algorithm=plain.ppo(
            plain.separate(MLP((256, 256), activation="tanh")),
            normalized=True,
            learning_rate=3e-4,
            entropy_cost=0.0,
            bootstrap_truncated=False,
            rollout_length=10,
            epochs=4,
            minibatches=32,
        ),
        env="brax:hopper",
        total_steps=50_000_000,
        topology={"num_envs": 2048},
        source="github.com/luchris429/purejaxrl, purejaxrl/ppo_continuous_action.py. Its brax is positional "
        "(--env-params backend=positional). It normalizes by statistics of every step and clips nothing; here they are "
        "of the batches before, clipped at 10.",
    ),
    Preset(
        name="purejaxql-minatar",
        algorithm=PQN(
            learning_rate=Linear(5e-4, 0.0),
            gamma=0.99,
            return_lambda=0.65,
            epsilon=Linear(1.0, 0.05, 0.1),
            max_grad_norm=10.0,
            rollout_length=32,
            epochs=2,
            minibatches=32,
            ladder=False,
            random_persistence=0.0,
            optimizer=plain.RADAM,
            network=QNetwork(
                torso=MinAtarCNN(filters=16, kernel=3, width=128, normalization="layer"),
                core=None,
                head=ActionValues(dueling=False, widths=(), gain=1.0, noisy=False),
            ),
        ),
        env="gymnax:Asterix-MinAtar",
        total_steps=10_000_000,
        topology={"num_envs": 128},
        source="github.com/mttga/purejaxql, purejaxql/config/alg/pqn_minatar.yaml. It divides MinAtar's observations, "
        "which are 0 and 1, by 255, and treats time limits as terminations; kernels are orthogonal here.",
    ),
)
