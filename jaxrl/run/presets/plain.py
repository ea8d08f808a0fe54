"""The algorithms as their first papers have them: without what was added later, jaxrl's own additions included."""

from typing import Any

from jaxrl.networks import ActorCritic, Torso

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
    return ActorCritic(torso=torso, core=None, shared=False, policy_gain=0.01, value_gain=1.0)
