"""Sources of experience for algorithms: rollouts, whole episodes, and replay in its many forms.

These are descriptions, and plain data. A replay source defines the stored data, the items (n-step transitions or
sequences) and the sampler; `jaxrl.buffers` implements it.
"""

import dataclasses
from typing import Any, Literal

from jaxrl.core import registry

_LONGEST_ROLLOUT = 128  # steps of every environment, unless `rollout_length` says otherwise


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """An on-policy source: the last `length` steps of every environment, as a `jaxrl.core.types.Rollout`.

    Args:
      length: steps of every environment.
      max_policy_lag: how many updates older than the learner's the acting parameters may be, where the topology has the
        choice: 0 for data of the learner's own policy, 1 to act while it updates, None for whatever is newest.
    """

    length: int
    max_policy_lag: int | None = 0


@dataclasses.dataclass(frozen=True)
class Episodes:
    """An on-policy source of whole episodes: a batch is the `count` of them that ended first since the batch before.

    Environments continue meanwhile, so that an episode may begin under one version of the policy and end under another;
    each row has the probability of its action. In a batch, a `jaxrl.core.types.Rollout` `[T, count]`, an episode
    has a column, and rows after its end have weight 0.

    Args:
      count: episodes of a batch, over all devices.
      max_length: transitions of an episode that are learned from. One that is longer is cut, and its next observation
        is still bootstrapped from; what follows is left out.
      length: steps of every environment between two looks at how many episodes have ended.
      max_policy_lag: as of `Rollouts`.
      unit: T is a multiple of this, and at most the multiple above `max_length`.
    """

    count: int
    max_length: int
    length: int
    max_policy_lag: int | None = 0
    unit: int = 1


# --- samplers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniform sampling: of sequences, and of the transitions of a dataset, among all.

    Of the transitions of a run's own rows, each logical shard of environments contributes an equal part of the batch,
    sampled uniformly within the shard.
    """


@dataclasses.dataclass(frozen=True)
class Prioritized:
    """Prioritized experience replay (Schaul et al., 2016, arXiv:1511.05952).

    An item of priority p is sampled with a probability proportional to p^exponent, among all items of all devices (with
    `max_times_sampled` or `storage="flashbax"`: among those of its logical shard, each of which contributes an equal
    part of the batch). Items of priority 0 are never sampled, for any exponent, unless all have 0: then uniformly.
    Priorities that are NaN, infinite or negative are refused and counted.

    Args:
      exponent: alpha; a number, may be traced. It acts when a priority is written, so a schedule moves an item's
        chance when the item's priority is next updated.
      beta: exponent of the importance weights (N P)^-beta; a number, may be traced.
      normalize: "batch": importance weights are divided by the largest in the batch (over all devices), so that they
        only ever scale an update down; "none": they are as they are.
      insertion: the name of an entry of the rows' `extras`, float32 `[T, B]`, that holds each row's priority when it
        is stored; None: the largest priority so far, 1 at first.
      eta: with `insertion` and sequences, a sequence begins with eta * max + (1 - eta) * mean of its rows' entries
        (Kapturowski et al., 2019).
    """

    exponent: float | Any = 0.6
    beta: float | Any = 0.4
    normalize: Literal["batch", "none"] = "batch"
    insertion: str | None = None
    eta: float | Any = 0.9

    def problems(self) -> list[str]:
        """Return why it cannot be a field's value as it is, one line each."""
        if all(isinstance(x, int | float) and x >= 0 for x in (self.exponent, self.beta)):
            return []
        return [
            "exponent and beta must be numbers of at least 0; only prioritized=True supports schedules "
            "(priority_exponent, importance_exponent)"
        ]


@dataclasses.dataclass(frozen=True)
class Fifo:
    """The item that was inserted first."""


@dataclasses.dataclass(frozen=True)
class Lifo:
    """The item that was inserted last."""


@dataclasses.dataclass(frozen=True)
class MinHeap:
    """The item of the lowest priority; among equals the one inserted or updated longest ago."""


@dataclasses.dataclass(frozen=True)
class MaxHeap:
    """The item of the highest priority; among equals the one inserted or updated longest ago."""


Sampler = Uniform | Prioritized | Fifo | Lifo | MinHeap | MaxHeap
Remover = Fifo | Lifo | MinHeap | MaxHeap
# The rules that do not depend on priorities, for algorithms that return none.
PlainSampler = Uniform | Fifo | Lifo
PlainRemover = Fifo | Lifo


def by_priority(*rules: Sampler | None) -> bool:
    """Return whether any of these rules depends on priorities."""
    return any(isinstance(rule, Prioritized | MinHeap | MaxHeap) for rule in rules)


