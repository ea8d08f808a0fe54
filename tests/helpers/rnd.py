"""Random network distillation in float64 numpy, which shares no line with `jaxrl.algos.rnd`."""

from typing import NamedTuple

import numpy as np

from helpers.oracle import affine, exact

EPS = 1e-5  # of Adam
FEW = 1e-8  # added to variances


def embedding(params, x):
    """Apply a torso of one layer of tanh, layers of ReLU, and an affine output."""
    x = np.tanh(affine(params["body"]["torso"]["dense"]["layer_0"], x))
    hidden = params.get("hidden", {})
    for name in sorted(hidden):
        x = np.maximum(affine(hidden[name], x), 0.0)
    return affine(params["output"], x)


class Seen(NamedTuple):
    """A rollout by the parameters before it: normalized observations [T + 1, B, n], the rest [T, B, ...]."""

    normal: np.ndarray
    target: np.ndarray
    value: np.ndarray
    advantages: np.ndarray
    reward: np.ndarray


class Past:
    """All that was seen so far, as lists, from which every statistic is computed again."""

    def __init__(self, bonus, state):
        self.bonus = bonus
        self.target = exact(state.target.params)
        self.observations, self.sums = [], []
        self.mean = self.deviation = 0.0

    def see(self, params, observation):
        """Add a rollout's observations [T + 1, B, n]; return what it is to the bonus."""
        bonus, (length, envs) = self.bonus, (len(observation) - 1, observation.shape[1])
        self.observations += list(observation[1:].reshape(length * envs, -1))
        seen = np.stack(self.observations)
        normal = (observation - seen.mean(0)) / np.sqrt(seen.var(0) + FEW)
        normal = np.clip(normal, -bonus.observation_clip, bonus.observation_clip)
        target = embedding(self.target, normal[1:])
        errors = ((embedding(params["predictor"], normal[1:]) - target) ** 2).mean(-1)
        gamma = bonus.gamma
        ends = []
        for b in range(envs):
            total = self.mean
            for t in range(length):
                total = gamma * total + errors[t, b]
                spread = gamma ** (t + 1) * self.deviation
                self.sums += [total + spread, total - spread]
            ends += [total + spread, total - spread]
        self.mean, self.deviation = np.mean(ends), np.std(ends)
        reward = errors / np.sqrt(np.var(self.sums) + FEW)
        value = embedding(params["value"], normal)[..., 0]
        advantages = np.zeros((length, envs))
        for t in range(length):
            for s in range(t, length):  # whatever ended in between
                delta = reward[s] + gamma * value[s + 1] - value[s]
                advantages[t] += (gamma * bonus.gae_lambda) ** (s - t) * delta
        return Seen(normal, target, value[:-1], advantages, reward)

    def losses(self, params, seen, chosen):
        """Return the losses of the predictor, by rows that are chosen, and of the value."""
        errors = ((embedding(params["predictor"], seen.normal[1:]) - seen.target) ** 2).mean(-1)
        now = embedding(params["value"], seen.normal[:-1])[..., 0]
        return errors[chosen].mean(), 0.5 * ((now - seen.value - seen.advantages) ** 2).mean()

    def loss(self, params, seen, chosen):
        return sum(self.losses(params, seen, chosen))
