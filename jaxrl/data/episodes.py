"""Episodes as numpy arrays in the step order of RLDS, and checks of the rules of RLDS.

An episode of T transitions has T + 1 steps. Step i holds an observation, the action taken at it, and the reward and
discount that followed. The last step holds the last observation; its action, reward and discount are unused and
zero (https://github.com/google-research/rlds#dataset-format). jaxrl's rows follow the same convention.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.core.errors import DatasetError, JaxrlError
from jaxrl.core.limits import odd_discounts
from jaxrl.core.trees import named_leaves
from jaxrl.core.types import PyTree

TERMINATED, TRUNCATED, CUT_OFF = "terminated", "truncated", "cut off"


@dataclasses.dataclass(frozen=True)
class Episode:
    """A complete or partly recorded episode of T transitions; all arrays have shape `[T + 1, ...]`.

    Attributes:
      observation, action: arrays, or nested dictionaries of arrays; tuples become dictionaries with the keys "0", "1",
        ...
      reward, discount: the reward and discount that followed the action, one number per step; the discount is 0 if
        the episode terminated after the action, otherwise 1 or the environment's discount in (0, 1).
      is_first: true only at the first step.
      is_last: true only at the last step.
      is_terminal: true at the last step if the episode terminated there; never if it was truncated or cut off.
      metadata: values that describe the whole episode. `ending` is "terminated", "truncated", or "cut off" if the
        continuation of the episode is unknown.
      extras: other fields of the dataset's steps.
    """

    observation: PyTree
    action: PyTree
    reward: np.ndarray
    discount: np.ndarray
    is_first: np.ndarray
    is_last: np.ndarray
    is_terminal: np.ndarray
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of transitions, one less than the number of steps."""
        return len(self.is_last) - 1

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the rewards, computed in float64."""
        return float(np.sum(self.reward[:-1], dtype=np.float64))

    @property
    def summary(self) -> dict[str, Any]:
        """The episode's metadata, with `return` and `length` computed from the steps."""
        return {**self.metadata, "return": self.episode_return, "length": self.length}

    @property
    def steps(self) -> dict[str, PyTree]:
        """The per-step arrays, keyed by RLDS field name."""
        named = {name: getattr(self, name) for name in STEP_FIELDS}
        return named | dict(self.extras)


STEP_FIELDS = ("observation", "action", "reward", "discount", "is_first", "is_last", "is_terminal")
MARKS = ("is_first", "is_last", "is_terminal")


def marks_of(terminations: np.ndarray, truncations: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays `is_first`, `is_last` and `is_terminal`, and the ending, from the flags of T transitions."""
    is_first, is_last, is_terminal = marks = np.zeros((3, len(terminations) + 1), np.bool_)
    is_first[0] = is_last[-1] = True
    is_terminal[1:] = terminations
    ending = TERMINATED if terminations.any() else TRUNCATED if truncations.any() else CUT_OFF
    return dict(zip(MARKS, marks, strict=True)), ending


def implied_discount(is_terminal: np.ndarray) -> np.ndarray:
    """Return the discounts implied by `is_terminal`: 1, but 0 before a terminal step and at the last step (unused)."""
    discount = np.ones(len(is_terminal), np.float32)
    discount[:-1] -= is_terminal[1:]
    discount[-1] = 0
    return discount


def zero_where(condition: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return `x` [*n, ...] with zeros where `condition` [*n] is true."""
    if not condition.any():
        return x
    return np.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), np.zeros((), x.dtype), x)


