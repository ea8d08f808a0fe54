"""What most sources share: extensions that are off, PPO's usual numbers, and networks with every field written."""

from typing import Any

from jaxrl.algos.ddpg import TD3
from jaxrl.algos.optimizers import Adam, RAdam
from jaxrl.algos.ppo import PPO
from jaxrl.algos.sac import SAC
from jaxrl.networks import MLP, Actor, ActorCritic, Critic, Torso

ORTHOGONAL = " Initialization differs: here it is orthogonal."
BATCHES = " It normalizes by statistics of every step; here they are of the batches before."
ADAM = Adam(b1=0.9, b2=0.999, eps=1e-8)
RADAM = RAdam(b1=0.9, b2=0.999, eps=1e-8)

_PPO: dict[str, Any] = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "value_cost": 0.5,
    "max_grad_norm": 0.5,
    "optimizer": Adam(b1=0.9, b2=0.999, eps=1e-5),
    "objective": "clip",
    "joint_grad_norm": True,
    "clip_value": True,
    "normalize_advantage": True,
    "observation_clip": 10.0,
    "reward_clip": 10.0,
    "whole_episodes": 0,
    "bootstrap_truncated": True,
    "value_learning_rate": None,
}
_RING: dict[str, Any] = {"storage": "ring", "sampler": None, "max_times_sampled": 0, "newest": 0}
DQN: dict[str, Any] = _RING | {
    "target_update": 1.0,
    "double": False,
    "n_step": 1,
    "prioritized": False,
    "initial_priorities": "max",
    "value_rescaling": False,
    "munchausen": False,
    "ladder": False,
    "random_persistence": 0.0,
    "huber": None,
    "frame_stack": None,
}
# Of SAC and TD3: an update of 256 transitions, and nothing else.
OFF_POLICY: dict[str, Any] = _RING | {
    "gamma": 0.99,
    "tau": 0.005,
    "n_step": 1,
    "capacity": 1_000_000,
    "batch_size": 256,
    "rollout_length": 1,
    "noise_correlation": 0.0,
    "noise_hold": 1,
    "random_correlation": None,
    "normalize_observation": False,
    "policy_learning_rate": None,
    "reset_at": (),
    "optimizer": ADAM,
}


def separate(torso: Torso) -> ActorCritic:
    """Two networks, for policy and value, with the usual initialization."""
    return ActorCritic(
        torso=torso,
        core=None,
        shared=False,
        continuous="gaussian",
        state_dependent_std=False,
        initial_log_std=0.0,
        policy_gain=0.01,
        value_gain=1.0,
    )


def ppo(network: ActorCritic, *, normalized: bool = False, **fields: Any) -> PPO:
    """PPO with CleanRL's numbers; its observations and rewards normalized or not."""
    settings = _PPO.copy()
    settings.update(normalize_observation=normalized, normalize_reward=normalized)
    settings.update(fields)
    return PPO(network=network, **settings)


def sac(widths: tuple[int, ...], *, initial_log_std: float = 0.0, **fields: Any) -> SAC:
    """SAC that learns its temperature, with dense networks of these widths."""
    settings: dict[str, Any] = OFF_POLICY | {
        "replay_ratio": 1.0,
        "temperature": 1.0,
        "learn_temperature": True,
        "target_entropy": -1.0,
    }
    settings.update(fields)
    return SAC(policy=_actor(widths, True, initial_log_std), critic=_twin_critic(widths), **settings)


def td3(widths: tuple[int, ...], **fields: Any) -> TD3:
    """TD3 with its paper's noise and delay, and dense networks of these widths."""
    settings: dict[str, Any] = OFF_POLICY | {"replay_ratio": 1.0, "exploration_noise": 0.1, "target_noise": 0.2}
    settings.update(target_noise_clip=0.5, policy_delay=2)
    settings.update(fields)
    return TD3(policy=_actor(widths, False, 0.0), critic=_twin_critic(widths), **settings)


def _actor(widths: tuple[int, ...], stochastic: bool, initial_log_std: float) -> Actor:
    return Actor(
        torso=MLP(()),
        widths=widths,
        activation="relu",
        normalization=None,
        stochastic=stochastic,
        gain=0.01,
        initial_log_std=initial_log_std,
    )


def _twin_critic(widths: tuple[int, ...]) -> Critic:
    return Critic(torso=MLP(()), widths=widths, activation="relu", normalization=None, ensemble=2)
