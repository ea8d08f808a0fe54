"""Published settings by name, each with its source."""

import dataclasses
from typing import Any

from jaxrl.algos.dqn import DQN
from jaxrl.algos.impala import IMPALA
from jaxrl.algos.optimisers import Adam, RMSProp
from jaxrl.algos.ppo import PPO
from jaxrl.algos.r2d2 import R2D2
from jaxrl.networks import LSTM, MLP, ActorCritic, CategoricalValues, ImpalaCNN, ImpalaResNet, QNetwork, Torso
from jaxrl.schedules import Linear
from jaxrl.sources import FrameStack


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a whole run.

    Attributes:
      name: for `--preset`.
      algorithm: with all its fields.
      env: where it was used; any other of its kind may take its place.
      num_envs: environments.
      total_steps: how long it was trained.
      source: where the numbers are from, and where this differs.
    """

    name: str
    algorithm: Any
    env: str
    num_envs: int
    total_steps: int
    source: str


_BATCHPPO = PPO(
    learning_rate=1e-4,
    gae_lambda=1.0,  # Monte Carlo returns
    value_cost=1.0,
    entropy_cost=0.0,
    max_grad_norm=None,
    observation_clip=5.0,
    objective="kl",
    rollout_length=1000,
    minibatches=1,
    clip_value=False,
    normalize_observation=True,
    normalize_reward=True,
    whole_episodes=True,
    bootstrap_truncated=False,
    optimiser=Adam(eps=1e-8),
)


def _batchppo_network(policy_gain: float, initial_log_std: float) -> ActorCritic:
    torso = MLP((200, 100), activation="relu")
    return ActorCritic(torso=torso, policy_gain=policy_gain, initial_log_std=initial_log_std)


def _impala_paper(torso: Torso) -> IMPALA:
    return IMPALA(
        learning_rate=Linear(6e-4, 0.0),
        gamma=0.99,
        value_cost=0.5,
        entropy_cost=0.01,
        max_grad_norm=40.0,
        rollout_length=20,
        reduction="sum",
        reward_clipping="abs_one",
        bootstrap_truncated=False,
        optimiser=RMSProp(decay=0.99, eps=0.01),
        network=ActorCritic(torso, core=LSTM(256), shared=True, previous_action=True, previous_reward=True),
    )


_IMPALA_PAPER = (
    "Espeholt et al. (2018), arXiv:1802.01561: figure 3 {side} and the settings of its appendix on Atari, in batches "
    "of 32 rollouts; what they are silent on from its code, github.com/google-deepmind/scalable_agent. Its episodes "
    "end with a life: --env-params preset=classic. --network.core none leaves out the LSTM."
)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="purejaxrl-cartpole",
            algorithm=PPO(learning_rate=Linear(2.5e-4, 0.0)),
            env="gymnax:CartPole-v1",
            num_envs=4,
            total_steps=500_000,
            source="github.com/luchris429/purejaxrl, purejaxrl/ppo.py. It takes time limits for ends; here they are "
            "bootstrapped, as --no-bootstrap-truncated undoes.",
        ),
        Preset(
            name="purejaxrl-minatar",
            algorithm=PPO(
                learning_rate=Linear(5e-3, 0.0),
                minibatches=8,
                network=ActorCritic(torso=MLP((64, 64), activation="relu")),
            ),
            env="gymnax:SpaceInvaders-MinAtar",
            num_envs=64,
            total_steps=10_000_000,
            source="github.com/luchris429/purejaxrl, examples/brax_minatar.ipynb. Time limits as above.",
        ),
        Preset(
            name="gymnax-minatar",
            algorithm=PPO(
                learning_rate=5e-4,
                gamma=0.999,
                minibatches=8,
                network=ActorCritic(torso=MLP((256, 256), activation="relu")),
            ),
            env="gymnax:Breakout-MinAtar",
            num_envs=64,
            total_steps=10_000_000,
            source="github.com/RobertTLange/gymnax-blines, agents/Breakout-MinAtar/ppo.yaml; without its warm-up of "
            "the learning rate over the first 5 %, and with separate networks for policy and value.",
        ),
        Preset(
            name="batchppo-paper",
            algorithm=_BATCHPPO.replace(
                value_learning_rate=1e-3,
                gamma=0.985,
                epochs=25,
                network=_batchppo_network(policy_gain=0.05, initial_log_std=-1.0),
            ),
            env="brax:walker2d",
            num_envs=25,
            total_steps=10_000_000,
            source="Hafner, Davidson and Vanhoucke (2017), arXiv:1709.02878, section 4; what the paper is silent on "
            "from its release, github.com/google-research/batch-ppo at 5978698. It ran MuJoCo's environments of Gym, "
            "and a tanh on the mean action, which is left out.",
        ),
        Preset(
            name="batchppo-head",
            algorithm=_BATCHPPO.replace(
                gamma=0.995,
                epochs=25,
                network=_batchppo_network(policy_gain=0.1, initial_log_std=-1.05),  # a deviation of 0.35
            ),
            env="brax:walker2d",
            num_envs=30,
            total_steps=10_000_000,
            source="github.com/google-research/batch-ppo at its last commit, 3d09705: agents/scripts/configs.py; "
            "without the tanh on the mean action.",
        ),
        Preset(
            name="rainbow",
            algorithm=DQN(
                learning_rate=6.25e-5,
                epsilon=0.0,  # the noise of its layers explores
                target_period=2000,  # updates, of 4 rows each
                n_step=3,
                prioritised=True,
                priority_exponent=0.5,
                importance_exponent=Linear(0.4, 1.0),
                v_min=-10.0,
                v_max=10.0,
                capacity=1_000_000,
                min_size=20_000,
                batch_size=32,
                rollout_length=4,
                updates=8,
                optimiser=Adam(eps=1.5e-4),
                network=QNetwork(head=CategoricalValues(dueling=True, widths=(512,), noisy=True)),
            ),
            env="gymnax:Breakout-MinAtar",
            num_envs=8,
            total_steps=5_000_000,
            source="Hessel et al. (2018), arXiv:1710.02298, table 1, with an update every 4 rows; here in 8 "
            "environments at once, on MinAtar, with noise drawn for every transition and gradients clipped.",
        ),
        Preset(
            name="r2d2",
            algorithm=R2D2(capacity=4_000_000, min_size=100_000, frame_stack=FrameStack(4, axis=0)),
            env="envpool:Pong-v5",
            num_envs=192,
            total_steps=100_000_000,
            source="Kapturowski et al. (2019), openreview.net/forum?id=r1lyTjAqYX, at the scale of rlpyt's R2D1 "
            "(arXiv:1909.01500): 192 environments, an update of 64 sequences every 40 rows of each, 4M rows. Here "
            "frames are 84 x 84 in stacks of 4, and new sequences get the largest priority.",
        ),
        Preset(
            name="torchbeast",
            algorithm=IMPALA(
                learning_rate=Linear(4.8e-4, 0.0),
                gamma=0.99,
                value_cost=0.5,
                entropy_cost=6e-4,
                max_grad_norm=40.0,
                rollout_length=80,
                reduction="sum",
                reward_clipping="abs_one",
                bootstrap_truncated=False,
                optimiser=RMSProp(decay=0.99, eps=0.01, eps_in_root=False),
                network=ActorCritic(ImpalaResNet(), shared=True, previous_reward=True),
            ),
            env="envpool:Pong-v5",
            num_envs=8,
            total_steps=50_000_000,
            source="github.com/facebookresearch/torchbeast at 3f3029c, the defaults of polybeast_learner.py (monobeast "
            "has the same ones, with another network), in batches of 8 rollouts; the length is its paper's, "
            "arXiv:1910.03552. Its episodes end with a life: --env-params preset=classic. --network.core lstm:256 "
            "is its --use_lstm.",
        ),
        Preset(
            name="impala-paper",
            algorithm=_impala_paper(ImpalaResNet()),
            env="envpool:Pong-v5",
            num_envs=32,
            total_steps=50_000_000,
            source=_IMPALA_PAPER.format(side="right (deep)"),
        ),
        Preset(
            name="impala-paper-shallow",
            algorithm=_impala_paper(ImpalaCNN()),
            env="envpool:Pong-v5",
            num_envs=32,
            total_steps=50_000_000,
            source=_IMPALA_PAPER.format(side="left (shallow)"),
        ),
    )
}
