"""Sources of experience for algorithms: rollouts, whole episodes, replays and datasets.

Sources are plain data that describe batches. A replay source defines the stored data, the items (n-step transitions or
sequences) and the sampler; `jaxrl.buffers` implements it.
"""

import dataclasses
import typing
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal

from jaxrl.core import registry

_LONGEST_ROLLOUT = 128  # steps per environment, unless `rollout_length` is set
_LEAST = {  # minimum values of fields
    "batch_size": 1,
    "burn_in": 0,
    "capacity": 1,
    "frames": 1,
    "items": 1,
    "length": 1,
    "max_times_sampled": 0,
    "n_step": 1,
    "period": 1,
}


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """On-policy source: the last `length` steps of every environment, as a `jaxrl.core.types.Rollout`.

    Args:
      length: steps per environment.
      max_policy_lag: maximum number of updates by which the acting parameters may lag behind the learner's, in
        topologies that have a choice: 0 to act with the learner's current parameters, 1 to act during updates, None to
        act with the newest available parameters.
    """

    length: int
    max_policy_lag: int | None = 0


@dataclasses.dataclass(frozen=True)
class Episodes:
    """On-policy source of whole episodes: a batch has the first `count` episodes that ended since the previous batch.

    Environments continue between batches, so an episode may begin with one version of the policy and end with another;
    each row contains the probability of its action. A batch is a `jaxrl.core.types.Rollout` `[T, count]`, in which each
    episode is a column, and rows after its end have weight 0.

    Args:
      count: episodes per batch, over all devices.
      max_length: maximum number of transitions per episode to learn from. A longer episode is cut and bootstrapped from
        its next observation; its remaining transitions are dropped.
      length: steps per environment between checks for finished episodes.
      max_policy_lag: as in `Rollouts`.
      unit: divisor of T; T is at most `max_length`, rounded up to a multiple of `unit`.
    """

    count: int
    max_length: int
    length: int
    max_policy_lag: int | None = 0
    unit: int = 1


# --- samplers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniform sampling.

    Sequences, and the transitions of a dataset, are sampled uniformly among all items. For transitions that a run
    collected, each logical shard of environments contributes an equal part of the batch, sampled uniformly within the
    shard.
    """


@dataclasses.dataclass(frozen=True)
class Prioritized:
    """Prioritized experience replay (Schaul et al., 2016, arXiv:1511.05952).

    An item of priority p is sampled with a probability proportional to p^exponent, among all items of all devices. With
    `max_times_sampled` or `storage="flashbax"`, every logical shard contributes an equal part of the batch, and the
    probability is among the items of the shard. Items of priority 0 are never sampled, for any exponent, unless all
    have priority 0: then sampling is uniform. Priorities that are NaN, infinite or negative are rejected and counted.

    Args:
      exponent: alpha, a number that may be traced. It is applied when a priority is written, so a schedule changes an
        item's probability when its priority is next updated.
      beta: exponent of the importance weights (N P)^-beta, a number that may be traced.
      normalize: "batch": importance weights are divided by the largest in the batch (over all devices), so that they
        only scale updates down; "none": they are not normalized.
      insertion: name of the entry of the rows' `extras`, float32 `[T, B]`, that contains each row's initial priority;
        None: the initial priority is the largest so far, or 1 for the first rows.
      eta: with `insertion` and sequences, a sequence's initial priority is eta * max + (1 - eta) * mean of its rows'
        entries (Kapturowski et al., 2019).
    """

    exponent: float | Any = 0.6
    beta: float | Any = 0.4
    normalize: Literal["batch", "none"] = "batch"
    insertion: str | None = None
    eta: float | Any = 0.9

    def problems(self) -> list[str]:
        """Return one line per reason why this sampler is invalid as the value of an algorithm's field."""
        if all(isinstance(x, int | float) and x >= 0 for x in (self.exponent, self.beta)):
            return []
        return [
            "exponent and beta must be numbers of at least 0; only the algorithm's field prioritized supports schedules"
        ]


@dataclasses.dataclass(frozen=True)
class Fifo:
    """Rule that selects the item that was inserted first."""


@dataclasses.dataclass(frozen=True)
class Lifo:
    """Rule that selects the item that was inserted last."""


@dataclasses.dataclass(frozen=True)
class MinHeap:
    """Rule that selects the item with the lowest priority; of several, the one inserted or updated least recently."""


