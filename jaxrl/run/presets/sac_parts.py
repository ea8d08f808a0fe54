"""Variants of soft actor-critic, made of SAC's parts, with their authors' settings for MuJoCo."""

import math
from typing import Any

from jaxrl.algos.optimizers import AdamW
from jaxrl.algos.sac import SAC
from jaxrl.core.schedules import Cosine, Linear
from jaxrl.networks import (
    MLP,
    ActionValues,
    Actor,
    BroNet,
    CategoricalValues,
    Critic,
    InvertedResidual,
    QuantileValues,
    SimBa,
    SimBaV2,
    UnitMLP,
)
from jaxrl.networks.q_heads import QHead
from jaxrl.networks.torsos import Torso
from jaxrl.run.presets import plain
from jaxrl.run.presets.description import Preset

# What they share: one environment, an update of 256 transitions, two critics, and what is off.
_SAC: dict[str, Any] = plain.OFF_POLICY | {
    "min_size": 5_000,
    "temperature_learning_rate": None,
    "learn_temperature": True,
    "joint_batch": False,
    "joint_policy": False,
    "target_critics": None,
    "target_value": "min",
    "policy_delay": 1,
    "policy_value": "min",
    "normalize_reward": False,
}
_CLIPPED_LOG_STD = " The logarithm of its policy's deviation is clipped to -10 to 2; here to -20 to 2."
_DECAY = " Learning rates of policy and temperature decay there with their own steps, and so less far."
_TEMPERATURE = " The temperature's loss is in the logarithm of the temperature, where theirs is in the temperature."
_STATISTICS = " Statistics of returns are of what the replay draws, there of every step."
_TWO_CORES = " Narrow, for two CPU cores: {what}."


def _sac(**fields: Any) -> SAC:
    return SAC(**_SAC | fields)


def _dense(widths: tuple[int, ...]) -> Actor:
    return Actor(torso=MLP(()), widths=widths, activation="relu", normalization=None, gain=0.01, initial_log_std=0.0)


def _ensemble(head: QHead, widths: tuple[int, ...] = (256, 256), **fields: Any) -> Critic:
    return Critic(torso=MLP(()), widths=widths, activation="relu", head=head, **fields)


def _through(torso: Torso, gain: float | None, log_std_range: tuple[float, float] | None = (-10.0, 2.0)) -> Actor:
    return Actor(torso=torso, widths=(), gain=gain, initial_log_std=0.0, log_std_range=log_std_range)


def _trunk(trunk: Torso, head: QHead) -> Critic:
    return Critic(torso=MLP(()), trunk=trunk, widths=(), ensemble=2, head=head)


def _categorical(torso: Torso, trunk: Torso, **fields: Any) -> SAC:
    """Categorical critics between -5 and 5, rewards scaled to that, and weights of unit norm."""
    support = {"v_min": -5.0, "v_max": 5.0, "normalize_reward": True, "temperature": 0.01}
    head = CategoricalValues(atoms=101, dueling=False, widths=(), gain=None, noisy=False, smoothing=0.0)
    networks = {"policy": _through(torso, None), "critic": _trunk(trunk, head)}
    return _sac(**support | networks | fields)


def _flashsac(actor: int, critic: int, batch: int) -> SAC:
    return _categorical(
        InvertedResidual(width=actor, blocks=2, expansion=4),
        InvertedResidual(width=critic, blocks=2, expansion=4),
        learning_rate=Cosine(3e-4, 1.5e-4),
        tau=0.01,
        min_size=10_000,
        batch_size=batch,
        replay_ratio=1.0,
        target_entropy=0.5 * math.log(2 * math.pi * math.e * 0.15**2),  # of a deviation of 0.15
        joint_batch=True,
        joint_policy=True,
        policy_delay=2,
        largest_return=5.0,
        noise_hold=16,
    )


def _xqc(actor: int, critic: int) -> SAC:
    return _categorical(
        UnitMLP((actor,) * 4),
        UnitMLP((critic,) * 4),
        policy=_through(UnitMLP((actor,) * 4), None, log_std_range=None),
        learning_rate=Linear(3e-4, 3e-5),
        replay_ratio=2.0,
        target_entropy=-0.5,
        joint_batch=True,
        policy_delay=3,
        largest_return=None,
    )


def _redq(**fields: Any) -> SAC:
    settings: dict[str, Any] = {"learning_rate": 3e-4, "replay_ratio": 20.0, "policy_delay": 20, "temperature": 1.0}
    # An action of Hopper has three dimensions, whose entropies are to add up to -1.
    settings |= {"target_entropy": -1 / 3, "policy_value": "mean", "policy": _dense((256, 256))}
    return _sac(**settings | fields)


def _preset(name: str, algorithm: SAC, env: str, source: str) -> Preset:
    return Preset(name, algorithm, f"envpool:{env}", 1_000_000, {"num_envs": 1}, source)


_FLASHSAC = (
    "arXiv:2604.04539, and github.com/Holiday-Robot/FlashSAC at 87edc90, configs/agent/flashSAC.yaml with "
    "scripts/run_mujoco.sh. The policy learns after the critics, there before; random actions of the start are held "
    "as noise is." + _DECAY + _TEMPERATURE + _STATISTICS
)
_XQC = (
    "Palenicek et al. (2025), arXiv:2509.25174, and github.com/danielpalenicek/xqc, conf/agent/base_agent.yaml with "
    "xqc.yaml." + _DECAY + _CLIPPED_LOG_STD + _TEMPERATURE + _STATISTICS
)

