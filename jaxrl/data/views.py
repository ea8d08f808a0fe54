"""Views of an episode: n-step transitions, sequences, returns to go, other alignments, parts of it.

They are what a replay gives of the same rows (`jaxrl.buffers.transitions`, `jaxrl.buffers.sequences`), in numpy. The
two that a loader needs over many episodes, `gather_transitions` and `gather_sequences`, know rows by their numbers
alone.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import numpy as np

from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import Sequence
from jaxrl.core.types import PyTree, SequenceBatch, TimeStep, Trajectory, TransitionBatch
from jaxrl.data.episodes import TERMINATED, TRUNCATED, Episode, zero_where
from jaxrl.data.rows import rows_from_episode

Alignment = Literal["SAR", "RSA", "ARS"]
Take = Callable[[str, np.ndarray], PyTree]  # a field of `Trajectory`, numbers of rows [...] -> leaves [..., ...]


# --- what learners take ----------------------------------------------------------------------------------------------


@checked(n_step={"low": 1})
def transitions(episode: Episode, n_step: int = 1) -> TransitionBatch[np.ndarray]:
    """Its T transitions of n steps, or fewer where the episode ends before; leaves `[T, ...]`, gamma not applied.

    `next_observation` is the last observation where the episode ends on the way; it is bootstrapped from unless the
    episode terminated there.

    Raises:
      ConfigError: n_step is less than 1.
    """
    start = np.arange(episode.length)
    return gather_transitions(_taker(rows_from_episode(episode)), start, episode.length - start, n_step)


def sequences(episode: Episode, sequence: Sequence) -> SequenceBatch[np.ndarray]:
    """Its stretches of rows, by the rules of `Sequence`; leaves `[burn_in + length, N, ...]`, `carry` empty.

    With `end="continue"` only those that end within the episode: there is nothing that they could run on into. A
    `Loader` has the next episode for that.

    Raises:
      ConfigError: the rules are out of range, or ask for stored carries: a dataset holds none.
    """
    check_sequence(sequence)
    return gather_sequences(_taker(rows_from_episode(episode)), *stretches(episode.length + 1, sequence), sequence)


def stretches(count: int, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Where an episode of `count` rows has stretches: their first rows, and how many of the episode's rows they hold.

    An episode without a transition has none.
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
        # Past the last full stretch there is one short one, and none where a full one ends with the episode.
        found = grid & (full | (start < period) | (extent > longest - period))
    return start[found], extent[found]


def check_sequence(sequence: Sequence) -> None:
    """Raises a ConfigError where a dataset cannot give such sequences."""
    problems = [
        f"sequence.{name}={value} must be at least {low}"
        for name, value, low in (
            ("length", sequence.length, 1),
            ("period", sequence.period, 1),
            ("burn_in", sequence.burn_in, 0),
        )
        if value < low
    ]
    if sequence.end not in ("write", "truncate", "zero_pad", "continue"):
        problems.append(f"sequence.end={sequence.end!r}; use 'write', 'truncate', 'zero_pad' or 'continue'")
    if sequence.stored_carry:
        problems.append("sequence.stored_carry=True: a dataset holds no recurrent states; use stored_carry=False")
    if problems:
        raise ConfigError(problems)


def gather_transitions(take: Take, start: np.ndarray, left: np.ndarray, n_step: int) -> TransitionBatch[np.ndarray]:
    """The n-step transitions that begin at rows.

    Args:
      take: gives a field at rows.
      start: numbers of rows, int [N].
      left: how many transitions their episode has from there on, at least 1, int [N].
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
    """The stretches that begin at rows.

    Args:
      take: gives a field at rows; every row but an episode's first has its own before it.
      start: numbers of rows, int [N].
      extent: how many rows from there on belong to them, int [N]; the others are zero.
      sequence: the rules.
    """
    offset = np.arange(sequence.rows)[:, None]
    mask = offset < extent
    at = start + np.where(mask, offset, 0)
    fields = ("observation", "action", "reward", "terminated", "truncated", "first", "weight", "extras", "discount")
    stretch = Trajectory(
        **{name: jax.tree.map(lambda x: zero_where(~mask, x), take(name, at)) for name in fields}  # noqa: B023
    )
    # A time step's reward, endings and previous action are of the row before it, unless it begins an episode.
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


# --- what else is asked of an episode --------------------------------------------------------------------------------


@checked(gamma={"low": 0})
def return_to_go(episode: Episode, gamma: float = 1.0, bootstrap_value: float = 0.0) -> np.ndarray:
    """The discounted sum of the rewards from each step on, float64 `[T + 1]`.

    The last entry is what follows the last observation: 0 where the episode terminated. Where it was truncated or cut
    off the task would have gone on, and what would have followed is not in the data: `bootstrap_value` stands for it.
    With 0 the sums are those of the rewards that were seen, and so are too low for such episodes.

    Args:
      episode: of T transitions.
      gamma: discount of one step, times the episode's own.
      bootstrap_value: the value of the last observation of an episode that did not terminate.
    """
    found = np.empty(len(episode.is_last))
    found[-1] = following = 0.0 if episode.is_terminal[-1] else float(bootstrap_value)
    for step in range(episode.length - 1, -1, -1):
        found[step] = following = float(episode.reward[step]) + gamma * float(episode.discount[step]) * following
    return found


