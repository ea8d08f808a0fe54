"""Views of an episode: n-step transitions, sequences, returns to go, and realigned or truncated steps.

Transitions and sequences are numpy arrays equal to those from a replay buffer of the same rows
(`jaxrl.buffers.transitions`, `jaxrl.buffers.sequences`). `gather_transitions` and `gather_sequences` address rows by
number, so that a loader can use them across many episodes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np

from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import count_problems
from jaxrl.core.sources import Sequence
from jaxrl.core.types import PyTree, SequenceBatch, TimeStep, Trajectory, TransitionBatch
from jaxrl.data.episodes import TERMINATED, TRUNCATED, Episode, zero_where
from jaxrl.data.rows import rows_from_episode

Alignment = Literal["SAR", "RSA", "ARS"]
Take = Callable[[str, np.ndarray], PyTree]  # (name of a `Trajectory` field, row numbers [n..]) -> leaves [n.., ...]


# --- batches for learners --------------------------------------------------------------------------------------------


@checked(n_step={"low": 1})
def transitions(episode: Episode, n_step: int = 1) -> TransitionBatch[np.ndarray]:
    """Return the T n-step transitions of an episode, with leaves `[T, ...]`; gamma is not applied.

    A transition has fewer than n steps if the episode ends earlier. Its `next_observation` is then the last one of the
    episode, from which learners bootstrap unless the episode terminated.

    Raises:
      ConfigError: n_step is less than 1.
    """
    start = np.arange(episode.length)
    return gather_transitions(_taker(rows_from_episode(episode)), start, episode.length - start, n_step)


def sequences(episode: Episode, sequence: Sequence) -> SequenceBatch[np.ndarray]:
    """Return the episode's sequences of rows that `sequence` defines, with leaves `[burn_in + length, N, ...]`.

    `carry` is empty. With `end="continue"`, only sequences that end within the episode are returned, because there is
    no next episode to continue into; a `Loader` does continue.

    Raises:
      ConfigError: a field of `sequence` is out of range, or `stored_carry` is true: a dataset has no recurrent states.
    """
    check_sequence(sequence)
    return gather_sequences(_taker(rows_from_episode(episode)), *stretches(episode.length + 1, sequence), sequence)


@functools.lru_cache(maxsize=1 << 14)
def stretches(count: int, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the number of rows of each sequence ("stretch") of an episode of `count` rows.

    An episode without a transition has no stretches. The arrays are cached, so callers must not change them.
    """
    longest, period = sequence.rows, sequence.period
    start = np.arange(count if count > 1 else 0)
    extent = np.minimum(count - start, longest)
    grid, full = start % period == 0, extent == longest
    if sequence.end == "continue":
        found = grid & full
    elif sequence.end == "write":
        found = full & (grid | (start + longest == count))
    else:
        # One shorter stretch follows the last full one, unless a full one ends with the episode.
        found = grid & (full | (start < period) | (extent > longest - period))
    return start[found], extent[found]


def check_sequence(sequence: Sequence) -> None:
    """Raise a ConfigError if a dataset cannot provide the sequences that `sequence` defines."""
    least = {"length": 1, "period": 1, "burn_in": 0}
    problems = count_problems(**{f"sequence.{name}": (getattr(sequence, name), low) for name, low in least.items()})
    if sequence.end not in ("write", "truncate", "zero_pad", "continue"):
        problems.append(f"sequence.end={sequence.end!r} must be 'write', 'truncate', 'zero_pad' or 'continue'")
    if sequence.stored_carry:
        problems.append("sequence.stored_carry=True: a dataset has no recurrent states; use stored_carry=False")
    if problems:
        raise ConfigError(problems)