def cast(x: np.ndarray, dtype: Any, name: str, counts: np.ndarray) -> np.ndarray:
    """Cast `x` to `dtype`, allowing no change of values except the rounding of floating-point numbers.

    Args:
      x: an array of numbers `[steps, ...]`.
      dtype: a NumPy dtype.
      name: the name of `x` for the error message.
      counts: bool `[steps]`, True at steps whose values are used; unused values may change.

    Raises:
      DatasetError: `x` does not hold real numbers, or `dtype` cannot represent a used value.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype.kind in "OSUMmc":
        raise DatasetError(f"{name} has dtype {x.dtype}; it must have real numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        found = x.astype(dtype)
        lost = found != x if dtype.kind in "biu" else ~np.isfinite(found) & np.isfinite(x)
    refuse(name, x, lost, counts, f"it does not fit into {dtype}")
    return found


def refuse(name: str, x: np.ndarray, wrong: np.ndarray, counts: np.ndarray, why: str) -> None:
    """Raise a DatasetError if `wrong` is true at a step whose values are used.

    Args:
      name: the name of `x` for the error message.
      x: an array of values `[steps, ...]`.
      wrong: bool, of the shape of `x`, True for wrong values.
      counts: bool `[steps]`, True at steps whose values are used.
      why: the end of the error message.
    """
    steps = wrong.reshape(len(counts), -1).any(axis=1) & counts
    if steps.any():
        step = int(np.argmax(steps))
        raise DatasetError(f"{name} is {np.array2string(x[step], threshold=8)} at step {step}; {why}")


def broken_rules(episode: Episode) -> list[tuple[str, str]]:
    """Return the RLDS rules that an episode breaks, as pairs (field, description of the problem)."""
    if found := broken_steps(episode):
        return found
    for name, is_ in (("return", episode.episode_return), ("length", episode.length)):
        said = episode.metadata.get(name)
        if said is not None and not np.isclose(float(said), is_, rtol=1e-5, atol=1e-5, equal_nan=True):
            found.append((name, f"is {said} in the metadata, but {is_} in the steps"))
    return found


def broken_steps(episode: Episode) -> list[tuple[str, str]]:
    """Return the RLDS rules that an episode's arrays break, like `broken_rules` but without checking metadata."""
    leaves = named_leaves(episode.steps)
    for name, x in leaves.items():
        if not np.ndim(x) or not hasattr(x, "dtype"):
            return [(name, f"is {x!r:.80}; it must be an array with one entry per step")]
    steps = len(episode.is_last)
    if steps == 0:
        return [("steps", "the episode is empty; it needs at least one step")]
    found = [(name, f"has {len(x)} steps, but is_last has {steps}") for name, x in leaves.items() if len(x) != steps]
    if found:
        return found
    for name in ("reward", "discount", *MARKS):
        x = getattr(episode, name)
        if x.ndim != 1:
            found.append((name, f"has shape {x.shape[1:]} at each step; it must be one number"))
        elif name in MARKS and x.dtype != np.bool_:
            found.append((name, f"has dtype {x.dtype}; it must be bool"))
    if found:
        return found
    for name, where, word in (("is_first", 0, "first"), ("is_last", steps - 1, "last")):
        marked = np.flatnonzero(getattr(episode, name)).tolist()
        if marked != [where]:
            marks = "no step" if not marked else f"step {', '.join(map(str, marked[:5]))}"
            found.append((name, f"is true at {marks}; it must be true only at the {word} of {steps} steps, {where}"))
    if np.any(episode.is_terminal[:-1]):
        at = int(np.argmax(episode.is_terminal[:-1]))
        found.append(("is_terminal", f"is true at step {at} of {steps}; only the last step can be terminal"))
    return found


def discount_problems(episode: Episode) -> list[tuple[str, str]]:
    """Return the fields with invalid discounts, as pairs (field, description of the problem).

    Each discount must be in [-1, 1] and not 0. The discount before a terminal step may also be 0, as RLDS requires;
    datasets that rely on `is_terminal` store other values up to 1 at this step. A 0 at any other step would end an
    episode that continues.
    """
    found = episode.discount[:-1]
    if found.dtype.kind in "OSUMmc":
        return [("discount", f"has dtype {found.dtype}; it must have real numbers")]
    with np.errstate(over="ignore"):
        odd = odd_discounts(found.astype(np.float32))
    if episode.is_terminal[-1]:
        odd[-1:] &= found[-1:] != 0
    if not odd.any():
        return []
    step = int(np.argmax(odd))
    what = (
        f"is {episode.discount[step]:g} at step {step} of {len(odd) + 1}; it must be from -1 to 1 and not 0, or 0 "
        "before a terminal step: change it with dataset.map, or cut the episode there with jaxrl.data.views.truncate"
    )
    return [("discount", what)]


def non_finite(episode: Episode) -> list[tuple[str, str]]:
    """Return the fields with NaN or infinities, as pairs (field, message with the step); unused values are ignored."""
    found = []
    for name, x in named_leaves(meaningful(episode)).items():
        if x.dtype.kind not in "iubUSO" and not np.isfinite(x).all():
            bad = np.isfinite(x).reshape(len(x), -1).all(axis=1)
            found.append((name, f"is not finite at step {int(np.argmin(bad))}"))
    return found


def meaningful(episode: Episode) -> dict[str, PyTree]:
    """Return the per-step arrays, without the last step's unused action, reward and discount."""
    shorter = ("action", "reward", "discount")
    return {
        name: jax.tree.map(lambda x, name=name: x[:-1] if name in shorter else x, value)
        for name, value in episode.steps.items()
    }


Kind = dict[str, tuple[Any, ...]]  # maps the name of an array to its dtype and shape


def kind_of(tree: PyTree, *, axes: int = 0) -> Kind:
    """Return the dtype and shape of each array, keyed by name, leaving out the first `axes` axes, which may differ."""
    return {name: (x.dtype, x.shape[axes:]) for name, x in named_leaves(tree).items()}


def differences(found: Kind, expected: Kind) -> list[str]:
    """Return one line per array that differs, such as "reward is float64 (), but must be float32 ()"."""
    lines, missing = [], ("missing",)
    for name in expected | found:
        here, there = found.get(name, missing), expected.get(name, missing)
        if here != there:
            lines.append(f"{name} is {' '.join(map(str, here))}, but must be {' '.join(map(str, there))}")
    return lines


def check_kind(found: Kind, kind: Kind | None, error: type[JaxrlError] = DatasetError) -> Kind:
    """Check that `found` equals `kind`, unless `kind` is None; return `found`.

    Raises:
      JaxrlError: they differ. The error is an instance of `error` and names the array.
    """
    if kind is not None and (lines := differences(found, kind)):
        raise error(f"{lines[0]} as in earlier episodes; all episodes must have the same arrays and metadata")
    return found
