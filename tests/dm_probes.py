"""dm_env environments with known rows. Workers import this module by its name."""

import os

import dm_env
import numpy as np
from dm_env import specs


class Counting(dm_env.Environment):
    """Shows the seed, the step and the last action; the reward is the step; the last of `length` has `discount`.

    `within` is the discount before that, and `spec` what it says of both.

    `fault` strikes in the second step: "raise", "kill", "first" (another episode begins), "zero" (a discount of 0
    within the episode), "none" (no discount) or "reward" (none).
    """

    def __init__(self, seed, length=3, discount=0.0, fault=None, within=1.0, spec=None):
        self._seed, self._length, self._discount, self._fault = seed, length, discount, fault
        self._within, self._spec = within, spec
        self._rng = np.random.default_rng(seed)

    def observation_spec(self):
        return {
            "step": specs.Array((), np.float64),
            "last": {"action": specs.BoundedArray((2,), np.float64, [-1.0, -2.0], [1.0, 2.0])},
            "drawn": specs.Array((1,), np.float32),
            "early": specs.Array((), bool),
        }

    def action_spec(self):
        return specs.BoundedArray((2,), np.float64, [-1.0, -2.0], [1.0, 2.0])

    def discount_spec(self):
        return super().discount_spec() if self._spec is None else self._spec

    def reset(self):
        self._step = 0
        return dm_env.restart(self._shown(np.zeros(2)))

    def step(self, action):
        self.action_spec().validate(action)
        self._step += 1
        discount = self._within
        if self._step == 2 and self._fault is not None:
            if self._fault == "raise":
                raise ValueError("the simulator is out of cheese")
            if self._fault == "kill":
                os.kill(os.getpid(), 9)
            if self._fault == "first":
                return self.reset()
            discount = {"zero": 0.0, "none": None}.get(self._fault, discount)
        last = self._step == self._length
        return dm_env.TimeStep(
            dm_env.StepType.LAST if last else dm_env.StepType.MID,
            None if self._fault == "reward" else float(self._step),
            self._discount if last else discount,
            self._shown(action),
        )

    def get_info(self):
        return {"square": self._step**2}

    def _shown(self, action):
        drawn = self._rng.random(1, np.float32)
        return {"step": float(self._step), "last": {"action": action}, "drawn": drawn, "early": self._step < 2}


class Bandit(dm_env.Environment):
    """Two arms, an array as observation, one step; `spec` replaces what it says of `what` it has."""

    def __init__(self, what="", spec=None):
        self._specs = {
            "observation": specs.BoundedArray((1,), np.int64, 0, 9),
            "action": specs.BoundedArray((), np.int32, 1, 2),
            "reward": specs.Array((), float),
        } | {what: spec}

    def observation_spec(self):
        return self._specs["observation"]

    def action_spec(self):
        return self._specs["action"]

    def reward_spec(self):
        return self._specs["reward"]

    def reset(self):
        return dm_env.restart(np.array([3]))

    def step(self, action):
        self.action_spec().validate(action)
        return dm_env.termination(float(action), np.array([4]))


def bandit(seed, **options):
    return Bandit(**options)


def unseeded(length=3):
    return Counting(0, length)


def none(seed):
    return None
