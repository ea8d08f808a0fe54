"""Views of an episode: n-step transitions, sequences, returns to go, other alignments, parts and batches of it.

Transitions and sequences equal those of a replay of the same rows (`jaxrl.buffers.transitions`,
`jaxrl.buffers.sequences`), in numpy. `gather_transitions` and `gather_sequences`, which a loader uses over many
episodes, address rows only by number.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
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
Take = Callable[[str, np.ndarray], PyTree]  # a field of `Trajectory`, numbers of rows [...] -> leaves [..., ...]


# --- batches for learners --------------------------------------------------------------------------------------------


@checked(n_step={"low": 1})
def transitions(episode: Episode, n_step: int = 1) -> TransitionBatch[np.ndarray]:
    """Return the T transitions of n steps, or fewer where the episode ends; leaves `[T, ...]`, gamma not applied.

    `next_observation` is the last observation if the episode ends within the n steps; learners bootstrap from it unless
    the episode terminated there.

    Raises:
      ConfigError: n_step is less than 1.
    """
    start = np.arange(episode.length)
    return gather_transitions(_taker(rows_from_episode(episode)), start, episode.length - start, n_step)


def sequences(episode: Episode, sequence: Sequence) -> SequenceBatch[np.ndarray]:
    """Return the episode's stretches of rows, by the rules of `Sequence`; leaves `[burn_in + length, N, ...]`.

    `carry` is empty. With `end="continue"`, only stretches that end within the episode are returned: there is no next
    episode to continue into, as there is in a `Loader`.

    Raises:
      ConfigError: the rules are out of range, or ask for stored carries, which a dataset does not hold.
    """
    check_sequence(sequence)
    return gather_sequences(_taker(rows_from_episode(episode)), *stretches(episode.length + 1, sequence), sequence)


@functools.lru_cache(maxsize=1 << 14)
def stretches(count: int, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each stretch of an episode of `count` rows, and the number of its rows in it.

    An episode without a transition has none. The arrays are cached, so callers must not change them.
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
        # After the last full stretch there is one short one, unless a full one ends with the episode.
        found = grid & (full | (start < period) | (extent > longest - period))
    return start[found], extent[found]


def check_sequence(sequence: Sequence) -> None:
    """Raise a ConfigError if a dataset cannot provide such sequences."""
    least = {"length": 1, "period": 1, "burn_in": 0}
    problems = count_problems(**{f"sequence.{name}": (getattr(sequence, name), low) for name, low in least.items()})
    if sequence.end not in ("write", "truncate", "zero_pad", "continue"):
        problems.append(f"sequence.end={sequence.end!r}; use 'write', 'truncate', 'zero_pad' or 'continue'")
    if sequence.stored_carry:
        problems.append("sequence.stored_carry=True: a dataset has no recurrent states; use stored_carry=False")
    if problems:
        raise ConfigError(problems)


def gather_transitions(take: Take, start: np.ndarray, left: np.ndarray, n_step: int) -> TransitionBatch[np.ndarray]:
    """Return the n-step transitions that begin at these rows.

    Args:
      take: returns a field at rows.
      start: row numbers, int [N].
      left: number of transitions from there to the end of the episode, at least 1, int [N].
      n_step: n.
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
    """Return the stretches that begin at these rows.

    Args:
      take: returns a field at rows; the rows of an episode must be consecutive.
      start: row numbers, int [N].
      extent: number of rows that belong to each stretch, int [N]; the others are zero.
      sequence: the rules.
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
    """Return the discounted sum of the rewards from each step on, float64 `[T + 1]`.

    The last entry is the return after the last observation: 0 if the episode terminated. If it was truncated or cut
    off, the task would have continued, and `bootstrap_value` replaces the unknown return. With 0, the sums only include
    the recorded rewards, and so are too low for such episodes.

    Args:
      episode: an episode of T transitions.
      gamma: discount per step, multiplied by the episode's own.
      bootstrap_value: the value of the last observation of an episode that did not terminate.
    """
    found = np.empty(len(episode.is_last))
    found[-1] = following = 0.0 if episode.is_terminal[-1] else float(bootstrap_value)
    for step in range(episode.length - 1, -1, -1):
        found[step] = following = float(episode.reward[step]) + gamma * float(episode.discount[step]) * following
    return found


def aligned(episode: Episode, alignment: Alignment) -> dict[str, PyTree]:
    """Return the steps by RLDS field name, leaves `[T + 1, ...]`, with actions and rewards moved to other rows.

    Where action a_i is taken at observation o_i, and reward r_i and discount d_i follow it, row i holds
      "SAR": o_i, a_i, r_i, d_i: state, action, reward, as in RLDS; the last row's action, reward, discount are zero;
      "RSA": r_{i-1}, d_{i-1}, o_i, a_i: the reward that arrived with the state, as an agent sees it; the first row's
        reward is 0 and its discount 1, and the last row's action is zero;
      "ARS": a_{i-1}, r_{i-1}, d_{i-1}, o_i: the action that led to the state, as a model of the environment predicts
        it; the first row's action and reward are zero and its discount 1.
    All other fields stay with the observation.

    Raises:
      ConfigError: `alignment` is none of these.
    """
    later = {"SAR": (), "RSA": ("reward", "discount"), "ARS": ("action", "reward", "discount")}
    if alignment not in later:
        raise ConfigError(f"alignment={alignment!r}; use 'SAR', 'RSA' or 'ARS'")
    steps, moved = episode.steps, later[alignment]
    for name in ("action", "reward", "discount"):
        change = _one_later if name in moved else lambda x: zero_where(episode.is_last, x)
        steps[name] = jax.tree.map(change, steps[name])
    if "discount" in moved:
        steps["discount"][0] = 1
    return steps


def truncate(episode: Episode, condition: Callable[[Episode], np.ndarray], *, terminal: bool = False) -> Episode:
    """Return the episode up to the first step where a condition holds, which becomes its last; all of it if none does.

    The last step's action, reward and discount become zero. The episode is truncated there, not terminated: a learner
    bootstraps from that observation.

    Args:
      episode: the episode, which is not changed.
      condition: a function of the whole episode that returns at which steps it holds, bool `[T + 1]`.
      terminal: whether the condition ends the task, so that learners do not bootstrap there.

    Raises:
      ConfigError: the condition returns something else.
    """
    holds = np.asarray(condition(episode))
    if holds.shape != episode.is_last.shape or holds.dtype != np.bool_:
        raise ConfigError(
            f"the condition returned {holds.dtype} {holds.shape}; it must be bool {episode.is_last.shape}"
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
    """Return the episode with one more transition: the action and reward of its last step.

    In RLDS, the last step only has an observation. In datasets that write a step for every action, such as those of
    Open X-Embodiment, it has the last action and the reward for success. The observation after it is not recorded: the
    last observation is repeated, which is correct for an episode that terminates, because learners do not bootstrap
    from it. Other episodes are returned unchanged.
    """
    if not episode.is_terminal[-1]:
        return episode
    steps = jax.tree.map(lambda x: np.concatenate([x, x[-1:]]), episode.steps)
    steps["is_last"][-2] = steps["is_terminal"][-2] = steps["is_first"][-1] = False
    before = steps["discount"][-3:-2]  # of the former terminal step
    before[before == 0] = 1
    steps["discount"][-2] = 0
    return _rebuilt(episode, steps)


@checked(size={"low": 1}, shift={"low": 1})
def batches(
    episode: Episode, size: int, *, shift: int | None = None, drop_remainder: bool = False
) -> Iterator[dict[str, PyTree]]:
    """Return the episode's steps in batches, by RLDS field name, leaves `[size, ...]`.

    Args:
      episode: the episode, including its last step.
      size: steps per batch.
      shift: steps from the beginning of one batch to that of the next; None: `size`, so that they do not overlap.
      drop_remainder: leave out batches shorter than `size` at the end.

    Raises:
      ConfigError: a number is less than 1.
    """
    shift = size if shift is None else shift
    steps, count = episode.steps, len(episode.is_last)
    starts = range(0, count - size + 1 if drop_remainder else count, shift)
    return (jax.tree.map(lambda x: x[start : start + size], steps) for start in starts)  # noqa: B023


def _rebuilt(episode, steps, **metadata):
    """Return an episode with other steps and metadata, in which an existing `return` and `length` are corrected.

    The action, reward and discount of the last step are unused, and set to zero.
    """
    for leaf in jax.tree.leaves([steps[name] for name in ("action", "reward", "discount")]):
        leaf[-1] = 0
    extras = {name: steps.pop(name) for name in episode.extras}
    found = Episode(**steps, metadata={**episode.metadata, **metadata}, extras=extras)
    corrected = {name: value for name, value in found.summary.items() if name in found.metadata}
    return dataclasses.replace(found, metadata=corrected)


def _one_later(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])
