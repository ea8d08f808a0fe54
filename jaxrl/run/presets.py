"""Published settings by name, each with its source.

A preset writes every field that its source fixes, also where that is the default today: no change of a default moves a
preset (`tests/golden/presets.json` holds them).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl.algos.dqn import DQN
from jaxrl.algos.impala import IMPALA
from jaxrl.algos.optimizers import Adam, RMSProp
from jaxrl.algos.ppo import PPO
from jaxrl.algos.r2d2 import R2D2
from jaxrl.core.errors import unknown
from jaxrl.core.schedules import Linear
from jaxrl.core.sources import FrameStack
from jaxrl.core.types import Algorithm
from jaxrl.networks import (
    LSTM,
    MLP,
    ActionValues,
    ActorCritic,
    CategoricalValues,
    Core,
    ImpalaCNN,
    ImpalaResNet,
    QNetwork,
    Torso,
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a whole run.

        preset = jaxrl.preset("purejaxrl-cartpole")
        topology = jaxrl.Anakin(**preset.topology)
        result = jaxrl.train(preset.algorithm, preset.env, total_steps=preset.total_steps, topology=topology)

    Attributes:
      name: as `jaxrl.preset` and `--preset` take it.
      algorithm: with all its fields.
      env: where it was used, "suite:name"; any other of its kind may take its place.
      total_steps: environment steps that it was trained for.
      topology: arguments of `Anakin` or `Sebulba`; "num_envs" is always among them.
      source: where the numbers are from, and where this differs.
    """

    name: str
    algorithm: Algorithm
    env: str
    total_steps: int
    topology: Mapping[str, Any]
    source: str


