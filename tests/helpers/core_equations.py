"""The equations of the recurrent cores as their papers write them: one time step in numpy, in float64."""

import numpy as np
from scipy.special import expit

from helpers.oracle import affine, layer_normed
from jaxrl.networks import GRU, LRU, LSTM, GTrXL, MinGRU


def step(core, module, x, carry):
    """Return the next carry and the output of one time step, by the module's own parameters.

    Args:
      x: inputs `[B, inputs]`.
      carry: `[B, ...]`, as the core's own.
    """
    return {GRU: _gru, LSTM: _lstm, MinGRU: _mingru, LRU: _lru, GTrXL: _gtrxl}[type(core)](core, module, x, carry)


def known(core, carry):
    """Return the carry without what it holds of other episodes, which is masked when it is read."""
    if not isinstance(core, GTrXL):
        return carry
    here = np.arange(core.memory)[None] >= core.memory - np.asarray(carry["length"])[:, None]
    return {"length": carry["length"], "memory": np.where(here[:, None, :, None], carry["memory"], 0.0)}


def _of(parameter):
    return np.asarray(parameter[...], np.float64)


def _normal(norm, x):
    return layer_normed({"scale": _of(norm.scale), "bias": _of(norm.bias)}, x)


def _dense(layer, x):
    return affine({"kernel": _of(layer.kernel), "bias": _of(layer.bias)}, x)


def _gru(core, module, x, carry):
    u = _of(module.recurrent.kernel)
    wx, uh = np.split(_dense(module.input, x), 3, axis=-1), np.split(carry @ u, 3, axis=-1)
    reset, update = expit(wx[0] + uh[0]), expit(wx[1] + uh[1])
    candidate = np.tanh(wx[2] + reset * (uh[2] + _of(module.candidate_bias)))
    hidden = (1 - update) * candidate + update * carry
    return hidden, hidden


def _lstm(core, module, x, carry):
    wx = np.split(_dense(module.input, x), 4, axis=-1)
    uh = np.split(carry["hidden"] @ _of(module.recurrent.kernel), 4, axis=-1)
    write, output = expit(wx[0] + uh[0]), expit(wx[1] + uh[1])
    keep, candidate = expit(wx[2] + uh[2] + 1.0), np.tanh(wx[3] + uh[3])
    cell = keep * carry["cell"] + write * candidate
    hidden = output * np.tanh(cell)
    return {"cell": cell, "hidden": hidden}, hidden


def _mingru(core, module, x, carry):
    """Feng et al. (2024), section 3.1.3 and appendix B.3, with the highway of PufferLib."""
    x, carries = _dense(module.entry, x), []
    for i in range(core.layers):
        w = np.split(_of(getattr(module, f"layer_{i}").kernel), 3, axis=1)
        bias = 0.0 if core.update_bias is None else _of(getattr(module, f"update_bias_{i}"))
        z, highway, v = expit(x @ w[1] + bias), expit(x @ w[2]), x @ w[0]
        hidden = (1 - z) * carry[:, i] + z * np.where(v >= 0, v + 0.5, expit(v))
        x = highway * hidden + (1 - highway) * x
        carries.append(hidden)
    return np.stack(carries, axis=1), x


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # as jax.nn.gelu by default


def _lru(core, module, x, carry):
    """Orvieto et al. (2023), equations 1, 5 and 7 with complex matrices, in the residual block of figure 1."""
    x, carries, n = _dense(module.entry, x), [], core.width
    for i in range(core.layers):
        layer = getattr(module, f"layer_{i}")
        b, c = _of(layer.input.kernel), _of(layer.output.kernel)
        b, c = b[:, :n] + 1j * b[:, n:], c[:n] + 1j * c[n:]
        lam = np.exp(-np.exp(_of(layer.log_nu)) + 1j * np.exp(_of(layer.log_theta)))
        u = _normal(layer.norm, x)
        hidden = lam * (carry[:, i, 0] + 1j * carry[:, i, 1]) + np.exp(_of(layer.log_gamma)) * (u @ b)
        y = _gelu((hidden @ c).real + _of(layer.skip) * u)
        value, gate = np.split(_dense(layer.glu, y), 2, axis=-1)
        x = x + value * expit(gate)
        carries.append(np.stack([hidden.real, hidden.imag], axis=1))
    return np.stack(carries, axis=1), x


def _gtrxl(core, module, x, carry):
    """Parisotto et al. (2020), section 3, with the attention of Dai et al. (2019), section 3.3: one row at a time."""
    memory, length, size = carry["memory"].copy(), carry["length"], core.width // core.heads
    outputs = []
    for b in range(len(x)):
        h = _dense(module.entry, x[b])
        for i in range(core.layers):
            layer = getattr(module, f"layer_{i}")
            context = np.concatenate([memory[b, i], h[None]])
            h = _gtrxl_layer(core, layer, context, int(length[b]), size)
            memory[b, i] = context[1:]
        outputs.append(h)
    return {"length": np.minimum(length + 1, core.memory), "memory": memory}, np.stack(outputs)


def _gtrxl_layer(core, layer, context, length, size):
    attention, x = layer.attention, context[-1]
    normal = _normal(layer.attention_norm, context)
    query = normal[-1] @ _of(attention.query.kernel)
    keys, values = np.split(normal @ _of(attention.key_value.kernel), 2, axis=-1)
    rows = range(core.memory - length, core.memory + 1)  # the memory of this episode, and the step itself
    read = np.zeros(core.width)
    for head in range(core.heads):
        part = slice(head * size, (head + 1) * size)
        scores = []
        for j in rows:
            sinusoid = np.zeros(core.width)
            for k in range(core.width // 2):
                angle = (core.memory - j) / 10_000 ** (2 * k / core.width)
                sinusoid[k], sinusoid[core.width // 2 + k] = np.sin(angle), np.cos(angle)
            position = sinusoid @ _of(attention.position.kernel)
            content = (query + _of(attention.content_bias))[part] @ keys[j][part]
            scores.append((content + (query + _of(attention.position_bias))[part] @ position[part]) / np.sqrt(size))
        weights = np.exp(scores) / np.sum(np.exp(scores))
        read[part] = sum(weight * values[j][part] for weight, j in zip(weights, rows, strict=True))
    x = _gate(layer.attention_gate, x, np.maximum(read @ _of(attention.output.kernel), 0))
    output = _dense(layer.output, np.maximum(_dense(layer.hidden, _normal(layer.mlp_norm, x)), 0))
    return _gate(layer.mlp_gate, x, np.maximum(output, 0))


def _gate(gate, x, y):
    wr, wz, wg = np.split(_of(gate.of_update.kernel), 3, axis=1)
    ur, uz = np.split(_of(gate.of_input.kernel), 2, axis=1)
    r = expit(y @ wr + x @ ur)
    z = expit(y @ wz + x @ uz - _of(gate.bias))
    return (1 - z) * x + z * np.tanh(y @ wg + (r * x) @ _of(gate.of_reset.kernel))
