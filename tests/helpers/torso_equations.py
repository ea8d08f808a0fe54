"""Torsos of residual and normalized layers as their papers write them, in numpy, by their own parameters.

Each takes the parameters, the running statistics, inputs [batch, n], and the rows that batch normalization goes by in
training; None: it goes by the running statistics.
"""

import numpy as np

from helpers.oracle import affine, layer_normed


def _batch_normed(name, params, stats, x, rows, epsilon):
    layer = params[name]
    center, spread = (stats[name]["mean"], stats[name]["var"]) if rows is None else (x[rows].mean(0), x[rows].var(0))
    unit = "unit_" if "unit_scale" in layer else ""
    return (x - center) / np.sqrt(spread + epsilon) * layer[f"{unit}scale"] + layer[f"{unit}bias"]


def _on_sphere(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _count(params, kind):
    return sum(name.startswith(kind) for name in params)


def inverted_residual(params, stats, x, rows):
    """One block of FlashSAC: normalized inputs, a wide residual branch, and a normalization at the end."""
    x = _batch_normed("norm_inputs", params, stats, x, rows, 1e-5) @ params["inputs"]["unit_kernel"]
    inner = x
    for part in ("0_0", "0_1"):
        inner = inner @ params[f"layer_{part}"]["unit_kernel"]
        inner = np.maximum(_batch_normed(f"norm_{part}", params, stats, inner, rows, 1e-5), 0.0)
    x = x + inner
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["norm_features"]["unit_scale"]


def unit_mlp(params, stats, x, rows):
    """Palenicek et al. (2025), section 4 and figure 2: batch normalization of the inputs and before each ReLU."""
    x = _batch_normed("norm_inputs", params, stats, x, rows, 1e-3)
    for i in range(_count(params, "layer_")):
        x = x @ params[f"layer_{i}"]["unit_kernel"]
        x = np.maximum(_batch_normed(f"norm_{i}", params, stats, x, rows, 1e-3), 0.0)
    return x


def simba(params, stats, x, rows):
    """Lee et al. (2024), equations 3 to 5: x + W2 ReLU(W1 norm(x)), and a normalization at the end."""
    x = affine(params["inputs"], x)
    for i in range(_count(params, "wide_")):
        wide = np.maximum(affine(params[f"wide_{i}"], layer_normed(params[f"norm_{i}"], x)), 0.0)
        x = x + affine(params[f"back_{i}"], wide)
    return layer_normed(params["norm_features"], x)


def simba_v2(params, stats, x, rows):
    """Lee et al. (2025), equations 6 to 10: to the sphere with a constant of 3, and towards each block's points."""
    x = _on_sphere(np.concatenate([x, np.full((len(x), 1), 3.0)], axis=-1))
    x = _on_sphere(x @ params["inputs"]["unit_kernel"] * params["scale_inputs"]["factor"])
    blocks = _count(params, "wide_")
    for i in range(blocks):
        wide = np.maximum(x @ params[f"wide_{i}"]["unit_kernel"] * params[f"scale_{i}"]["factor"], 0.0)
        # 1 / (blocks + 1) at first, of a parameter that is 1 / sqrt(width).
        step = params[f"step_{i}"]["factor"] * np.sqrt(x.shape[-1]) / (blocks + 1)
        x = _on_sphere(x + step * (_on_sphere(wide @ params[f"back_{i}"]["unit_kernel"]) - x))
    return x @ params["outputs"]["unit_kernel"] * params["scale_outputs"]["factor"]


def bronet(params, stats, x, rows):
    """Nauman et al. (2024), figure 2: a layer normalization after each dense layer, also at the end of one block."""

    def layer(i, x):
        return layer_normed(params[f"norm_{i}"], affine(params[f"layer_{i}"], x))

    x = np.maximum(layer(0, x), 0.0)
    return x + layer(2, np.maximum(layer(1, x), 0.0))
