"""Runs a policy that `jaxrl export RUN --to numpy` wrote. It needs only numpy: copy it to the target machine.

    import policy  # this file, which the export wrote next to policy.npz

    act = policy.load("policy.npz")
    action, carry = act(observation)                # begins an episode
    action, carry = act(observation, carry)

The .npz file contains arrays and, as JSON, a list of operations on them. Nothing in the file is executed: each
operation is given by a name in the table OPERATIONS below.
"""

import json
import math
import string

import numpy as np

FORMAT = 1
BATCH = "b"  # represents the batch size in shapes


class Policy:
    """A policy as a function of numpy arrays.

    Attributes:
      description: the description stored in the .npz file: the algorithm, the environment, shapes and dtypes.
    """

    def __init__(self, description, constants):
        self.description = description
        self._constants = constants
        self._operations = [(OPERATIONS[name], *rest) for name, *rest in description["operations"]]
        self._inputs = description["inputs"]  # by name: [indices of values, shapes without the batch, dtypes]

    def __call__(self, observation, carry=None, first=None, reward=0.0, action_mask=None):
        """Return the action, and the carry to pass to the next call.

        Args:
          observation: one observation, or a batch with one leading axis; dictionaries and tuples as in the environment.
          carry: the carry that the previous call returned; None begins an episode.
          first: True where an episode begins; without a carry, all episodes begin.
          reward: the reward that came with the observation.
          action_mask: True where an action is allowed, for environments with masks; None allows all actions.

        Raises:
          ValueError: an argument has a different shape or dtype than in training.
        """
        parts = _leaves(observation)
        numbers, shapes, _ = self._inputs["observation"]
        if len(parts) != len(numbers):
            raise ValueError(f"the observation has {len(parts)} arrays, but the policy expects {len(numbers)}")
        leading = () if np.ndim(parts[0]) == len(shapes[0]) else np.shape(parts[0])[:1]
        begins = carry is None or (first if first is not None else False)
        if carry is None:
            carry = [
                np.zeros((*leading, *shape), dtype) for _, shape, dtype in zip(*self._inputs["carry"], strict=True)
            ]
        arguments = {"observation": parts, "carry": list(carry)}
        arguments |= {"first": [np.broadcast_to(begins, leading)], "reward": [np.broadcast_to(reward, leading)]}
        if "action_mask" in self._inputs:
            shapes = self._inputs["action_mask"][1]
            arguments["action_mask"] = _leaves(action_mask) or [np.ones((*leading, *shape), bool) for shape in shapes]
        size, values = math.prod(leading), list(self._constants)
        for name, parts in arguments.items():
            for number, shape, dtype, x in zip(*self._inputs[name], parts, strict=True):
                x = np.asarray(x)
                if x.shape != (*leading, *shape):
                    raise ValueError(f"{name} has shape {x.shape}, but the policy expects {tuple(shape)} or a batch")
                if not np.can_cast(x.dtype, dtype, "same_kind"):
                    raise ValueError(f"{name} has dtype {x.dtype}, but the policy expects {dtype}; convert it first")
                values[number] = x.astype(dtype, copy=False).reshape(size, *shape)
        with np.errstate(all="ignore"):  # values that are not selected may be infinite
            for function, inputs, outputs, parameters in self._operations:
                found = function(size, parameters, *(values[number] for number in inputs))
                for number, x in zip(outputs, found if isinstance(found, list) else [found], strict=True):
                    values[number] = x
        out = [np.asarray(values[number]) for number in self.description["outputs"]]
        out = out if leading else [x[0] for x in out]
        count = len(out) - len(self._inputs["carry"][0])
        return _unflatten(self.description["action"], out), tuple(out[count:])


def load(path):
    """Read a policy from an .npz file.

    Raises:
      ValueError: the file has an unsupported format version.
    """
    with np.load(path, allow_pickle=False) as file:
        description = json.loads(file["description"].tobytes())
        if description.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {description.get('format')!r}; use the .py file exported with it: "
                f"this one reads format {FORMAT}"
            )
        constants = [None] * description["values"]
        for number in description["constants"]:
            constants[number] = file[f"x{number}"]
    return Policy(description, constants)


def _leaves(tree):
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [np.asarray(tree)]


def _unflatten(form, leaves):
    if isinstance(form, dict):
        return {key: _unflatten(part, leaves) for key, part in form.items()}
    if isinstance(form, list):
        return tuple(_unflatten(part, leaves) for part in form)
    return leaves[form]


# --- operations: function(batch size, parameters, *arrays), as in jax.lax ---------------------------------------------


def _elementwise(function):
    return lambda size, parameters, *arrays: function(*arrays)


def _reduced(function):
    return lambda size, parameters, x: function(x, axis=tuple(parameters["axes"]))


def _shape(size, shape):
    return tuple(size if n == BATCH else n for n in shape)


def _dot_general(size, parameters, a, b):
    (left, right), (left_batch, right_batch) = parameters["dimension_numbers"]
    if left == [a.ndim - 1] and right == [0] and b.ndim == 2:  # a dense layer
        return a @ b
    if not left_batch:
        return np.tensordot(a, b, (left, right))
    letters = iter(string.ascii_letters)
    of_a, of_b = [next(letters) for _ in a.shape], [next(letters) for _ in b.shape]
    for i, j in zip([*left, *left_batch], [*right, *right_batch], strict=True):
        of_b[j] = of_a[i]
    batch = [of_a[i] for i in left_batch]
    out = batch + [x for i, x in enumerate(of_a) if i not in [*left, *left_batch]]
    out += [x for j, x in enumerate(of_b) if j not in [*right, *right_batch]]
    return np.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(out)}", a, b)