@dataclasses.dataclass(frozen=True)
class MaxHeap:
    """Rule that selects the item with the highest priority; of several, the one inserted or updated least recently."""


Sampler = Uniform | Prioritized | Fifo | Lifo | MinHeap | MaxHeap
Remover = Fifo | Lifo | MinHeap | MaxHeap


def by_priority(*rules: Sampler | None) -> bool:
    """Return whether any of these rules depends on priorities."""
    return any(isinstance(rule, Prioritized | MinHeap | MaxHeap) for rule in rules)


# --- replay ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Sequences of rows as items, and their treatment of episode ends (as in Reverb's adders).

    A sequence has `burn_in + length` rows. Episodes have one row more than transitions, for the last observation.

    Args:
      length: rows to learn from, including the bootstrap rows at the end.
      period: rows between the starts of consecutive sequences, counted from the episode's first row (with
        `end="continue"`: from the environment's first row).
      end: "write": sequences stay within an episode, and an additional one ends exactly at its end; episodes that are
        shorter than a sequence are dropped. "truncate": a sequence may end early with the episode; its remaining rows
        are zero and not in `mask`. "zero_pad": like "truncate", but the zero rows are in `mask`, with weight 0.
        "continue": sequences continue into the next episode, where a network's carry is reset.
      burn_in: additional rows at the beginning of a sequence, used only to warm up a recurrent state.
      stored_carry: whether to store the acting policy's recurrent state at the first row of every rollout. Sequences
        then begin only at these rows or, unless `end="continue"`, at the first row of an episode, where the state is
        the initial one; a sequence that ends early has a transition after its burn-in. If False, a batch's carry is the
        initial one.
    """

    length: int
    period: int = 1
    end: Literal["write", "truncate", "zero_pad", "continue"] = "continue"
    burn_in: int = 0
    stored_carry: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of a sequence."""
        return self.burn_in + self.length


@dataclasses.dataclass(frozen=True)
class FrameStack:
    """Frame stacking during sampling: each frame is stored once, and an observation stacks the last `frames` frames.

    Args:
      frames: number of frames in a stack.
      axis: axis of one observation along which frames are stacked, the newest last.
      fill: replacement for the missing frames before an episode's first frame: copies of the first frame, or zeros.
    """

    frames: int
    axis: int = -1
    fill: Literal["repeat", "zeros"] = "repeat"


def steps_per_update(replay_ratio: float, num_envs: int) -> int:
    """Return the steps per environment between updates, from 1 to 128, such that updates do not occur in bursts.

    Args:
      replay_ratio: gradient updates per environment step. The result is 1 for invalid values, which are rejected later.
      num_envs: number of environments; 0 in training without acting.
    """
    if not isinstance(replay_ratio, int | float) or not replay_ratio > 0:
        return 1
    return round(min(max(1.0, 1 / (replay_ratio * max(num_envs, 1))), _LONGEST_ROLLOUT))


@dataclasses.dataclass(frozen=True)
class Replay:
    """Off-policy source: transitions, or sequences if `sequence` is set, sampled from stored experience.

    Args:
      capacity: maximum number of rows over all environments, or of items with `over` and a remover.
      batch_size: items per update, over all devices.
      min_size: rows to store before the first update, which also waits until every environment has enough rows for one
        item.
      rollout_length: steps per environment between two rounds of updates.
      replay_ratio: gradient updates per environment step, over all environments; kept exactly.
      n_step: number of rewards per transition.
      sequence: settings of sequences; if set, items are sequences instead of transitions.
      sampler: rule for sampling items.
      max_times_sampled: number of times an item is sampled before it is removed; 0: no limit. With a limit, items are
        sampled one by one, except with Fifo and Lifo.
      extras: names of the entries of `ActorOutput.extras` to store with the rows.
      frame_stack: settings for storing each frame once; None: store observations as they are.
      over: name of another replay source whose rows this source samples instead of storing rows. The other source's
        `extras`, `frame_stack`, `storage` and `capacity` in rows apply. Items whose rows the other source
        overwrites are removed.
      storage: "ring": stores rows and supports everything above; "host": a ring with observations and recurrent states
        in the memory of the devices' host, for a replay too large for a device. The host then gathers the samples, but
        all data used to choose them stays on the devices, and the run is bit for bit the same. "flashbax": flashbax's
        flat buffers, for one-step transitions sampled uniformly or by priority.
      remover: with `over`, this source holds at most `capacity` items and removes others by this rule; None: it holds
        all items that begin in the rows. A full ring overwrites its oldest rows.
    """

    capacity: int
    batch_size: int
    min_size: int
    rollout_length: int = 1
    replay_ratio: float = 1.0
    n_step: int = 1
    sequence: Sequence | None = None
    sampler: Sampler = Uniform()
    max_times_sampled: int = 0
    extras: tuple[str, ...] = ()
    frame_stack: FrameStack | None = None
    over: str | None = None
    storage: Literal["ring", "host", "flashbax"] = "ring"
    remover: Remover | None = None

    @property
    def transitions(self) -> int:
        """The number of transitions to learn from in an item."""
        return 1 if self.sequence is None else max(self.sequence.length - 1, 1)

    @property
    def lookahead(self) -> int:
        """The number of rows that an item reads after its first row."""
        return self.n_step if self.sequence is None else self.sequence.rows - 1


