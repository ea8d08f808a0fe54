"""Extensions off, and networks with every field written: what most sources share. PPO clips values, as CleanRL's."""

from typing import Any

from jaxrl.algos.optimizers import RAdam
from jaxrl.networks import MLP, Actor, ActorCritic, Critic, Torso

PPO: dict[str, Any] = {
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
NORMALIZED_PPO: dict[str, Any] = PPO | {"normalize_observation": True, "normalize_reward": True}
NO_BOOTSTRAP: dict[str, Any] = {"bootstrap_truncated": False}
DQN: dict[str, Any] = {
    "target_update": 1.0,
    "double": False,
    "n_step": 1,
    "prioritized": False,
    "value_rescaling": False,
    "munchausen": False,
    "ladder": False,
    "huber": None,
    "frame_stack": None,
    "storage": "ring",
}
OFF_POLICY: dict[str, Any] = {"normalize_observation": False, "n_step": 1, "storage": "ring"}


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


def actor(widths: tuple[int, ...], *, stochastic: bool, initial_log_std: float = 0.0) -> Actor:
    """Two ReLU layers and so on, of vectors."""
    return Actor(
        torso=MLP(()),
        widths=widths,
        activation="relu",
        normalization=None,
        stochastic=stochastic,
        gain=0.01,
        initial_log_std=initial_log_std,
    )


def twin_critic(widths: tuple[int, ...]) -> Critic:
    """Two critics of such layers."""
    return Critic(torso=MLP(()), widths=widths, activation="relu", normalization=None, ensemble=2)


RADAM = RAdam(b1=0.9, b2=0.999, eps=1e-8)
