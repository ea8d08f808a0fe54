"""Parts of oracles of whole updates: gradients by differences, and Adam's first step."""

import jax
import numpy as np
from scipy.special import log_softmax

EPS = 1.0  # of Adam: steps are smooth in the gradient, where a small one would show its sign alone


def exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def affine(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def layer_normed(layer, x):
    """Normalize with the epsilon of flax."""
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * layer["scale"] + layer["bias"]


def rescaled(x):
    """Return h(x) (Pohlen et al., 2018)."""
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def unscaled(x):
    """Return the number whose h is x."""
    return np.sign(x) * (((np.sqrt(1 + 4e-3 * (np.abs(x) + 1 + 1e-3)) - 1) / 2e-3) ** 2 - 1)


def divergence(old, new):
    """Return KL(old || new) of policies: logits, or means and logarithms of deviations."""
    if isinstance(old, tuple):
        (mean, log_std), (new_mean, new_log_std) = old, new
        far = (np.exp(2 * log_std) + (mean - new_mean) ** 2) / (2 * np.exp(2 * new_log_std))
        return (new_log_std - log_std + far - 0.5).sum(-1)
    log_old, log_new = log_softmax(old, axis=-1), log_softmax(new, axis=-1)
    return (np.exp(log_old) * (log_old - log_new)).sum(-1)


def gradient(loss, params, size=1e-6):
    """Return the gradient by central differences."""
    leaves, structure = jax.tree.flatten(exact(params))
    found = []
    for number, leaf in enumerate(leaves):
        slope = np.zeros_like(leaf)
        for place in np.ndindex(leaf.shape):
            ends = []
            for sign in (1, -1):
                moved = leaf.copy()
                moved[place] += sign * size
                ends.append(loss(jax.tree.unflatten(structure, [*leaves[:number], moved, *leaves[number + 1 :]])))
            slope[place] = (ends[0] - ends[1]) / (2 * size)
        found.append(slope)
    return jax.tree.unflatten(structure, found)


def stepped(params, gradients, rate, decay=0.0):
    """Take Adam's first step, whose moments are the gradient and its square, with the decay of AdamW."""

    def step(x, g):
        x = np.asarray(x, np.float64)
        return x - rate * (g / (np.abs(g) + EPS) + decay * x)

    return jax.tree.map(step, params, gradients)


def descended(loss, params, rate, decay=0.0):
    return stepped(params, gradient(loss, params), rate, decay)


def close(found, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