def gather_transitions(take: Take, start: np.ndarray, left: np.ndarray, n_step: int) -> TransitionBatch[np.ndarray]:
    """Return the n-step transitions that begin at the rows `start`.

    Args:
      take: a function `take(field, rows)` that returns a field of the given rows.
      start: numbers of the first rows, int [N].
      left: number of transitions from each first row to the end of its episode, at least 1, int [N].
      n_step: the number of steps n.
    """
    steps = np.minimum(left, n_step).astype(np.int32)
    offset = np.arange(n_step)
    within = offset < steps[:, None]
    at = start[:, None] + np.where(within, offset, 0)
    rewards, discounts = np.where(within, take("reward", at), np.float32(0)), take("discount", at)
    bootstrap = ~take("terminated", start + steps - 1)
    if discounts is not None:
        reach = np.cumprod(np.where(within, discounts, np.float32(1)), axis=1)
        rewards[:, 1:] *= reach[:, :-1]
        bootstrap = reach[:, -1]
    return TransitionBatch(
        observation=take("observation", start),
        action=take("action", start),
        rewards=rewards,
        steps=steps,
        bootstrap=bootstrap,
        next_observation=take("observation", start + steps),
        weight=np.ones(len(start), np.bool_),
        extras=take("extras", start),
    )


def gather_sequences(
    take: Take, start: np.ndarray, extent: np.ndarray, sequence: Sequence
) -> SequenceBatch[np.ndarray]:
    """Return the sequences that begin at the rows `start`.

    Args:
      take: a function `take(field, rows)` that returns a field of the given rows; the rows of an episode must be
        consecutive.
      start: numbers of the first rows, int [N].
      extent: number of rows of each sequence, int [N]; the remaining rows up to `sequence.rows` are zero.
      sequence: the definition of the sequences.
    """
    offset = np.arange(sequence.rows)[:, None]
    mask = offset < extent
    at = start + np.where(mask, offset, 0)
    names = [field.name for field in dataclasses.fields(Trajectory)]
    stretch = Trajectory(**{name: jax.tree.map(lambda x: zero_where(~mask, x), take(name, at)) for name in names})
    # A time step's reward, endings and previous action come from the row before it, unless it begins an episode.
    began = stretch.first | ~mask
    before = np.where(began, at, at - 1)
    arrived = {
        name: jax.tree.map(lambda x: zero_where(began, x), take(name, before))
        for name in ("reward", "terminated", "truncated", "action")
    }
    timesteps = TimeStep(
        observation=stretch.observation,
        reward=arrived["reward"],
        terminated=arrived["terminated"],
        truncated=arrived["truncated"],
        first=stretch.first,
        previous_action=arrived["action"],
    )
    if sequence.end == "zero_pad":
        mask = np.ones_like(mask)
    stretch = stretch.replace(weight=stretch.weight & (offset >= sequence.burn_in))
    return SequenceBatch(stretch, timesteps, mask, (), None, sequence.burn_in)


def _taker(episode_rows: Trajectory[np.ndarray]) -> Take:
    return lambda name, at: jax.tree.map(lambda x: x[at], getattr(episode_rows, name))


# --- other views -----------------------------------------------------------------------------------------------------


@checked(gamma={"low": 0})
def return_to_go(episode: Episode, gamma: float = 1.0, bootstrap_value: float = 0.0) -> np.ndarray:
    """Return the discounted sum of the rewards that follow each step, float64 `[T + 1]`.

    The last entry is the return after the last observation: 0 if the episode terminated. If it was truncated or cut
    off, the task would have continued, and `bootstrap_value` replaces the unknown return. With `bootstrap_value=0`, the
    sums include only the recorded rewards, and so are too low for such episodes.

    Args:
      episode: an episode of T transitions.
      gamma: the discount per step; it is multiplied by the episode's discounts.
      bootstrap_value: the value of the last observation of an episode that did not terminate.
    """
    found = np.empty(len(episode.is_last))
    found[-1] = following = 0.0 if episode.is_terminal[-1] else float(bootstrap_value)
    for step in range(episode.length - 1, -1, -1):
        found[step] = following = float(episode.reward[step]) + gamma * float(episode.discount[step]) * following
    return found


