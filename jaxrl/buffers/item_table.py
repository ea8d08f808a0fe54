"""Table of whole items with Reverb's semantics: any sampler, any remover, and a maximum number of draws per item.

A table is for items that are kept longer than a ring's rows: the best episodes so far, demonstrations, a queue between
stages. Items are inserted and drawn one by one, in a time nearly independent of the capacity. A replay of raw rows
(`jaxrl.buffers.replay`) is cheaper if removing the oldest first is acceptable.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.buffers import best_tree, samplers, sum_tree
from jaxrl.core.sources import Fifo, Remover, Sampler, Uniform, by_priority
from jaxrl.core.types import PyTree


class Key(struct.PyTreeNode):
    """Key of an item: its position, and the number of its insertion, which differs for later items at the position."""

    position: jax.Array  # int32
    generation: jax.Array  # int32, number of the insertion


class TableState(struct.PyTreeNode):
    """Items of a table and their bookkeeping; one extra position lets an item be inserted before one is removed."""

    items: PyTree  # [capacity + 1, ...]
    priority: jax.Array  # [capacity + 1] float32, -1 where there is no item
    levels: sum_tree.Levels  # over the sampler's weights; () if it is not random
    orders: dict[str, best_tree.Levels]  # by name: trees of rules that are not random, and of free positions ("free")
    generation: jax.Array  # [capacity + 1] int32, number of the insertion that filled the position
    touched: jax.Array  # [capacity + 1] int32, `clock` when the item was inserted or its priority was set
    times_sampled: jax.Array  # [capacity + 1] int32
    clock: jax.Array  # int32, number of insertions and new priorities so far
    size: jax.Array  # int32, number of items


class TableSample(struct.PyTreeNode):
    """Sampled items, `[count]`; `held` is False where the table was empty."""

    items: PyTree
    key: Key
    held: jax.Array  # bool
    probability: jax.Array  # float32
    priority: jax.Array  # float32, when sampled
    times_sampled: jax.Array  # int32, including this sample
    size: jax.Array  # int32, items in the table when sampled


@dataclasses.dataclass(frozen=True)
class Table:
    """Rules of a table, and the table's operations as pure functions over a `TableState`.

    Args:
      capacity: maximum number of items.
      sampler: rule for sampling items.
      remover: rule for removing an item if there are more than `capacity`, possibly the newest; not random.
      max_times_sampled: number of draws after which an item is removed; 0: no limit.
    """

    capacity: int
    sampler: Sampler = Uniform()
    remover: Remover = Fifo()
    max_times_sampled: int = 0

    def init(self, example: PyTree) -> TableState:
        """Return an empty table for items like `example` (no leading axis), or their shapes."""
        positions = self.capacity + 1
        return TableState(
            items=jax.tree.map(lambda x: jnp.zeros((positions, *x.shape), x.dtype), example),
            priority=jnp.full(positions, samplers.ABSENT, jnp.float32),
            levels=sum_tree.zeros(positions) if samplers.by_chance(self.sampler) else (),
            orders={name: best_tree.init(1, positions) for name in ("free", *self._rules)},
            generation=jnp.zeros(positions, jnp.int32),
            touched=jnp.zeros(positions, jnp.int32),
            times_sampled=jnp.zeros(positions, jnp.int32),
            clock=jnp.int32(0),
            size=jnp.int32(0),
        )

    def insert(self, state: TableState, items: PyTree, priorities: jax.Array) -> tuple[TableState, Key]:
        """Insert items one by one; if the table is full, each insertion removes the item chosen by the remover.

        Args:
          state: the table.
          items: leaves `[count, ...]`.
          priorities: float32 [count]; an item whose priority is NaN, infinite or negative is not inserted.

        Returns:
          The table, and the items' keys; those of items that were not inserted have generation 0.
        """

        def one(state, pair):
            item, priority = pair
            accepted = samplers.acceptable(priority)
            position = self._best(state, "free")
            where = jnp.where(accepted, position, sum_tree.NOWHERE)
            clock = state.clock + accepted.astype(jnp.int32)
            state = state.replace(
                items=jax.tree.map(lambda all, x: all.at[where].set(x, mode="drop"), state.items, item),
                generation=state.generation.at[where].set(clock, mode="drop"),
                touched=state.touched.at[where].set(clock, mode="drop"),
                times_sampled=state.times_sampled.at[where].set(0, mode="drop"),
                clock=clock,
                size=state.size + accepted.astype(jnp.int32),
            )
            state = self._put(state, where[None], priority[None], state.orders)
            full = state.size > self.capacity
            gone = self._best(state, type(self.remover).__name__)
            state = self._remove(state, jnp.where(full, gone, sum_tree.NOWHERE), full)
            return state, Key(position, jnp.where(accepted, clock, 0))

        return jax.lax.scan(one, state, (items, priorities.astype(jnp.float32)))

    def sample(self, state: TableState, key: jax.Array, count: int) -> tuple[TableState, TableSample]:
        """Sample `count` items one by one; an item that reaches `max_times_sampled` is removed before the next draw."""

        def one(state, key):
            size = state.size
            held = size > 0
            if samplers.by_chance(self.sampler):
                tree = jnp.zeros(1, jnp.int32)
                drawn = samplers.draw(key, state.priority[None], _alone(state.levels), tree, size[None])
                position, chance = drawn[0][0], drawn[1][0]
            else:
                position = jnp.where(held, self._best(state, type(self.sampler).__name__), 0)
                chance = held.astype(jnp.float32)
            where = jnp.where(held, position, sum_tree.NOWHERE)
            times = state.times_sampled.at[where].add(1, mode="drop")
            drawn = TableSample(
                items=(),  # not changed by draws
                key=Key(position, jnp.where(held, state.generation[position], 0)),
                held=held,
                probability=chance,
                priority=state.priority[position],
                times_sampled=times[position],
                size=size,
            )
            state = state.replace(times_sampled=times)
            if self.max_times_sampled:
                worn = held & (times[position] >= self.max_times_sampled)
                state = self._remove(state, jnp.where(worn, position, sum_tree.NOWHERE), worn)
            return state, drawn

        after, drawn = jax.lax.scan(one, state.replace(items=()), jax.random.split(key, count))
        items = jax.tree.map(lambda all: all[drawn.key.position], state.items)
        return after.replace(items=state.items), drawn.replace(items=items)

    def update_priorities(self, state: TableState, keys: Key, priorities: jax.Array) -> TableState:
        """Set items' priorities one by one; drop those for removed items, and NaN, infinite and negative ones."""
        priorities = priorities.astype(jnp.float32)
        live = self._live(state, keys) & samplers.acceptable(priorities)
        turn = jnp.cumsum(live.astype(jnp.int32), dtype=jnp.int32)
        # Find the last priority for each item without a loop: the order of writes to one position is undefined.
        where = jnp.where(live, keys.position, sum_tree.NOWHERE)
        touched = state.touched.at[where].set(0, mode="drop").at[where].max(turn, mode="drop")
        where = jnp.where(live & (touched[keys.position] == turn), where, sum_tree.NOWHERE)
        touched = touched.at[where].set(state.clock + turn, mode="drop")
        state = state.replace(touched=touched, clock=state.clock + turn[-1])
        return self._put(state, where, priorities, [name for name, rule in self._rules.items() if by_priority(rule)])

    def _live(self, state, key):
        return (state.priority[key.position] >= 0.0) & (state.generation[key.position] == key.generation)

    @property
    def _rules(self):
        """The rules that are not random, by name."""
        return {type(rule).__name__: rule for rule in (self.sampler, self.remover) if not samplers.by_chance(rule)}

    def _put(self, state, where, priority, changed):
        """Set priorities [k] at positions [k], and update the orders named in `changed`."""
        levels, orders, tree = state.levels, dict(state.orders), jnp.zeros_like(where)
        if levels:
            weight = samplers.weight(self.sampler, priority)
            levels = tuple(level[0] for level in sum_tree.put(_alone(levels), tree, where, weight))
        state = state.replace(priority=state.priority.at[where].set(priority, mode="drop"), levels=levels)
        for name in changed:
            orders[name] = best_tree.put(orders[name], tree, where, self.capacity + 1, self._ranks(state, name))
        return state.replace(orders=orders)

    def _remove(self, state, where, removed):
        state = self._put(state, where[None], jnp.full(1, samplers.ABSENT, jnp.float32), state.orders)
        return state.replace(size=state.size - removed.astype(jnp.int32))

    def _best(self, state, name):
        return best_tree.best(state.orders[name], 1, self.capacity + 1, self._ranks(state, name))[0]

    def _ranks(self, state, name):
        """Return the function that ranks items under a rule; for "free", it ranks free positions first."""

        def ranks(_, position):
            priority = state.priority[position]
            if name == "free":
                return (priority < 0.0).astype(jnp.float32), jnp.zeros_like(position)
            inserted, touched = (state.clock - x[position] for x in (state.generation, state.touched))
            return samplers.rank(self._rules[name], priority, inserted, touched)

        return ranks


def _alone(levels: sum_tree.Levels) -> sum_tree.Levels:
    """Return the levels of one tree with a leading axis of trees, `[1, ...]`."""
    return tuple(level[None] for level in levels)