@dataclasses.dataclass(frozen=True)
class View:
    """Additional view of a replay's rows, whose items form a part of every batch (`Replay(over=...)`).

    Args:
      items: number of this view's items per batch.
      sampler: rule for sampling the items.
      capacity: maximum number of items, over all environments; None: one item for every row at which one can begin.
      remover: rule for removing items in excess of `capacity`, if that is set.
      max_times_sampled: number of times an item is sampled before it is removed; 0: no limit.
    """

    items: int
    sampler: Sampler = Uniform()
    capacity: int | None = None
    remover: Remover = Fifo()
    max_times_sampled: int = 0

    def problems(self) -> list[str]:
        """Return one line per reason why the view is invalid."""
        found = value_problems(self)
        for field, kinds in (("sampler", Sampler), ("remover", Remover)):
            if not isinstance(rule := getattr(self, field), kinds):
                found.append(f"{field}={rule!r:.80} is not a rule from jaxrl.core.sources")
        if isinstance(self.sampler, Prioritized):
            found += self.sampler.problems()
        if self.capacity is None and self.remover != Fifo():
            found.append(f"remover={self.remover!r:.80} has no effect without capacity; set a capacity")
        return found

    def of(self, name: str, replay: Replay) -> Replay:
        """Return the replay source that samples this view from the rows of `replay`, the source named `name`."""
        return dataclasses.replace(
            replay,
            over=name,
            batch_size=self.items,
            sampler=self.sampler,
            capacity=replay.capacity if self.capacity is None else self.capacity,
            remover=None if self.capacity is None else self.remover,
            max_times_sampled=self.max_times_sampled,
            extras=(),
            frame_stack=None,
        )


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Source that only a dataset can provide: items sampled uniformly from existing rows.

    Algorithms that also learn from their own experience declare a `Replay`, which a dataset can provide as well.

    Args:
      batch_size: items per update, over all devices.
      n_step: number of rewards per transition.
      sequence: settings of sequences; if set, items are sequences instead of transitions.
    """

    batch_size: int
    n_step: int = 1
    sequence: Sequence | None = None


Source = Rollouts | Episodes | Replay | Dataset


def value_problems(settings: Any, prefix: str = "") -> list[str]:
    """Return one line per field of a source or of its parts whose value is invalid, regardless of other settings.

    Args:
      settings: a source, or a part of one.
      prefix: prefix of the fields' names, for the messages.
    """
    found = []
    for field in dataclasses.fields(settings):
        value, name, least = getattr(settings, field.name), f"{prefix}{field.name}", _LEAST.get(field.name)
        choices = typing.get_args(field.type) if typing.get_origin(field.type) is Literal else (value,)
        if value not in choices:
            found.append(f"{name}={value!r:.80} must be one of {choices}")
        counts = isinstance(value, Integral) and type(value) is not bool
        if least is not None and value is not field.default and not (counts and value >= least):
            found.append(f"{name}={value!r:.80} must be a whole number of at least {least}")
        if dataclasses.is_dataclass(value):
            found += value_problems(value, f"{name}.")
    return found


registry.add("sampler", Uniform, Prioritized, Fifo, Lifo, MinHeap, MaxHeap)
registry.add("source", Rollouts, Episodes, Sequence, FrameStack, Replay, View, Dataset)


def sources_by_priority(sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the replays that sample or remove by priority, for which updates must return priorities."""
    replays = {name: source for name, source in sources.items() if isinstance(source, Replay)}
    return [name for name, source in replays.items() if by_priority(source.sampler, source.remover)]