# --- replay ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Sequences of rows as items, and how they treat the ends of episodes (as Reverb's adders).

    A sequence is `burn_in + length` rows. Episodes have a row more than transitions: the last observation's.

    Args:
      length: rows that are learned from, the bootstrap rows at the end included.
      period: rows between the starts of two sequences, counted from the episode's first row (with
        `end="continue"`: from the environment's first row).
      end: "write": sequences lie within an episode, and one more ends exactly at its end; shorter episodes are
        dropped. "truncate": a sequence may end early with the episode; its rows after that are zero and not in `mask`.
        "zero_pad": the same rows, but the zeros count as rows (of weight 0). "continue": sequences run on into the
        next episode; a network's carry resets there by itself.
      burn_in: rows before those, only to warm up a recurrent state.
      stored_carry: keep the recurrent state that acted at the first row of every rollout, and begin sequences only
        there, or, unless `end="continue"`, at the first row of an episode, where it is the initial one; a sequence that
        ends early has a transition after its burn-in. Else a batch's carry is the initial one.
    """

    length: int
    period: int = 1
    end: Literal["write", "truncate", "zero_pad", "continue"] = "continue"
    burn_in: int = 0
    stored_carry: bool = False

    @property
    def rows(self) -> int:
        """Return the number of rows of a sequence."""
        return self.burn_in + self.length


@dataclasses.dataclass(frozen=True)
class FrameStack:
    """Frame stacking at sampling: each frame is stored once, and observations stack the last `frames` frames.

    Args:
      frames: how many a stack holds.
      axis: of one observation, along which the frames lie one after another, the newest last.
      fill: the frames before an episode's first: that frame again, or zeros.
    """

    frames: int
    axis: int = -1
    fill: Literal["repeat", "zeros"] = "repeat"


def steps_per_update(replay_ratio: float, num_envs: int) -> int:
    """Return the steps of every environment per update, from 1 to 128, so that updates do not come in bursts.

    Args:
      replay_ratio: gradient updates per environment step. The result is 1 for invalid values, which are refused later.
      num_envs: 0 where nothing acts.
    """
    if not isinstance(replay_ratio, int | float) or not replay_ratio > 0:
        return 1
    return round(min(max(1.0, 1 / (replay_ratio * max(num_envs, 1))), _LONGEST_ROLLOUT))


@dataclasses.dataclass(frozen=True)
class Replay:
    """An off-policy source: transitions, or sequences if `sequence` is set, drawn from stored experience.

    Args:
      capacity: rows over all environments; with `storage="table"`, or with `over` and a remover, items.
      batch_size: items of one update, over all devices.
      min_size: rows before the first update, which also waits until every environment has those of one item.
      rollout_length: steps of every environment between two rounds of updates.
      replay_ratio: gradient updates per environment step, over all environments; held exactly.
      n_step: rewards of a transition.
      sequence: items are sequences instead.
      sampler: by which items are drawn.
      max_times_sampled: an item is gone once it was drawn so often; 0: never. Draws are then made one by one, but for
        Fifo and Lifo.
      extras: names of the entries of `ActorOutput.extras` to store with the rows.
      frame_stack: store each frame once.
      over: the name of another replay source: draw from its rows, and store none. Its `extras`, `frame_stack` and
        `replay_memory` count then, and of rows its `capacity`. What it overwrites is gone from here too.
      storage: "ring": rows as they are, which everything above works with; "table": whole items, each stored by
        itself, as Reverb's tables have them: slower, and takes a `remover`; "flashbax": flashbax's flat buffers, for
        one-step transitions drawn uniformly or by priority.
      remover: which item leaves a full table; None: the oldest. With `over`, this source holds `capacity` items at most
        and this one leaves; None: it holds all that begin in the rows. A ring's oldest rows are overwritten.
      replay_memory: where a ring's observations and recurrent states lie: "device", or "host": in the memory of the
        devices' host, for a replay that no device holds. What is drawn is gathered there. Everything else, by which
        items are drawn, stays on the devices, and the run is bit for bit the same.
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
    storage: Literal["ring", "table", "flashbax"] = "ring"
    remover: Remover | None = None
    replay_memory: Literal["device", "host"] = "device"

    @property
    def transitions(self) -> int:
        """Return the number of transitions to learn from in an item."""
        return 1 if self.sequence is None else max(self.sequence.length - 1, 1)


@dataclasses.dataclass(frozen=True)
class View:
    """Another view of the rows of a replay, which gives a part of every batch (`Replay(over=...)`).

    Args:
      items: how many of each batch.
      sampler: by which they are drawn.
      capacity: how many items it holds at most, over all environments; None: all that begin in the rows.
      remover: with `capacity`, which item leaves when there are more.
      max_times_sampled: an item is gone from it once it was drawn so often; 0: never.
    """

    items: int
    sampler: Sampler = Uniform()
    capacity: int | None = None
    remover: Remover = Fifo()
    max_times_sampled: int = 0

    def problems(self) -> list[str]:
        """Return why it cannot be, one line each."""
        least = {"items": 1, "max_times_sampled": 0} | ({} if self.capacity is None else {"capacity": 1})
        found = [
            f"{field}={value!r} must be a whole number of at least {number}"
            for field, number in least.items()
            if type(value := getattr(self, field)) is not int or value < number
        ]
        for field, kinds in (("sampler", Sampler), ("remover", Remover)):
            if not isinstance(rule := getattr(self, field), kinds):
                found.append(f"{field}={rule!r:.80} is not one of jaxrl.core.sources")
        if isinstance(self.sampler, Prioritized):
            found += self.sampler.problems()
        if self.capacity is None and self.remover != Fifo():
            found.append(f"remover={self.remover!r:.80} has no effect without capacity; set a capacity")
        return found

    def of(self, name: str, replay: Replay) -> Replay:
        """Return the source over the rows of `replay`, which is called `name`."""
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
    """A source that only a dataset can serve: items drawn uniformly from existing rows.

    Algorithms that also learn from their own experience declare a `Replay`, which a dataset can serve as well.

    Args:
      batch_size: items of one update, over all devices.
      n_step: rewards of a transition.
      sequence: items are sequences instead.
    """

    batch_size: int
    n_step: int = 1
    sequence: Sequence | None = None


Source = Rollouts | Episodes | Replay | Dataset

registry.add("sampler", Uniform, Prioritized, Fifo, Lifo, MinHeap, MaxHeap)
registry.add("source", Rollouts, Episodes, Sequence, FrameStack, Replay, View, Dataset)
