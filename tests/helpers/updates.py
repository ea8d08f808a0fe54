"""Whole updates over a replay in float64 numpy: the batch, the equations that algorithms share, and a step of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from helpers.continuous import BATCH, BOX, transitions
from helpers.oracle import EPS, affine, close, descended, exact, layer_normed
from jaxrl.algos import q_learning
from jaxrl.algos.optimizers import Adam
from jaxrl.parallel.replicas import SingleReplica

KEY = jax.random.key(7)
ONE = SingleReplica(shards=2)  # whose random numbers are those of two devices
GAMMA, TAU, RATE, POLICY_RATE = 0.9, 0.25, 0.1, 0.05
COMMON = {"gamma": GAMMA, "n_step": 3, "learning_rate": RATE, "optimizer": Adam(eps=EPS)}
ACTOR_CRITIC = COMMON | {"tau": TAU, "policy_learning_rate": POLICY_RATE}
LOW, HIGH = BOX.low.astype(np.float64), BOX.high.astype(np.float64)
COUNTED = np.arange(BATCH) < BATCH - 1


@functools.cache
def batch(discrete=False):
    """Return transitions that by turns terminated after two steps, were truncated after one or cut, or did not end."""
    steps = np.tile([2, 1, 2, 3], BATCH // 4)
    rewards = np.random.default_rng(5).normal(size=(BATCH, 3)) * (np.arange(3)[None] < steps[:, None])
    rewards[-1] = 1e6  # it does not count
    base = transitions(3)
    importance = jnp.asarray(np.random.default_rng(6).uniform(0.2, 1.0, BATCH), jnp.float32)
    action = base.action.at[0].set(jnp.asarray(BOX.low)).at[1, 1].set(10.0)  # at bounds
    return base.replace(
        rewards=jnp.asarray(rewards, jnp.float32),
        steps=jnp.asarray(steps, jnp.int32),
        bootstrap=jnp.arange(BATCH) % 4 != 0,
        action=jnp.arange(BATCH, dtype=jnp.int32) % 3 if discrete else action,
        sample_info=base.sample_info.replace(importance=importance),
    )


def moved(slow, new, tau=TAU):
    return jax.tree.map(lambda a, b: (1 - tau) * np.asarray(a, np.float64) + tau * b, slow, new)


def mean(x):
    """Return the mean over the transitions that count."""
    return np.mean(np.asarray(x)[..., COUNTED], axis=-1)


def assert_learned(found, metric, loss, params, rate=RATE):
    """Assert that a metric is a loss of `params`, and `found` Adam's step down it. Return that step in float64."""
    assert float(metric) == pytest.approx(loss(exact(params)), rel=1e-5, abs=1e-6)
    wanted = descended(loss, params, rate)
    close(found, wanted)
    return wanted


def hidden(params, x):
    return np.maximum(affine(params["hidden"]["layer_0"], x), 0.0)


def unit(action):
    return 2.0 * (action - LOW) / (HIGH - LOW) - 1.0


def boxed(u):
    return np.clip(LOW + (HIGH - LOW) * (u + 1.0) / 2.0, LOW, HIGH)


def members(params):
    """Return the parameters of each member of an ensemble."""
    count = jax.tree.leaves(params)[0].shape[0]
    return [jax.tree.map(lambda leaf, n=n: leaf[n], params) for n in range(count)]


def critics(params, observation, action=None, kept=None):
    """Return the outputs [ensemble, batch, actions].

    With masks `kept` [ensemble, batch, width] a hidden layer drops a fifth of its outputs, then normalizes.
    """
    x = observation if action is None else np.concatenate([observation, unit(action)], axis=-1)
    found = []
    for number, member in enumerate(members(params)):
        features = affine(member["hidden"]["layer_0"], x)
        if kept is not None:
            features = layer_normed(member["hidden"]["norm_0"], np.where(kept[number], features / 0.8, 0.0))
        found.append(affine(member["head"]["advantage"]["output"], np.maximum(features, 0.0)))
    return np.stack(found)


def gaussian(params, observation):
    """Return the mean and deviation before the tanh."""
    features, head = hidden(params, observation), params["distribution"]
    return affine(head["output"], features), np.exp(affine(head["log_std_output"], features))


def squashed(mean, std, noise):
    """Return an action, and its log-density where the box is [-1, 1]."""
    x = mean + std * noise
    return boxed(np.tanh(x)), np.sum(norm.logpdf(x, mean, std) - np.log(1 - np.tanh(x) ** 2), axis=-1)


def drawn(params, observation, noise):
    return squashed(*gaussian(params, observation), noise)


def rewards_and_reach(b, scale=1.0):
    """Return the discounted rewards of the steps, and the discount of what follows: 0 where the task terminated."""
    total = np.sum(scale * np.asarray(b.rewards, np.float64) * GAMMA ** np.arange(3), axis=1)
    return total, np.where(b.bootstrap, GAMMA ** np.asarray(b.steps, np.float64), 0.0)


def noise(key):
    """Return normal numbers [BATCH, 2] of each transition's key."""
    keys = q_learning.transition_keys(key, BATCH, ONE)
    return np.stack([np.asarray(jax.random.normal(k, (2,)), np.float64) for k in keys])


def projected(atoms, probabilities, support):
    """Share each atom's mass between the two of the support around it (Bellemare et al., 2017, algorithm 1)."""
    spacing, wanted = support[1] - support[0], np.zeros((len(atoms), len(support)))
    for row in range(len(atoms)):
        for atom, mass in zip(atoms[row], probabilities[row], strict=True):
            place = (np.clip(atom, support[0], support[-1]) - support[0]) / spacing
            lower = min(int(place), len(support) - 2)
            wanted[row, lower] += mass * (lower + 1 - place)
            wanted[row, lower + 1] += mass * (place - lower)
    return wanted