def aligned(episode: Episode, alignment: Alignment) -> dict[str, PyTree]:
    """Return the steps, keyed by RLDS field name, with actions, rewards and discounts moved to other rows.

    Let a_i be the action taken at observation o_i, and r_i and d_i the reward and discount that follow it. Row i of the
    leaves `[T + 1, ...]` contains, for each `alignment`:
      "SAR": o_i, a_i, r_i, d_i (state, action, reward, as in RLDS). The last row's action, reward and discount are
        zero.
      "RSA": r_{i-1}, d_{i-1}, o_i, a_i (the reward that arrived with the state, as an agent receives it). The first
        row's reward is 0 and its discount 1; the last row's action is zero.
      "ARS": a_{i-1}, r_{i-1}, d_{i-1}, o_i (the action that led to the state, as a model of the environment reads it).
        The first row's action and reward are zero, and its discount is 1.
    All other fields stay in the row of the observation.

    Raises:
      ConfigError: `alignment` is not one of these values.
    """
    later = {"SAR": (), "RSA": ("reward", "discount"), "ARS": ("action", "reward", "discount")}
    if alignment not in later:
        raise ConfigError(f"alignment={alignment!r} must be 'SAR', 'RSA' or 'ARS'")
    steps, moved = episode.steps, later[alignment]
    for name in ("action", "reward", "discount"):
        change = _one_later if name in moved else lambda x: zero_where(episode.is_last, x)
        steps[name] = jax.tree.map(change, steps[name])
    if "discount" in moved:
        steps["discount"][0] = 1
    return steps


def truncate(episode: Episode, condition: Callable[[Episode], np.ndarray], *, terminal: bool = False) -> Episode:
    """Return the episode up to and including the first step where a condition is true, or all of it if none is.

    The last step's action, reward and discount become zero. By default, the episode is truncated at this step, not
    terminated, so a learner bootstraps from its observation.

    Args:
      episode: the episode, which is not changed.
      condition: a function `condition(episode)` that returns bool `[T + 1]`, one entry per step.
      terminal: whether the condition ends the task, so that learners do not bootstrap.

    Raises:
      ConfigError: the condition returns something else.
    """
    holds = np.asarray(condition(episode))
    if holds.shape != episode.is_last.shape or holds.dtype != np.bool_:
        raise ConfigError(
            f"the condition returned {holds.dtype} {holds.shape}; it must return bool {episode.is_last.shape}"
        )
    if not holds.any():
        return episode
    last = int(np.argmax(holds))
    if last == episode.length and not terminal:
        return episode
    steps = jax.tree.map(lambda x: x[: last + 1].copy(), episode.steps)
    steps["is_last"][-1], steps["is_terminal"][-1] = True, terminal
    if terminal:
        steps["discount"][-2:] = 0
    return _rebuilt(episode, steps, ending=TERMINATED if terminal else TRUNCATED)


def last_step_counts(episode: Episode) -> Episode:
    """Return the episode with one more transition, made from the action and reward of its last step.

    In RLDS, the last step has only an observation. In datasets that store a step for every action, such as Open
    X-Embodiment, the last step has the last action and the reward for success. The observation after this action is not
    recorded, so the last observation is repeated; this is correct for an episode that terminates, because learners do
    not bootstrap from its last observation. Episodes that do not terminate are returned unchanged.
    """
    if not episode.is_terminal[-1]:
        return episode
    steps = jax.tree.map(lambda x: np.concatenate([x, x[-1:]]), episode.steps)
    steps["is_last"][-2] = steps["is_terminal"][-2] = steps["is_first"][-1] = False
    before = steps["discount"][-3:-2]  # discount before the former terminal step
    before[before == 0] = 1
    steps["discount"][-2] = 0
    return _rebuilt(episode, steps)


def _rebuilt(episode, steps, **metadata):
    """Return the episode with new steps and updated metadata; `return` and `length` are corrected if present.

    The action, reward and discount of the last step are unused and set to zero, in place.
    """
    for leaf in jax.tree.leaves([steps[name] for name in ("action", "reward", "discount")]):
        leaf[-1] = 0
    extras = {name: steps.pop(name) for name in episode.extras}
    found = Episode(**steps, metadata={**episode.metadata, **metadata}, extras=extras)
    corrected = {name: value for name, value in found.summary.items() if name in found.metadata}
    return dataclasses.replace(found, metadata=corrected)


def _one_later(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])