def preset(name: str) -> Preset:
    """Published settings by name; `jaxrl algos` lists them.

    Raises:
      ConfigError: there is no such preset; suggests the close names.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS, "jaxrl algos lists them")
    return PRESETS[name]


def _purejaxrl_ppo(learning_rate: float, minibatches: int, activation: str) -> PPO:
    return PPO(
        learning_rate=Linear(learning_rate, 0.0),
        minibatches=minibatches,
        network=_separate(MLP((64, 64), activation=activation)),
        optimizer=Adam(b1=0.9, b2=0.999, eps=1e-5),
        gamma=0.99,
        gae_lambda=0.95,
        clip=0.2,
        value_cost=0.5,
        entropy_cost=0.01,
        max_grad_norm=0.5,
        rollout_length=128,
        epochs=4,
        **_PLAIN_PPO,
    )


def _separate(torso: Torso) -> ActorCritic:
    """Two networks, for policy and value, with the usual initialization."""
    return ActorCritic(torso=torso, core=None, shared=False, policy_gain=0.01, value_gain=1.0)


_PLAIN_PPO: dict[str, Any] = {
    "objective": "clip",
    "clip_value": True,
    "normalize_advantage": True,
    "normalize_observation": False,
    "normalize_reward": False,
    "whole_episodes": False,
    "joint_grad_norm": True,
    "bootstrap_truncated": True,
    "value_learning_rate": None,
}


def _batchppo(gamma: float, value_learning_rate: float | None, policy_factor: float, initial_log_std: float) -> PPO:
    torso = MLP((200, 100), activation="relu")
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
        rollout_length=1000,
        epochs=25,
        minibatches=1,
        clip_value=False,
        normalize_advantage=True,
        normalize_observation=True,
        normalize_reward=True,
        whole_episodes=True,
        bootstrap_truncated=False,
        optimizer=Adam(b1=0.9, b2=0.999, eps=1e-8),
        network=ActorCritic(
            torso=torso,
            core=None,
            shared=False,
            continuous="gaussian",
            state_dependent_std=False,
            # Deviations: variance_scaling(f) has sqrt(f / inputs), an orthogonal kernel of gain g has g / sqrt(inputs).
            policy_gain=math.sqrt(policy_factor),
            value_gain=1.0,
            initial_log_std=initial_log_std,
        ),
    )


_BATCHPPO = (
    "{what} Like that code it clips actions to their bounds. Differences: no tanh on the mean action; orthogonal "
    "initialization, whose output gain of sqrt({factor}) gives the deviation of its variance_scaling({factor}); "
    "rewards are divided by the deviation of the discounted return, there by their own; the hinge of the KL penalty is "
    "of the batch's mean, there of each episode's; means leave out the padding after an episode's end, which there "
    "dilutes them."
)


def _impala(
    learning_rate: float, entropy_cost: float, rollout_length: int, optimizer: RMSProp, torso: Torso, core: Core | None
) -> IMPALA:
    return IMPALA(
        learning_rate=Linear(learning_rate, 0.0),
        value_learning_rate=None,
        gamma=0.99,
        trace_lambda=1.0,
        clip_rho=1.0,
        clip_c=1.0,
        clip_pg_rho=1.0,
        value_cost=0.5,
        entropy_cost=entropy_cost,
        max_grad_norm=40.0,
        rollout_length=rollout_length,
        reduction="sum",
        reward_clipping="abs_one",
        normalize_observation=False,
        normalize_reward=False,
        whole_episodes=False,
        bootstrap_truncated=False,
        optimizer=optimizer,
        network=ActorCritic(
            torso=torso, core=core, shared=True, previous_action=core is not None, previous_reward=True
        ),
    )


def _impala_paper(torso: Torso) -> IMPALA:
    optimizer = RMSProp(decay=0.99, eps=0.01, eps_in_root=True)
    return _impala(6e-4, 0.01, 20, optimizer, torso, LSTM(256))


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
            source="github.com/luchris429/purejaxrl, examples/brax_minatar.ipynb. Time limits as above.",
        ),
        Preset(
            name="gymnax-minatar",
            algorithm=PPO(
                learning_rate=5e-4,
                gamma=0.999,
                gae_lambda=0.95,
                clip=0.2,
                value_cost=0.5,
                entropy_cost=0.01,
                max_grad_norm=0.5,
                rollout_length=128,
                epochs=4,
                minibatches=8,
                optimizer=Adam(b1=0.9, b2=0.999, eps=1e-5),
                network=_separate(MLP((256, 256), activation="relu")),
                **_PLAIN_PPO,
            ),
            env="gymnax:Breakout-MinAtar",
            total_steps=10_000_000,
            topology={"num_envs": 64},
            source="github.com/RobertTLange/gymnax-blines, agents/Breakout-MinAtar/ppo.yaml. Its networks are separate "
            "too, and its warm-up of the learning rate does nothing. Initialization differs: here it is orthogonal. It "
            "treats time limits as terminations.",
        ),
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
            name="batchppo-head",
            # A deviation of 0.35 at the start.
            algorithm=_batchppo(gamma=0.995, value_learning_rate=None, policy_factor=0.1, initial_log_std=-1.05),
            env="brax:walker2d",
            total_steps=10_000_000,
            topology={"num_envs": 30},
            source=_BATCHPPO.format(
                what="github.com/google-research/batch-ppo at its last commit, 3d09705: agents/scripts/configs.py.",
                factor=0.1,
            ),
        ),
        Preset(
            name="rainbow",
            algorithm=DQN(
                learning_rate=6.25e-5,
                gamma=0.99,
                epsilon=Linear(1.0, 0.05, 0.02),  # over 100k steps: the noise of its layers dies before it has learned
                max_grad_norm=10.0,
                target_update=1.0,
                target_period=2000,  # updates, of 4 environment steps each
                double=True,
                n_step=3,
                value_rescaling=False,
                munchausen=False,
                ladder=False,
                prioritized=True,
                priority_exponent=0.5,
                importance_exponent=Linear(0.4, 1.0),
                v_min=-10.0,
                v_max=10.0,
                capacity=1_000_000,
                min_size=20_000,
                batch_size=32,
                rollout_length=4,
                replay_ratio=0.25,
                optimizer=Adam(b1=0.9, b2=0.999, eps=1.5e-4),
                network=QNetwork(
                    core=None,
                    head=CategoricalValues(atoms=51, dueling=True, widths=(512,), noisy=True, sigma=0.5),
                ),
            ),
            env="gymnax:Breakout-MinAtar",
            total_steps=5_000_000,
            topology={"num_envs": 8},
            source="Hessel et al. (2018), arXiv:1710.02298, table 1, with an update every 4 environment steps; here in "
            "8 environments at once, on MinAtar, with noise drawn for every transition and gradients clipped. Beside "
            "the noise epsilon explores, which the paper has not (--epsilon 0). MinAtar's own scores are of sticky "
            "actions: --env-params sticky_actions=0.1.",
        ),
        Preset(
            name="r2d2",
            algorithm=R2D2(
                learning_rate=1e-4,
                gamma=0.997,
                epsilon=0.4,
                ladder=True,
                ladder_exponent=7.0,
                max_grad_norm=80.0,
                target_update=1.0,
                target_period=2500,
                double=True,
                n_step=5,
                value_rescaling=True,
                munchausen=False,
                prioritized=True,
                priority_exponent=0.9,
                importance_exponent=0.6,
                priority_eta=0.9,
                sequence_length=81,
                burn_in=40,
                cross_episodes=False,
                time_reduction="sum",
                capacity=4_000_000,
                min_size=100_000,
                batch_size=64,
                rollout_length=40,
                replay_ratio=1 / 7680,
                optimizer=Adam(b1=0.9, b2=0.999, eps=1e-3),
                frame_stack=FrameStack(4, axis=0, fill="repeat"),
                network=QNetwork(
                    core=LSTM(512),
                    head=ActionValues(dueling=True, widths=(512,), noisy=False),
                    previous_action=True,
                    previous_reward=True,
                ),
            ),
            env="envpool:Pong-v5",
            total_steps=100_000_000,
            topology={"num_envs": 192},
            source="Kapturowski et al. (2019), openreview.net/forum?id=r1lyTjAqYX, at the scale of rlpyt's R2D1 "
            "(arXiv:1909.01500): 192 environments, an update of 64 sequences every 40 steps of each, 4M "
            "transitions. Here frames are 84 x 84 in stacks of 4, and new sequences get the largest priority.",
        ),
        Preset(
            name="torchbeast",
            algorithm=_impala(
                learning_rate=4.8e-4,
                entropy_cost=6e-4,
                rollout_length=80,
                optimizer=RMSProp(decay=0.99, eps=0.01, eps_in_root=False),
                torso=ImpalaResNet(),
                core=None,
            ),
            env="envpool:Pong-v5",
            total_steps=50_000_000,
            topology={"num_envs": 8},
            source="github.com/facebookresearch/torchbeast at 3f3029c, the defaults of polybeast_learner.py (monobeast "
            "has the same ones, with another network), in batches of 8 rollouts; the length is its paper's, "
            "arXiv:1910.03552. Its episodes end with a life: --env-params preset=classic. --network.core lstm:256 "
            "is its --use_lstm.",
        ),
        Preset(
            name="impala-paper",
            algorithm=_impala_paper(ImpalaResNet()),
            env="envpool:Pong-v5",
            total_steps=50_000_000,
            topology={"num_envs": 32},
            source=_IMPALA_PAPER.format(side="right (deep)"),
        ),
        Preset(
            name="impala-paper-shallow",
            algorithm=_impala_paper(ImpalaCNN()),
            env="envpool:Pong-v5",
            total_steps=50_000_000,
            topology={"num_envs": 32},
            source=_IMPALA_PAPER.format(side="left (shallow)"),
        ),
    )
}