_BRO_RESETS = (12_500, 47_500, 247_500, 497_500, 747_500)  # environment steps after the first 2,500, which are random


def _bro(actor: int, critic: int, **fields: Any) -> SAC:
    return _sac(
        learning_rate=3e-4,
        min_size=2_500,
        batch_size=128,
        temperature=1.0,
        target_entropy=-0.5,
        target_value="mean",
        policy_value="mean",
        quantile_huber=1.0,
        optimizer=AdamW(b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4),
        policy=_through(BroNet(width=actor, blocks=1), 1.0),
        critic=_trunk(BroNet(width=critic, blocks=2), QuantileValues(100, dueling=False, widths=(), noisy=False)),
        **fields,
    )


_BRO = (
    "Nauman et al. (2024), arXiv:2405.16158, and github.com/naumix/BiggerRegularizedOptimistic at 5870a13. Without its "
    "second, optimistic policy: the learned one explores. The temperature has the networks' optimizer, there Adam with "
    "b1=0.5." + plain.ORTHOGONAL + _TEMPERATURE
)

PRESETS = (
    _preset("flashsac", _flashsac(128, 256, 512), "HalfCheetah-v4", _FLASHSAC),
    _preset(
        "flashsac-narrow",
        _flashsac(64, 128, 256),
        "HalfCheetah-v4",
        _FLASHSAC + _TWO_CORES.format(what="policy 64, critics 128 wide, batches of 256, half of the published"),
    ),
    _preset("xqc", _xqc(256, 512), "HalfCheetah-v4", _XQC),
    _preset(
        "xqc-narrow",
        _xqc(64, 128),
        "HalfCheetah-v4",
        _XQC + _TWO_CORES.format(what="layers a quarter as wide as the published"),
    ),
    _preset(
        "simbav2",
        _categorical(
            SimBaV2(width=128, blocks=1, expansion=4, shift=3.0),
            SimBaV2(width=512, blocks=2, expansion=4, shift=3.0),
            learning_rate=Linear(1e-4, 5e-5),
            replay_ratio=2.0,
            target_entropy=-0.5,
            normalize_observation=True,
            observation_clip=None,
            largest_return=5.0,
        ),
        "HalfCheetah-v4",
        "Lee et al. (2025), arXiv:2502.15280, and github.com/DAVIAN-Robotics/SimbaV2, configs/agent/simbaV2.yaml. Mean "
        "and deviation of the policy have their dense layer of 128 together, there one each."
        + _TEMPERATURE
        + _STATISTICS,
    ),
    _preset(
        "simba",
        _sac(
            learning_rate=1e-4,
            replay_ratio=2.0,
            temperature=0.01,
            target_entropy=-0.5,
            normalize_observation=True,
            observation_clip=None,
            optimizer=AdamW(b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2),
            policy=_through(SimBa(width=128, blocks=1, expansion=4), 1.0),
            critic=_trunk(SimBa(width=512, blocks=2, expansion=4), ActionValues(dueling=False, widths=(), noisy=False)),
        ),
        "HalfCheetah-v4",
        "Lee et al. (2024), arXiv:2410.09754, and github.com/DAVIAN-Robotics/SimbaV2, configs/agent/simba.yaml. The "
        "temperature decays with the weights too." + plain.ORTHOGONAL + _TEMPERATURE,
    ),
    _preset(
        "bro", _bro(256, 512, replay_ratio=10.0, reset_at=tuple(10 * x for x in _BRO_RESETS)), "HalfCheetah-v4", _BRO
    ),
    _preset(
        "bro-fast",
        _bro(256, 512, replay_ratio=2.0, reset_at=(2 * _BRO_RESETS[0],)),
        "HalfCheetah-v4",
        _BRO + " With two updates a step, and so one reset.",
    ),
    _preset(
        "tqc",
        _sac(
            learning_rate=3e-4,
            replay_ratio=1.0,
            min_size=256,
            temperature=1.0,
            target_entropy=-1.0,
            dropped_quantiles=2,
            quantile_huber=1.0,
            policy_value="mean",
            policy=_dense((256, 256)),
            critic=_ensemble(
                QuantileValues(quantiles=25, dueling=False, widths=(), noisy=False), (512, 512, 512), ensemble=5
            ),
        ),
        "Walker2d-v4",
        "Kuznetsov et al. (2020), arXiv:2005.04269, and github.com/SamsungLabs/tqc_pytorch. Its loss is a mean over "
        "quantiles and critics, here a sum: Adam's steps are the same. dropped_quantiles is 5 in Hopper and 0 in "
        "HalfCheetah there. Actions before the first update are random." + plain.ORTHOGONAL,
    ),
    _preset(
        "redq",
        _redq(
            target_critics=2,
            critic=_ensemble(ActionValues(dueling=False, widths=(), noisy=False), ensemble=10, normalization=None),
        ),
        "Hopper-v4",
        "Chen et al. (2021), arXiv:2101.05982, and github.com/watchernyu/REDQ; target_entropy is -0.5 in HalfCheetah, "
        "Walker2d and Ant." + plain.ORTHOGONAL,
    ),
    _preset(
        "droq",
        _redq(
            critic=_ensemble(
                ActionValues(dueling=False, widths=(), noisy=False), ensemble=2, normalization="layer", dropout=0.0001
            ),
        ),
        "Hopper-v4",
        "Hiraoka et al. (2022), arXiv:2110.02034, and the README of its authors' code on REDQ's, by TakuyaHiraoka on "
        "GitHub; dropout is 0.005 in Walker2d, 0.01 in Ant, 0.1 in Humanoid." + plain.ORTHOGONAL,
    ),
)
