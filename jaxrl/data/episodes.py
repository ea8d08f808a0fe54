"""Episodes as numpy arrays, in the order of RLDS, cut out of streams of rows.

An episode of T transitions has T + 1 steps: step i holds the observation, the action taken there, and the reward and
discount that followed. The last step holds the last observation; its action, reward and discount mean nothing and are
zero (https://github.com/google-research/rlds#dataset-format). That is jaxrl's row convention as well.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.types import PyTree, Trajectory

TERMINATED, TRUNCATED, CUT_OFF = "terminated", "truncated", "cut off"


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode, or what was seen of it: leaves `[T + 1, ...]`.

    Attributes:
      observation, action: arrays, or nested dictionaries of them.
      reward, discount: followed the action; the discount is 0 where the episode then terminated, else 1.
      is_first, is_last: true at the first step, at the last.
      is_terminal: true at the last step if the episode terminated there; never where it was truncated or cut off.
      metadata: of the whole episode. `ending` is "terminated", "truncated", or "cut off": what came then is unknown.
      extras: what else a dataset's steps hold.
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
        """Transitions: one fewer than steps."""
        return len(self.is_last) - 1

    @property
    def episode_return(self) -> float:
        """The sum of the rewards, undiscounted, added up in float64."""
        return float(np.sum(self.reward[:-1], dtype=np.float64))

    @property
    def summary(self) -> dict[str, Any]:
        """Its metadata, and its true `return` and `length`."""
        return {**self.metadata, "return": self.episode_return, "length": self.length}

    @property
    def steps(self) -> dict[str, PyTree]:
        """By their RLDS names."""
        named = {name: getattr(self, name) for name in STEP_FIELDS}
        return named | dict(self.extras)


STEP_FIELDS = ("observation", "action", "reward", "discount", "is_first", "is_last", "is_terminal")


class EpisodeCutter:
    """Cuts streams of rows `[T, B, ...]` into episodes, wherever one call's rows end and the next one's begin.

    What is kept between calls are the unfinished episodes alone. An episode whose beginning was not seen is left out,
    and so is one without a transition. Where rows break off (an environment was built again, rows were lost), the
    last observation that was seen is the episode's last step, and it counts as cut off.

    Args:
      num_envs: B.
      max_steps: an episode with more transitions is cut off there; None: it is never.
    """

    def __init__(self, num_envs: int, max_steps: int | None = None):
        self._limit = None if max_steps is None else max_steps + 1  # in rows
        self._open: list[list[list[np.ndarray]] | None] = [None] * num_envs  # pieces of leaves [n, ...]
        self._metadata: list[dict[str, Any]] = [{}] * num_envs  # of those
        self._structure: Any = None

    def add(self, rows: Trajectory, versions: np.ndarray | None = None) -> Iterator[tuple[int, Episode]]:
        """The episodes that end within these rows: the environment's index in the batch, and the episode.

        Args:
          rows: that follow those of the last call.
          versions: of the policy that acted at each, `[T]`; the first row's becomes the episode's `policy_version`.
        """
        fields = (rows.observation, rows.action, rows.reward, rows.terminated, rows.truncated)
        leaves, self._structure = jax.tree.flatten(fields)
        leaves = [np.ascontiguousarray(np.swapaxes(np.asarray(x), 0, 1)) for x in leaves]  # [B, T, ...]
        first, weight = np.asarray(rows.first), np.asarray(rows.weight)
        for env in range(first.shape[1]):
            yield from self._add_one(env, [x[env] for x in leaves], first[:, env], weight[:, env], versions)

    def finish(self) -> Iterator[tuple[int, Episode]]:
        """The episodes that are unfinished, cut off."""
        for env, pieces in enumerate(self._open):
            self._open[env] = None
            yield from self._made(env, pieces)

    def _add_one(self, env, leaves, first, weight, versions):
        pieces, start = self._open[env], 0
        for row in np.flatnonzero(first | ~weight).tolist():
            if first[row]:
                if pieces is not None:  # the rows broke off
                    yield from self._made(env, [*pieces, _piece(leaves, start, row)])
                pieces, start = [], row
                self._metadata[env] = {} if versions is None else {"policy_version": int(versions[row])}
            if pieces is not None and not weight[row]:
                yield from self._made(env, [*pieces, _piece(leaves, start, row + 1)])
                pieces = None
        if pieces is not None:
            pieces.append([x.copy() for x in _piece(leaves, start, len(first))])
            if self._limit is not None and sum(len(piece[-1]) for piece in pieces) >= self._limit:
                yield from self._made(env, pieces)
                pieces = None
        self._open[env] = pieces

    def _made(self, env, pieces):
        if not pieces:
            return
        leaves = [np.concatenate(parts)[: self._limit] for parts in zip(*pieces, strict=True)]
        if len(leaves[-1]) >= 2:
            yield env, _episode(*jax.tree.unflatten(self._structure, leaves), self._metadata[env])


def _piece(leaves, start, stop):
    return [x[start:stop] for x in leaves]


def _episode(observation, action, reward, terminated, truncated, metadata):
    """An episode of these arrays, which become its own; the last row's action and reward are ignored."""
    steps = len(reward)
    ending = TERMINATED if terminated[-2] else TRUNCATED if truncated[-2] else CUT_OFF
    for leaf in jax.tree.leaves(action):
        leaf[-1] = 0
    reward[-1] = 0
    discount, is_first, is_last, is_terminal = np.ones(steps, np.float32), *np.zeros((3, steps), np.bool_)
    discount[-1] = 0
    is_first[0] = is_last[-1] = True
    if ending == TERMINATED:
        discount[-2], is_terminal[-1] = 0, True
    metadata = {"ending": ending} | metadata
    return Episode(observation, action, reward, discount, is_first, is_last, is_terminal, metadata)


