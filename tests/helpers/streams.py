"""Rows of made-up episodes, whose every value says where it belongs, and a replay fed with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers import replay
from jaxrl.core import keys
from jaxrl.core.types import Trajectory
from jaxrl.parallel.replicas import SingleReplica


def rows_of(columns, endings=("terminated",)):
    """Rows `[T, B]`, numpy, from each column's list of episode lengths in rows, cut to the shortest column.

    A row's observation is `tick + 1000 * column`, its reward 1 plus that. Endings take turns.
    """
    steps_per_env = min(sum(lengths) for lengths in columns)
    shape = (steps_per_env, len(columns))
    first, last = np.zeros(shape, bool), np.zeros(shape, bool)
    ended = {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}
    for column, lengths in enumerate(columns):
        tick = 0
        for number, length in enumerate(lengths):
            if tick < steps_per_env:
                first[tick, column] = True
            tick += length
            if tick <= steps_per_env:
                last[tick - 1, column] = True
                if length > 1:
                    ended[endings[number % len(endings)]][tick - 2, column] = True
    value = np.arange(steps_per_env)[:, None] + 1000 * np.arange(len(columns))[None]
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
def compiled(sources, envs, rollout, shards):
    """The buffers of sources, and their functions compiled once for all tests of a process."""
    buffers = replay.bind(
        dict(sources), num_envs=envs, rollout_length=rollout, shards=shards, replicas=SingleReplica(shards)
    )

    def sample(name, state, key, carry):
        return dataclasses.replace(buffers[name], initial_carry=carry).sample(state, key)

    return (
        buffers,
        jax.jit(lambda states, rows, carry: replay.add(buffers, states, rows, carry)),
        jax.jit(sample, static_argnums=0),
        jax.jit(lambda name, state, info, given: buffers[name].update_priorities(state, info, given), static_argnums=0),
    )


class Fed:
    """A replay on one device, compiled, that is fed rollouts of `rollout` rows and can be drawn from."""

    def __init__(self, sources, example, *, rollout, shards=1, carry=(), poison=False):
        self.sources, self.rollout, self.steps_per_env = sources, rollout, 0
        self.buffers, self._add, self._sample, self._update = compiled(
            tuple(sources.items()), example.reward.shape[1], rollout, shards
        )
        self.states = {name: buffer.init(example, carry) for name, buffer in self.buffers.items()}
        if poison:

            def bad(x):
                if x.dtype == jnp.bool_:
                    return jnp.ones_like(x)
                return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77)

            for name, state in self.states.items():
                if state.ring is not None:
                    ring = state.ring.replace(rows=jax.tree.map(bad, state.ring.rows))
                    self.states[name] = state.replace(ring=ring)

    def feed(self, rows, carry=()):
        """Adds rows, a whole number of rollouts."""
        for start in range(0, rows.reward.shape[0], self.rollout):
            part = jax.tree.map(lambda x: x[start : start + self.rollout], rows)  # noqa: B023
            at = carry(start) if callable(carry) else carry
            self.states = self._add(self.states, part, at)
            self.steps_per_env += self.rollout
        return self

    def ring(self, name="replay"):
        return self.states[self.sources[name].over or name].ring

    def sample(self, seed, name="replay", initial_carry=()):
        """A batch; the draw is counted."""
        state, batch = self._sample(name, self.whole(name), keys.root_key(seed), initial_carry)
        self.states[name] = self.states[name].replace(index=state.index)
        return jax.device_get(batch)

    def update(self, info, priorities, name="replay"):
        state = self._update(name, self.whole(name), info, priorities)
        self.states[name] = self.states[name].replace(index=state.index)

    def whole(self, name="replay"):
        """The state with the ring that is drawn from."""
        return self.states[name].replace(ring=self.ring(name))

    def starts(self, name="replay"):
        """The (tick, column) of every row that begins an item now, of one that keeps priorities."""
        ring, priority = self.ring(name), np.asarray(self.states[name].index.priority)
        shard, place = np.nonzero(priority >= 0)
        columns = priority.shape[1] // ring.slots
        tick = np.asarray(ring.step_at(jnp.arange(ring.slots, dtype=jnp.int32)))[place // columns]
        return set(zip(tick.tolist(), (shard * columns + place % columns).tolist(), strict=True))


def n_step(rows, tick, column, n):
    """Return the transition at a row, by a loop: rewards, steps, what bootstrapping counts for, next observation."""
    rewards, at, bootstrap = [], tick, 1.0
    for _ in range(n):
        rewards.append(bootstrap * float(rows.reward[at, column]))
        bootstrap *= 1.0 if rows.discount is None else float(rows.discount[at, column])
        at += 1
        if rows.terminated[at - 1, column]:
            bootstrap = 0.0
        if rows.terminated[at - 1, column] or rows.truncated[at - 1, column]:
            break
    return rewards + [0.0] * (n - len(rewards)), len(rewards), bootstrap, float(rows.observation[at, column])


def assert_two_devices_are_one(step, one, two, state, layout, rows):
    """Assert that rollouts of four rows leave the same state, and the same is drawn, on one device and on two.

    Args:
      step: of buffers, a state, rows and a key: the next state, and what was drawn, leaves [batch, ...].
      one, two: the buffers, bound to one device and to two.
      state: to begin with.
      layout: its partition specs.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    shared = jax.shard_map(
        lambda *given: step(two, *given),
        mesh=mesh,
        in_specs=(layout, spec(None, "data"), spec()),
        out_specs=(layout, spec("data")),
        check_vma=False,
    )
    alone, both, first, second = jax.jit(lambda *given: step(one, *given)), jax.jit(shared), state, state
    for start in range(0, len(rows.reward), 4):
        part, key = jax.tree.map(lambda x: jnp.asarray(x[start : start + 4]), rows), jax.random.key(start)  # noqa: B023
        (first, wanted), (second, drawn) = alone(first, part, key), both(second, part, key)
        for a, b in zip(*map(jax.tree.leaves, ((first, wanted), (second, drawn))), strict=True):
            np.testing.assert_array_equal(a, b)


def adder(rows, length, period, end):
    """Acme's SequenceAdder over one episode of `rows` rows: (first row, rows) of each item, in its own words."""
    items = []
    for steps in range(1, rows):
        if steps == length or (steps > length and (steps - length) % period == 0):
            items.append((steps - length, length))
    if end == "write":
        if rows >= length:
            items.append((rows - length, length))
    else:
        delta = length - rows
        if delta < 0:
            delta = (period + delta) % period
        kept = length - delta
        items.append((rows - kept, kept))
    return items
