"""Adding to, sampling from and updating a replay buffer of a million rows, compared with flashbax's flat buffers.

    python benchmarks/replay.py [--capacity 1000000] [--add 64] [--batch 256] [--repeats 15] [--memory]

One compiled, donated loop per case: add 64 rows of 17 floats, sample 256 transitions and, if prioritized, compute
importance weights and set new priorities. Each library uses its own kind of random keys: `core/keys.py` for jaxrl,
JAX's for flashbax. Priorities do not depend on the weights, as in an algorithm; flashbax has an additional case where
they do, because XLA copies its tree in only one of the two cases. The buffer is full before timing starts. Prints
microseconds per iteration (the minimum of several alternations) and writes benchmarks/results/replay.json. Needs the
`flashbax` extra; without it, only jaxrl is measured.

With `--memory`, it compares jaxrl's buffer in host memory and in device memory instead (`storage`), and writes
benchmarks/results/replay-memory.json: the same transitions, sampled uniformly, and prioritized sequences as in R2D2: 64
sequences of 121 rows with observations of 400 bytes, and the initial state of an LSTM of 512 units; each iteration adds
40 rows of each of 64 environments.
"""

import argparse
import functools
import json
import os
import pathlib
import time

import _record
import jax
import jax.numpy as jnp

from jaxrl.buffers import replay
from jaxrl.core import keys
from jaxrl.core.sources import Prioritized, Replay, Sequence
from jaxrl.core.types import Trajectory
from jaxrl.parallel.replicas import SingleReplica

RESULTS = pathlib.Path(__file__).parent / "results"
OBSERVATION, ACTION, ALPHA, BETA = 17, 6, 0.6, 0.4


def ours(capacity: int, add: int, batch: int, prioritized: bool, shards: int, storage: str = "ring"):
    """Return a full buffer, and a function of it, a key and a number of iterations."""
    sampler = {"sampler": Prioritized(ALPHA, BETA)} if prioritized else {}
    source = Replay(capacity, batch, 1, storage=storage, **sampler)
    buffer = replay.bind(
        {"replay": source}, num_envs=add, rollout_length=1, shards=shards, replicas=SingleReplica(shards)
    )["replay"]
    flag, number = jnp.zeros((1, add), bool), jnp.zeros((1, add))
    rows = Trajectory(
        observation=jnp.ones((1, add, OBSERVATION)),
        action=jnp.zeros((1, add, ACTION)),
        reward=number,
        terminated=flag,
        truncated=flag,
        first=flag,
        weight=~flag,
    )

    def iteration(state, key):
        state, drawn = buffer.sample(buffer.add(state, rows, ()), key)
        used = jnp.sum(drawn.observation) + jnp.sum(drawn.next_observation) + jnp.sum(drawn.rewards)
        if prioritized:
            used = used + jnp.sum(drawn.sample_info.importance)
            priorities = jax.random.uniform(jax.random.fold_in(key, 1), (batch,))
            state = buffer.update_priorities(state, drawn.sample_info, priorities)
        return state, used

    return jax.jit(lambda: buffer.init(rows, ()))(), looped(iteration)


def sequences(capacity: int, add: int, storage: str):
    """Return the same for R2D2's sequences."""
    rollout, sequence = 40, Sequence(81, 40, "truncate", burn_in=40, stored_carry=True)
    source = Replay(capacity, 64, 1, sequence=sequence, sampler=Prioritized(0.9, 0.6), storage=storage)
    buffer = replay.bind({"replay": source}, num_envs=add, rollout_length=rollout, shards=1, replicas=SingleReplica(1))[
        "replay"
    ]
    shape = rollout, add
    flag, carry = jnp.zeros(shape, bool), (jnp.ones((add, 512)), jnp.ones((add, 512)))
    rows = Trajectory(jnp.ones((*shape, 10, 10, 4), bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape), *[flag] * 4)
    rows = rows.replace(weight=~flag)

    def iteration(state, key):
        state, drawn = buffer.sample(buffer.add(state, rows, carry), key)
        priorities = jax.random.uniform(jax.random.fold_in(key, 1), (source.batch_size,))
        used = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves((drawn.timesteps, drawn.carry)))
        return buffer.update_priorities(state, drawn.sample_info, priorities), used

    return jax.jit(lambda: buffer.init(rows, carry))(), looped(iteration)