def broken_rules(episode: Episode) -> list[tuple[str, str]]:
    """Where an episode is not as RLDS says: (field, what is wrong with it)."""
    steps, found = len(episode.is_last), []
    if steps == 0:
        return [("steps", "there are none; an episode has at least its last one")]
    lengths = {field_name("", path): len(x) for path, x in jax.tree.leaves_with_path(episode.steps) if len(x) != steps}
    if lengths:
        return [(name, f"has {length} steps where is_last has {steps}") for name, length in lengths.items()]
    for name, where, word in (("is_first", 0, "first"), ("is_last", steps - 1, "last")):
        marked = np.flatnonzero(getattr(episode, name)).tolist()
        if marked != [where]:
            shown = "no step" if not marked else f"step {', '.join(map(str, marked[:5]))}"
            found.append((name, f"is true at {shown}; it must be at the {word} of {steps} steps, {where}, alone"))
    if np.any(episode.is_terminal[:-1]):
        at = int(np.argmax(episode.is_terminal[:-1]))
        found.append(("is_terminal", f"is true at step {at} of {steps}; only the last step can be terminal"))
    if episode.is_terminal[-1] and steps > 1 and episode.discount[-2] != 0:
        found.append(
            ("discount", f"is {episode.discount[-2]} at step {steps - 2}; nothing follows it, so it must be 0")
        )
    for name, is_ in (("return", episode.episode_return), ("length", episode.length)):
        said = episode.metadata.get(name)
        if said is not None and not np.isclose(float(said), is_, rtol=1e-5, atol=1e-5, equal_nan=True):
            found.append((name, f"is said to be {said}, but the steps add up to {is_}"))
    return found


def non_finite(episode: Episode) -> list[tuple[str, str]]:
    """Where NaN or infinities are: (field, at which step); the last step's action and reward are not looked at."""
    found = []
    for path, x in jax.tree.leaves_with_path(meaningful(episode)):
        if x.dtype.kind not in "iubUSO" and not np.isfinite(x).all():
            bad = np.isfinite(x).reshape(len(x), -1).all(axis=1)
            found.append((field_name("", path), f"is not finite at step {int(np.argmin(bad))}"))
    return found


def meaningful(episode: Episode) -> dict[str, PyTree]:
    """The steps, without the last one where it means nothing."""
    shorter = ("action", "reward", "discount")
    return {
        name: jax.tree.map(lambda x, name=name: x[:-1] if name in shorter else x, value)
        for name, value in episode.steps.items()
    }


def field_name(prefix: str, path: tuple) -> str:
    """A leaf's name as datasets spell it, `observation/camera`."""
    return "/".join(([prefix] if prefix else []) + [str(getattr(key, "key", key)) for key in path])