def aligned(episode: Episode, alignment: Alignment) -> dict[str, PyTree]:
    """The steps by their RLDS names, leaves `[T + 1, ...]`, with another action and reward on each step's row.

    Where action a_i is taken at observation o_i, and reward r_i and discount d_i follow it, row i holds
      "SAR": o_i, a_i, r_i, d_i: state, action, reward, as in RLDS; the last row's action, reward, discount are zero;
      "RSA": r_{i-1}, d_{i-1}, o_i, a_i: the reward that arrived with the state, as an agent sees it; the first row's
        reward is 0 and its discount 1, and the last row's action is zero;
      "ARS": a_{i-1}, r_{i-1}, d_{i-1}, o_i: the action that led to the state, as a model of the environment predicts
        it; the first row's action and reward are zero and its discount 1.
    All other fields stay with the observation.

    Raises:
      ConfigError: it is none of these.
    """
    if alignment not in ("SAR", "RSA", "ARS"):
        raise ConfigError(f"alignment={alignment!r}; use 'SAR', 'RSA' or 'ARS'")
    steps = episode.steps
    moved = {"SAR": (), "RSA": ("reward", "discount"), "ARS": ("action", "reward", "discount")}[alignment]
    for name in ("action", "reward", "discount"):
        change = _one_later if name in moved else lambda x: zero_where(episode.is_last, x)
        steps[name] = jax.tree.map(change, steps[name])
    if "discount" in moved:
        steps["discount"][0] = 1
    return steps


def truncate(episode: Episode, condition: Callable[[Episode], np.ndarray], *, terminal: bool = False) -> Episode:
    """The episode up to the first step where a condition holds, which becomes its last; all of it if there is none.

    Its action, reward and discount mean nothing then and are zero. The episode is truncated there, not terminated: a
    learner bootstraps from that observation.

    Args:
      episode: is left as it is.
      condition: of the whole episode, which steps it holds at, bool `[T + 1]`.
      terminal: the condition ends the task: nothing is to be bootstrapped there.

    Raises:
      ConfigError: the condition gives something else.
    """
    holds = np.asarray(condition(episode))
    steps = len(episode.is_last)
    if holds.shape != (steps,) or holds.dtype != np.bool_:
        raise ConfigError(f"the condition gave {holds.dtype} {holds.shape}; it must be bool ({steps},)")
    if not holds.any():
        return episode
    last = int(np.argmax(holds))
    if last == steps - 1 and not terminal:
        return episode
    parts = jax.tree.map(lambda x: x[: last + 1].copy(), episode.steps)
    for leaf in jax.tree.leaves([parts[name] for name in ("action", "reward", "discount")]):
        leaf[-1] = 0
    parts["is_last"][-1], parts["is_terminal"][-1] = True, terminal
    if terminal:
        parts["discount"][-2:] = 0
    metadata = {**episode.metadata, "ending": TERMINATED if terminal else TRUNCATED}
    found = Episode(
        **{name: parts.pop(name) for name in tuple(parts) if name not in episode.extras},
        metadata=metadata,
        extras=parts,
    )
    own = {"return": found.episode_return, "length": found.length}
    return dataclasses.replace(found, metadata=metadata | {name: x for name, x in own.items() if name in metadata})


def last_step_counts(episode: Episode) -> Episode:
    """The episode with one more transition: what its last step holds as an action and a reward that followed.

    RLDS gives the last step an observation alone. In datasets that write a step for every action, such as those of Open
    X-Embodiment, the last action and the reward for success are there. What was seen after it is in no dataset: the
    last observation stands there again, which is right for an episode that terminates, because nobody bootstraps from
    it. Of others the last step stays an observation, and its action and reward mean nothing.
    """
    if not episode.is_terminal[-1]:
        return episode
    steps = jax.tree.map(lambda x: np.concatenate([x, x[-1:]]), episode.steps)
    for leaf in jax.tree.leaves([steps["action"], steps["reward"]]):
        leaf[-1] = 0
    steps["is_last"][-2] = steps["is_terminal"][-2] = steps["is_first"][-1] = False
    before = steps["discount"][-3:-2]  # of what was the terminal step
    before[before == 0] = 1
    steps["discount"][-2:] = 0
    parts = {name: steps.pop(name) for name in tuple(steps) if name not in episode.extras}
    found = Episode(**parts, metadata=episode.metadata, extras=steps)
    own = {"return": found.episode_return, "length": found.length}
    return dataclasses.replace(
        found, metadata={**episode.metadata, **{name: x for name, x in own.items() if name in episode.metadata}}
    )


@checked(size={"low": 1}, shift={"low": 1})
def batches(
    episode: Episode, size: int, *, shift: int | None = None, drop_remainder: bool = False
) -> Iterator[dict[str, PyTree]]:
    """Its steps in batches: by their RLDS names, leaves `[size, ...]`.

    Args:
      episode: whose steps, the last included.
      size: steps of a batch.
      shift: steps from the beginning of one batch to that of the next; None: `size`, so that they do not overlap.
      drop_remainder: leave out what is shorter than `size` at the end.

    Raises:
      ConfigError: a number is less than 1.
    """
    shift = size if shift is None else shift
    steps, count = episode.steps, len(episode.is_last)
    starts = range(0, count - size + 1 if drop_remainder else count, shift)
    return (jax.tree.map(lambda x: x[start : start + size], steps) for start in starts)  # noqa: B023


def _one_later(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])
