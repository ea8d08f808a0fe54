"""In a compiled, donated loop nothing as large as the replay is copied: neither the rows nor what an index keeps."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.buffers import replay
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.sources import FrameStack, Prioritised, Replay, Sequence, Uniform
from jaxrl.types import Trajectory

ENVS, SLOTS = 8, 4096
SOURCES = {
    "uniform": {"replay": Replay(ENVS * SLOTS, 32, 1, n_step=2)},
    "uniform_stacks": {"replay": Replay(ENVS * SLOTS, 32, 1, frame_stack=FrameStack(3))},
    "prioritised": {"replay": Replay(ENVS * SLOTS, 32, 1, n_step=2, sampler=Prioritised())},
    "sequences": {"replay": Replay(ENVS * SLOTS, 32, 1, sequence=Sequence(6, 3, "truncate"), sampler=Prioritised())},
    "two_views": {
        "replay": Replay(ENVS * SLOTS, 32, 1, sampler=Prioritised()),
        "other": Replay(ENVS * SLOTS, 32, 1, sequence=Sequence(4), sampler=Uniform(), over="replay"),
    },
}


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_large_is_copied(name):
    sources, replicas, rollout = SOURCES[name], SingleReplica(2), 4
    zeros = functools.partial(jnp.zeros, (rollout, ENVS))
    flags = [zeros(dtype=bool)] * 4
    rows = Trajectory(jnp.zeros((rollout, ENVS, 3)), zeros(dtype=jnp.int32), zeros(dtype=jnp.float32), *flags)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(states, key):
        def body(i, carried):
            states, total = carried
            states = replay.add(states, sources, rows, (), replicas)
            for name, source in sources.items():
                ring, stored = states[source.over or name].ring, replay.storage(sources, name)
                key_i = jax.random.fold_in(key, i)
                index, batch = replay.sample(ring, states[name].index, source, stored, key_i, replicas)
                if isinstance(source.sampler, Prioritised):
                    # Priorities that do not depend on the weights, as an algorithm's do not.
                    priorities = jax.random.uniform(key_i, (source.batch_size,))
                    index = replay.update_priorities(ring, index, source, batch.drawn, priorities)
                states = states | {name: states[name].replace(index=index)}
                total = total + sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(batch))
            return states, total

        return jax.lax.fori_loop(0, 10, body, (states, jnp.float32(0.0)))

    states = jax.eval_shape(lambda: replay.init(sources, rows, (), num_envs=ENVS, rollout=rollout, shards=2))
    compiled = loop.lower(states, jax.random.key(0)).compile()
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    largest = max((math.prod(int(n) for n in size.split(",")) for size in sizes), default=0)
    assert largest < ENVS * SLOTS // 4, f"a copy of {largest} elements"
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.98 * memory.argument_size_in_bytes