def _broadcast_in_dim(size, parameters, x):
    shape, own = _shape(size, parameters["shape"]), [1] * len(parameters["shape"])
    for dimension, n in zip(parameters["broadcast_dimensions"], x.shape, strict=True):
        own[dimension] = n
    return np.broadcast_to(x.reshape(own), shape)


def _iota(size, parameters):
    shape, dimension = _shape(size, parameters["shape"]), parameters["dimension"]
    own = [n if i == dimension else 1 for i, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension], dtype=parameters["dtype"]).reshape(own), shape)


def _gather(size, parameters, x, start):
    """Return the block of `x` that begins at `start` along some axes, without the collapsed axes."""
    begin, sizes = [0] * x.ndim, _shape(size, parameters["slice_sizes"])
    for axis, n in zip(parameters["axes"], start, strict=True):
        begin[axis] = min(max(int(n), 0), x.shape[axis] - sizes[axis])
    block = x[tuple(slice(n, n + length) for n, length in zip(begin, sizes, strict=True))]
    return np.squeeze(block, tuple(parameters["dropped"]))


def _slice(size, parameters, x):
    strides = parameters["strides"] or [1] * x.ndim
    start, limit = _shape(size, parameters["start_indices"]), _shape(size, parameters["limit_indices"])
    return x[tuple(slice(*bounds) for bounds in zip(start, limit, strides, strict=True))]


def _split(size, parameters, x):
    return np.split(x, np.cumsum(_shape(size, parameters["sizes"]))[:-1], axis=parameters["axis"])


def _cumsum(size, parameters, x):
    axis = parameters["axis"]
    ordered = np.flip(x, axis) if parameters.get("reverse") else x
    total = np.cumsum(ordered, axis, dtype=x.dtype)
    return np.flip(total, axis) if parameters.get("reverse") else total


def _rounded(size, parameters, x):
    return np.rint(x) if parameters["rounding_method"] else np.trunc(x + np.copysign(np.float32(0.5), x))


def _divided(size, parameters, a, b):
    return a / b if np.issubdtype(a.dtype, np.floating) else np.trunc(np.true_divide(a, b)).astype(a.dtype)


_erf = np.vectorize(math.erf, otypes=[np.float32])

OPERATIONS = {name: _elementwise(getattr(np, numpy_name)) for name, numpy_name in {
    "add": "add", "sub": "subtract", "mul": "multiply", "max": "maximum", "min": "minimum", "neg": "negative",
    "abs": "abs", "sign": "sign", "floor": "floor", "ceil": "ceil", "exp": "exp", "exp2": "exp2", "expm1": "expm1",
    "log": "log", "log1p": "log1p", "tanh": "tanh", "sin": "sin", "cos": "cos", "sqrt": "sqrt", "square": "square",
    "pow": "power", "is_finite": "isfinite", "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
    "gt": "greater", "ge": "greater_equal", "and": "bitwise_and", "or": "bitwise_or", "not": "invert", "copy": "array",
}.items()}  # fmt: skip
OPERATIONS |= {f"reduce_{name}": _reduced(getattr(np, name)) for name in ("sum", "max", "min", "prod")}
OPERATIONS |= {
    "reduce_and": _reduced(np.all),
    "reduce_or": _reduced(np.any),
    "div": _divided,
    "rsqrt": lambda size, parameters, x: 1 / np.sqrt(x),
    "logistic": lambda size, parameters, x: 1 / (1 + np.exp(-x)),
    "erf": lambda size, parameters, x: _erf(x),
    "round": _rounded,
    "integer_pow": lambda size, parameters, x: x ** x.dtype.type(parameters["y"]),
    "stop_gradient": lambda size, parameters, x: x,
    "optimization_barrier": lambda size, parameters, *arrays: list(arrays),
    "select_n": lambda size, parameters, which, *cases: np.choose(which, cases),
    "clamp": lambda size, parameters, low, x, high: np.minimum(np.maximum(x, low), high),
    "argmax": lambda size, parameters, x: np.argmax(x, parameters["axes"][0]).astype(parameters["index_dtype"]),
    "argmin": lambda size, parameters, x: np.argmin(x, parameters["axes"][0]).astype(parameters["index_dtype"]),
    "convert_element_type": lambda size, parameters, x: x.astype(parameters["new_dtype"]),
    "reshape": lambda size, parameters, x: x.reshape(_shape(size, parameters["new_sizes"])),
    "squeeze": lambda size, parameters, x: np.squeeze(x, tuple(parameters["dimensions"])),
    "expand_dims": lambda size, parameters, x: np.expand_dims(x, tuple(parameters["dimensions"])),
    "transpose": lambda size, parameters, x: np.transpose(x, parameters["permutation"]),
    "concatenate": lambda size, parameters, *arrays: np.concatenate(arrays, parameters["dimension"]),
    "stack": lambda size, parameters, *arrays: np.stack(arrays, parameters["axis"]),
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "gather": _gather,
    "slice": _slice,
    "split": _split,
}
