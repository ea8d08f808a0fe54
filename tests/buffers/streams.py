"""Rows of made-up episodes, whose every value says where it belongs, and a replay fed with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers import replay
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.types import Trajectory


def rows_of(columns, endings=("terminated",)):
    """Rows `[T, B]`, numpy, from each column's list of episode lengths in rows, cut to the shortest column.

    A row's observation is `tick + 1000 * column`, its reward 1 plus that. Endings take turns.
    """
    ticks = min(sum(lengths) for lengths in columns)
    shape = (ticks, len(columns))
    first, last = np.zeros(shape, bool), np.zeros(shape, bool)
    ended = {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}
    for column, lengths in enumerate(columns):
        tick = 0
        for number, length in enumerate(lengths):
            if tick < ticks:
                first[tick, column] = True
            tick += length
            if tick <= ticks:
                last[tick - 1, column] = True
                if length > 1:
                    ended[endings[number % len(endings)]][tick - 2, column] = True
    value = np.arange(ticks)[:, None] + 1000 * np.arange(len(columns))[None]
    value = value.astype(np.float32)
    return Trajectory(
        observation=value,
        action=value.astype(np.int32),
        reward=np.where(last, 0.0, value + 1.0).astype(np.float32),
        terminated=ended["terminated"],
        truncated=ended["truncated"],
        first=first,
        weight=~last,
    )


@functools.cache
def _add(sources, replicas):
    return jax.jit(lambda states, rows, carry: replay.add(states, dict(sources), rows, carry, replicas))


@functools.cache
def _sample(sources, name, replicas):
    source, stored = dict(sources)[name], replay.storage(dict(sources), name)
    return jax.jit(
        lambda ring, index, key, carry: replay.sample(ring, index, source, stored, key, replicas, initial_carry=carry)
    )


@functools.cache
def _update(source):
    return jax.jit(lambda ring, index, drawn, given: replay.update_priorities(ring, index, source, drawn, given))


class Fed:
    """A replay on one device, compiled, that is fed rollouts of `rollout` rows and can be drawn from."""

    def __init__(self, sources, example, *, rollout, shards=1, carry=(), poison=False):
        self.sources, self.replicas, self.rollout, self.ticks = sources, SingleReplica(shards), rollout, 0
        envs = example.reward.shape[1]
        self.states = replay.init(sources, example, carry, num_envs=envs, rollout=rollout, shards=shards)
        if poison:

            def bad(x):
                if x.dtype == jnp.bool_:
                    return jnp.ones_like(x)
                return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77)

            for name, state in self.states.items():
                if state.ring is not None:
                    ring = state.ring.replace(rows=jax.tree.map(bad, state.ring.rows))
                    self.states[name] = state.replace(ring=ring)
        self._key = tuple(sources.items())

    def feed(self, rows, carry=()):
        """Adds rows, a whole number of rollouts."""
        for start in range(0, rows.reward.shape[0], self.rollout):
            part = jax.tree.map(lambda x: x[start : start + self.rollout], rows)  # noqa: B023
            at = carry(start) if callable(carry) else carry
            self.states = _add(self._key, self.replicas)(self.states, part, at)
            self.ticks += self.rollout
        return self

    def ring(self, name="replay"):
        return self.states[self.sources[name].over or name].ring

    def sample(self, seed, name="replay", initial_carry=()):
        """A batch; the draw is counted."""
        draw = _sample(self._key, name, self.replicas)
        index, batch = draw(self.ring(name), self.states[name].index, jax.random.key(seed), initial_carry)
        self.states[name] = self.states[name].replace(index=index)
        return jax.device_get(batch)

    def update(self, drawn, priorities, name="replay"):
        update = _update(self.sources[name])
        index = update(self.ring(name), self.states[name].index, drawn, priorities)
        self.states[name] = self.states[name].replace(index=index)

    def starts(self, name="replay"):
        """The (tick, column) of every row that begins an item now, of one that keeps priorities."""
        ring, priority = self.ring(name), np.asarray(self.states[name].index.priority)
        shard, place = np.nonzero(priority >= 0)
        columns = priority.shape[1] // ring.slots
        tick = np.asarray(ring.tick(jnp.arange(ring.slots, dtype=jnp.int32)))[place // columns]
        return set(zip(tick.tolist(), (shard * columns + place % columns).tolist(), strict=True))
