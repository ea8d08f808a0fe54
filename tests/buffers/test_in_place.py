"""In a compiled, donated loop nothing as large as the replay is copied: neither the rows nor what an index keeps."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.buffers import replay
from jaxrl.core.sources import FrameStack, Lifo, MinHeap, Prioritized, Replay, Sequence, Uniform, View, by_priority
from jaxrl.core.types import Trajectory
from jaxrl.parallel.replicas import SingleReplica

ENVS, SLOTS = 8, 4096
SOURCES = {
    "uniform": {"replay": Replay(ENVS * SLOTS, 32, 1, n_step=2)},
    "uniform_stacks": {"replay": Replay(ENVS * SLOTS, 32, 1, frame_stack=FrameStack(3))},
    "prioritized": {"replay": Replay(ENVS * SLOTS, 32, 1, n_step=2, sampler=Prioritized())},
    "sequences": {"replay": Replay(ENVS * SLOTS, 32, 1, sequence=Sequence(6, 3, "truncate"), sampler=Prioritized())},
    "counted": {"replay": Replay(ENVS * SLOTS, 32, 1, max_times_sampled=2)},
    "lifo": {"replay": Replay(ENVS * SLOTS, 32, 1, sampler=Lifo(), max_times_sampled=2)},
    "heap": {"replay": Replay(ENVS * SLOTS, 32, 1, sampler=MinHeap(), max_times_sampled=2)},
    "host": {"replay": Replay(ENVS * SLOTS, 32, 1, storage="host", frame_stack=FrameStack(3))},
    "bounded": {
        "replay": Replay(ENVS * SLOTS, 32, 1),
        "other": View(32, Prioritized(), 4096, MinHeap()).of("replay", Replay(ENVS * SLOTS, 32, 1)),
    },
    "two_views": {
        "replay": Replay(ENVS * SLOTS, 32, 1, sampler=Prioritized()),
        "other": Replay(ENVS * SLOTS, 32, 1, sequence=Sequence(4), sampler=Uniform(), over="replay"),
    },
}
# Groups of environments store their rollouts each on its own.
GROUPED = [(name, 4) for name in ("uniform", "prioritized", "sequences", "heap", "host", "bounded")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "groups"), [*((name, None) for name in SOURCES), *GROUPED])
def test_nothing_large_is_copied(name, groups):
    rollout, shards = 4, 1 if groups else 2
    fixed = {"rollout_length": rollout, "shards": shards, "replicas": SingleReplica(shards), "groups": groups}
    buffers = replay.bind(SOURCES[name], num_envs=ENVS, **fixed)
    zeros = functools.partial(jnp.zeros, (rollout, ENVS // (groups or 1)))
    flags = [zeros(dtype=bool)] * 4
    rows = Trajectory(jnp.zeros((*flags[0].shape, 3)), zeros(dtype=jnp.int32), zeros(dtype=jnp.float32), *flags)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(states, key):
        def body(i, carried):
            states, total = carried
            states = replay.add(buffers, states, rows, (), i % groups if groups else None)
            for name, buffer in buffers.items():
                state = states[name].replace(ring=states[buffer.source.over or name].ring)
                key_i = jax.random.fold_in(key, i)
                state, batch = buffer.sample(state, key_i)
                if by_priority(buffer.source.sampler):
                    # Priorities that do not depend on the weights, as an algorithm's do not.
                    priorities = jax.random.uniform(key_i, (buffer.source.batch_size,))
                    state = buffer.update_priorities(state, batch.sample_info, priorities)
                states = states | {name: states[name].replace(index=state.index)}
                total = total + sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(batch))
            return states, total

        return jax.lax.fori_loop(0, 10, body, (states, jnp.float32(0.0)))

    states = jax.jit(lambda: {name: buffer.init(rows, ()) for name, buffer in buffers.items()})()
    compiled = loop.lower(states, jax.random.key(0)).compile()
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    largest = max((math.prod(int(n) for n in size.split(",")) for size in sizes), default=0)
    assert largest < ENVS * SLOTS // 4, f"a copy of {largest} elements"
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.98 * memory.argument_size_in_bytes