def flashbax(capacity: int, add: int, batch: int, prioritized: bool, ordered: bool = False):
    """Return the same for flashbax; with `ordered`, new priorities depend on the weights."""
    import flashbax as fbx

    make = fbx.make_flat_buffer
    settings = {"max_length": capacity, "min_length": batch, "sample_batch_size": batch, "add_batch_size": add}
    if prioritized:
        make = fbx.make_prioritised_flat_buffer
        settings |= {"priority_exponent": ALPHA, "device": jax.default_backend()}
    buffer = make(**settings)
    row = {
        "observation": jnp.ones(OBSERVATION),
        "action": jnp.zeros(ACTION),
        "reward": jnp.float32(0),
        "terminated": jnp.bool_(False),
        "truncated": jnp.bool_(False),
    }
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (add, *x.shape)), row)

    def iteration(state, key):
        state = buffer.add(state, rows)
        drawn = buffer.sample(state, key)
        now, following = drawn.experience.first, drawn.experience.second
        used = jnp.sum(now["observation"]) + jnp.sum(following["observation"]) + jnp.sum(now["reward"])
        if prioritized:
            weight = (capacity * drawn.probabilities) ** -BETA
            weight = weight / jnp.max(weight)
            used = used + jnp.sum(weight)
            priorities = jax.random.uniform(jax.random.fold_in(key, 1), (batch,))
            if ordered:
                priorities = priorities * weight
            state = buffer.set_priorities(state, drawn.indices, priorities)
        return state, used

    return buffer.init(row), looped(iteration)


def looped(iteration):
    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state, key, count):
        def body(i, carried):
            state, used = iteration(carried[0], jax.random.fold_in(key, i))
            return state, carried[1] + used

        return jax.lax.fori_loop(0, count, body, (state, jnp.float32(0.0)))

    return loop


def by_library(arguments: argparse.Namespace):
    """Compare jaxrl with flashbax."""
    sizes = (arguments.capacity, arguments.add, arguments.batch)
    cases = {
        "ours, uniform": ours(*sizes, False, 1),
        "ours, prioritized": ours(*sizes, True, 1),
        "ours, prioritized, 8 shards": ours(*sizes, True, 8),
    }
    try:
        return cases | {
            "flashbax, uniform": flashbax(*sizes, False),
            "flashbax, prioritized": flashbax(*sizes, True),
            "flashbax, prioritized, priorities depend on weights": flashbax(*sizes, True, ordered=True),
        }
    except ImportError:
        print("flashbax is not installed (pip install 'jaxrl[flashbax]'): only jaxrl is measured")
        return cases


def by_memory(arguments: argparse.Namespace):
    """Compare jaxrl's buffer in host and device memory."""
    capacity, add = arguments.capacity, arguments.add
    places = {"device": "ring", "host": "host"}
    found = {f"transitions, {place}": ours(capacity, add, arguments.batch, False, 1, x) for place, x in places.items()}
    return found | {f"sequences, {place}": sequences(capacity, add, x) for place, x in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--add", type=int, default=64, help="rows added per iteration, one per environment")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=50, help="iterations per measurement")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="compare host memory with device memory")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    output = arguments.output or RESULTS / ("replay-memory.json" if arguments.memory else "replay.json")
    cases = by_memory(arguments) if arguments.memory else by_library(arguments)
    made = {name: jax.random.key if name.startswith("flashbax") else keys.root_key for name in cases}
    states, best = {}, dict.fromkeys(cases, float("inf"))
    for name, (state, loop) in cases.items():
        fill = arguments.capacity // (arguments.add * (40 if name.startswith("sequences") else 1)) + 1
        states[name] = jax.block_until_ready(loop(state, made[name](0), fill))[0]
    for number in range(arguments.repeats):
        # In turn, so that what else the machine does meets all of them.
        for name, (_, loop) in cases.items():
            key = jax.block_until_ready(made[name](number))
            start = time.perf_counter()
            result = loop(states[name], key, arguments.iterations)
            states[name] = jax.block_until_ready(result)[0]
            best[name] = min(best[name], (time.perf_counter() - start) / arguments.iterations * 1e6)
    for name, microseconds in best.items():
        print(f"{name:52} {microseconds:9.1f} us")
    found = {"microseconds": best}
    if "flashbax, prioritized" in best:
        found["flashbax / ours"] = {
            "prioritized": best["flashbax, prioritized"] / best["ours, prioritized"],
            "uniform": best["flashbax, uniform"] / best["ours, uniform"],
        }
        for name, ratio in found["flashbax / ours"].items():
            print(f"flashbax / ours, {name:35} {ratio:9.2f}")
    if arguments.memory:
        found["host / device"] = {
            kind: best[f"{kind}, host"] / best[f"{kind}, device"] for kind in ("transitions", "sequences")
        }
    machine = _record.machine() | {"load": os.getloadavg()[0]}
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine, **settings, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
