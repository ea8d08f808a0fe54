"""Conversion between RLDS episodes and jaxrl's row convention.

Both formats have T + 1 entries for T transitions, and store an action and the reward that followed it in the entry of
the observation at which the action was taken. They differ in the entry that marks the end of an episode: RLDS marks the
last observation, rows mark the transition that led to it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import chex
import jax
import numpy as np

from jaxrl.core import spaces
from jaxrl.core.errors import DatasetError
from jaxrl.core.types import Trajectory
from jaxrl.data.episodes import (
    Episode,
    cast,
    discount_problems,
    implied_discount,
    marks_of,
    zero_where,
)


def rows_from_episode(episode: Episode) -> Trajectory[np.ndarray]:
    """Convert an episode to rows with leaves `[T + 1, ...]`, without an environment axis.

    An episode that did not terminate is marked as `truncated`, even if it was only cut off by the recording: the task
    would have continued, so learners bootstrap from the last observation. The action and reward of the last row are
    zero, regardless of their values in the dataset. Rewards and discounts are float32; the discounts are None if they
    follow from the ending.

    Raises:
      AssertionError: the arrays differ in length, `is_first`, `is_last` or `is_terminal` is not bool, or a step has
        several rewards.
      DatasetError: a discount is 0 within the episode or not in [-1, 1], or float32 cannot represent a reward.
    """
    last = episode.is_last
    chex.assert_rank([episode.reward, episode.discount, last], 1)
    chex.assert_equal_shape_prefix(jax.tree.leaves(episode.steps), 1)
    chex.assert_type([episode.is_first, last, episode.is_terminal], bool)
    for field, what in discount_problems(episode):
        raise DatasetError(f"{field} {what}")
    before_last, terminal = np.append(last[1:], False), bool(episode.is_terminal[-1])
    discount = zero_where(last | (before_last & terminal), cast(episode.discount, np.float32, "discount", ~last))
    return Trajectory(
        observation=episode.observation,
        action=jax.tree.map(lambda x: zero_where(last, x), episode.action),
        reward=zero_where(last, cast(episode.reward, np.float32, "reward", ~last)),
        terminated=before_last & terminal,
        truncated=before_last & (not terminal),
        first=episode.is_first,
        weight=~last,
        extras=dict(episode.extras),
        discount=None if np.array_equal(discount, implied_discount(episode.is_terminal)) else discount,
    )


def episode_from_rows(rows: Trajectory[np.ndarray], metadata: Mapping[str, Any] | None = None) -> Episode:
    """Convert rows `[T + 1, ...]` to an episode; with the episode's metadata, the inverse of `rows_from_episode`.

    Unchanged arrays are shared with the rows instead of copied.

    Args:
      rows: the rows of one episode, from first to last; the action and reward of the last row are ignored.
      metadata: the episode's metadata. Its `ending` distinguishes "cut off" from "truncated", which rows do not.
        Without `ending`, an episode whose end is not marked counts as cut off.

    Raises:
      AssertionError: the arrays differ in length.
    """
    chex.assert_equal_shape_prefix(jax.tree.leaves(rows), 1)
    marks, ending = marks_of(rows.terminated[:-1], rows.truncated[:-1])
    is_last = marks["is_last"]
    return Episode(
        observation=rows.observation,
        action=jax.tree.map(lambda x: zero_where(is_last, x), spaces.named(rows.action)),
        reward=zero_where(is_last, rows.reward),
        discount=zero_where(is_last, rows.discounts),
        **marks,
        metadata={"ending": ending} | dict(metadata or {}),
        extras=dict(rows.extras),
    )


# The fields to keep for unfinished episodes; `first` and `weight` follow from the position of a row.
_CUT = ("observation", "action", "reward", "terminated", "truncated", "discount")


class EpisodeCutter:
    """A converter of streams of rows `[T, B, ...]` to episodes, which may extend over several calls of `add`.

    Only unfinished episodes are kept between calls. Episodes without their beginning or without a transition are left
    out. If the rows of an episode break off (an environment was recreated, or rows were lost), the episode ends at its
    last known observation and counts as cut off.

    Args:
      num_envs: the number of environments, B.
      max_steps: the number of transitions at which an episode is cut off; None for no limit.
    """

    def __init__(self, num_envs: int, max_steps: int | None = None):
        self._limit = None if max_steps is None else max_steps + 1  # in rows
        self._open: list[list[list[np.ndarray]] | None] = [None] * num_envs  # pieces of leaves [n, ...]
        self._metadata: list[dict[str, Any]] = [{}] * num_envs  # of the open episodes
        self._structure: Any = None

    def add(self, rows: Trajectory, versions: np.ndarray | None = None) -> Iterator[tuple[int, Episode]]:
        """Yield (environment index, episode) for the episodes that end within these rows.

        Args:
          rows: the rows that follow those of the last call.
          versions: the version of the policy that acted at each time, `[T]`. The version at the first row of an episode
            becomes its metadata `policy_version`.
        """
        leaves, self._structure = jax.tree.flatten([getattr(rows, name) for name in _CUT])
        leaves = [np.ascontiguousarray(np.swapaxes(np.asarray(x), 0, 1)) for x in leaves]  # [B, T, ...]
        first, weight = np.asarray(rows.first), np.asarray(rows.weight)
        for env in range(first.shape[1]):
            yield from self._add_one(env, [x[env] for x in leaves], first[:, env], weight[:, env], versions)

    def finish(self) -> Iterator[tuple[int, Episode]]:
        """Yield (environment index, episode) for the unfinished episodes, which count as cut off."""
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
            number = np.arange(len(leaves[-1]))
            fields = dict(zip(_CUT, jax.tree.unflatten(self._structure, leaves), strict=True))
            rows = Trajectory(**fields, first=number == 0, weight=number < number[-1])
            yield env, episode_from_rows(rows, self._metadata[env])


def _piece(leaves, start, stop):
    return [x[start:stop] for x in leaves]
