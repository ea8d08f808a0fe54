"""Of BatchPPO: the paper and its code."""

import math

from jaxrl.algos.optimizers import Adam
from jaxrl.algos.ppo import PPO
from jaxrl.networks import GRU, MLP, ActorCritic
from jaxrl.run.presets.description import Preset

_FEED_FORWARD = MLP((200, 100), activation="relu")


def _batchppo(
    gamma: float,
    value_learning_rate: float | None,
    policy_factor: float,
    initial_log_std: float,
    episodes: int = 25,
    torso: MLP = _FEED_FORWARD,
    core: GRU | None = None,
) -> PPO:
    return PPO(
        learning_rate=1e-4,
        value_learning_rate=value_learning_rate,
        gamma=gamma,
        gae_lambda=1.0,  # Monte Carlo returns
        value_cost=1.0,
        entropy_cost=0.0,
        max_grad_norm=None,
        observation_clip=5.0,
        reward_clip=10.0,
        objective="kl",
        kl_target=0.01,
        kl_cutoff_cost=1000.0,
        initial_penalty=1.0,
        rollout_length=32,
        epochs=25,
        minibatches=1,
        clip_value=False,
        normalize_advantage=True,
        normalize_observation=True,
        normalize_reward=True,
        whole_episodes=episodes,
        max_episode_length=1000,
        bootstrap_truncated=False,
        optimizer=Adam(b1=0.9, b2=0.999, eps=1e-8),
        network=ActorCritic(
            torso=torso,
            core=core,
            shared=False,
            continuous="tanh_mean",
            state_dependent_std=False,
            # Deviations: variance_scaling(f) has sqrt(f / inputs), an orthogonal kernel of gain g has g / sqrt(inputs).
            policy_gain=math.sqrt(policy_factor),
            value_gain=1.0,
            initial_log_std=initial_log_std,
        ),
    )


_BATCHPPO = (
    "{what} Like that code it squashes the mean action by tanh and clips samples to their bounds. Differences: "
    "orthogonal initialization, whose output gain of "
    "sqrt({factor}) gives the deviation of its variance_scaling({factor}); "
    "rewards are divided by the deviation of the discounted return, there by their own; the hinge of the KL penalty is "
    "of the batch's mean, there of each episode's; means leave out the padding after an episode's end, which there "
    "dilutes them."
)


PRESETS = (
    Preset(
        name="batchppo-paper",
        algorithm=_batchppo(gamma=0.985, value_learning_rate=1e-3, policy_factor=0.05, initial_log_std=-1.0),
        env="brax:walker2d",
        total_steps=10_000_000,
        topology={"num_envs": 25},
        source=_BATCHPPO.format(
            what="Hafner, Davidson and Vanhoucke (2017), arXiv:1709.02878, section 4; what the paper is silent on "
            "from its release, github.com/google-research/batch-ppo at 5978698. It ran Gym's MuJoCo environments.",
            factor=0.05,
        ),
    ),
    Preset(
        name="batchppo-recurrent",
        algorithm=_batchppo(
            gamma=0.985,
            value_learning_rate=1e-3,
            policy_factor=0.05,
            initial_log_std=-1.0,
            torso=MLP((200,), activation="relu"),
            core=GRU(100),
        ),
        env="brax:walker2d",
        total_steps=10_000_000,
        topology={"num_envs": 25},
        source=_BATCHPPO.format(
            what="The settings of batchppo-paper, with the recurrent network that Hafner et al. (2017), "
            "arXiv:1709.02878, tried in section 6: the last layer, of 100 units, is a GRU, as of recurrent_gaussian in "
            "github.com/google-research/batch-ppo, agents/scripts/networks.py. There the value stays feed-forward and "
            "the reset gate comes before the recurrent product; here the value has a GRU of its own.",
            factor=0.05,
        ),
    ),
    Preset(
        name="batchppo-head",
        algorithm=_batchppo(
            gamma=0.995,
            value_learning_rate=None,
            policy_factor=0.1,
            initial_log_std=-1.05,  # a deviation of 0.35 at the start
            episodes=30,
        ),
        env="brax:walker2d",
        total_steps=10_000_000,
        topology={"num_envs": 30},
        source=_BATCHPPO.format(
            what="github.com/google-research/batch-ppo at its last commit, 3d09705: agents/scripts/configs.py.",
            factor=0.1,
        ),
    ),
)
