"""Of papers on learning from a replay: Rainbow, Beyond the Rainbow, R2D2 and CrossQ."""

from typing import Any

from jaxrl.algos.crossq import CrossQ
from jaxrl.algos.dqn import DQN
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.r2d2 import R2D2
from jaxrl.core.schedules import Exponential, Linear
from jaxrl.core.sources import FrameStack
from jaxrl.networks import (
    LSTM,
    MLP,
    ActionValues,
    Actor,
    CategoricalValues,
    Critic,
    ImpalaResNet,
    ImplicitQuantileValues,
    QNetwork,
)
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

_BTR: dict[str, Any] = plain.DQN | {
    "learning_rate": 1e-4,
    "gamma": 0.997,
    "max_grad_norm": 10.0,
    "target_period": 500,
    "n_step": 3,
    "munchausen": True,
    "munchausen_scale": 0.9,
    "munchausen_temperature": 0.03,
    "munchausen_clip": -1.0,
    "quantile_huber": 1.0,
    "prioritized": True,
    "priority_exponent": 0.2,
    "importance_exponent": 0.2,
    "batch_size": 256,
    "rollout_length": 1,
    "replay_ratio": 1 / 64,  # an update each time all environments have made a step
    "optimizer": Adam(b1=0.9, b2=0.999, eps=0.005 / 256),
}
_BTR_SOURCE = (
    "Clark et al. (2025), arXiv:2411.03820, and its authors' code: importance weights (N p)^-alpha with alpha of the "
    "priorities, and Munchausen's bonus for the first of three steps. Here that is by the target network, priorities "
    "are quantile losses, noise and fractions are drawn for every transition, the dense layers are not normalized, "
    "initialization is orthogonal, and evaluation takes fixed fractions in place of drawn ones."
)


def _btr(torso: ImpalaResNet, width: int, **fields: Any) -> DQN:
    head = ImplicitQuantileValues(quantiles=8, cosines=64, dueling=True, widths=(width,), noisy=True, sigma=0.5)
    settings = _BTR | fields
    return DQN(**settings, network=QNetwork(torso=torso, core=None, head=head))


PRESETS = (
    Preset(
        name="btr",
        algorithm=_btr(
            ImpalaResNet(channels=(32, 64, 64), width=None, normalization=None, spectral=True, pool=6),
            512,
            epsilon=Exponential(1.0, 0.01, 0.184),  # by the factor e in 2M steps
            capacity=1_048_576,
            min_size=200_000,
            frame_stack=FrameStack(4, axis=0, fill="repeat"),
        ),
        env="envpool:Breakout-v5",
        total_steps=50_000_000,
        topology={"num_envs": 64},
        source=_BTR_SOURCE + " Its epsilon is 0 in the second half.",
    ),
    Preset(
        name="btr-minatar",
        algorithm=_btr(
            ImpalaResNet(channels=(32,), width=None, normalization=None, spectral=True, pool=5),
            256,
            epsilon=Linear(1.0, 0.01, 0.1),
            capacity=100_000,
            min_size=5_000,
        ),
        env="gymnax:Breakout-MinAtar",
        total_steps=5_000_000,
        topology={"num_envs": 64},
        source=_BTR_SOURCE + " One section of the torso, as images of 10 x 10 are halved once.",
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
            random_persistence=0.0,
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
            random_persistence=0.0,
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
            initial_priorities="td_error",
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
        "transitions. Here frames are 84 x 84 in stacks of 4; new sequences get the priority of their TD errors, "
        "as there.",
    ),
    Preset(
        name="crossq",
        algorithm=CrossQ(
            learning_rate=1e-3,
            policy_learning_rate=None,
            gamma=0.99,
            n_step=1,
            capacity=1_000_000,
            min_size=5_000,
            batch_size=256,
            rollout_length=1,
            replay_ratio=1.0,
            policy_delay=3,
            temperature=1.0,
            learn_temperature=True,
            temperature_learning_rate=None,
            target_entropy=-1.0,
            noise_correlation=0.0,
            random_correlation=None,
            normalize_observation=False,
            storage="ring",
            sampler=None,
            max_times_sampled=0,
            optimizer=Adam(b1=0.5, b2=0.999, eps=1e-8),
            policy=Actor(
                torso=MLP(()),
                widths=(256, 256),
                activation="relu",
                normalization="batch_renorm",
                normalize_inputs=True,
                gain=0.01,
                initial_log_std=0.0,
            ),
            critic=Critic(
                torso=MLP(()),
                widths=(2048, 2048),
                activation="relu",
                normalization="batch_renorm",
                normalize_inputs=True,
                ensemble=2,
            ),
        ),
        env="envpool:HalfCheetah-v4",
        total_steps=1_000_000,
        topology={"num_envs": 1},
        source="Bhatt et al. (2024), arXiv:1902.05605v4, and github.com/adityab/CrossQ." + plain.ORTHOGONAL,
    ),
)
