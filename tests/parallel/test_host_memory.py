"""Replays in the host's memory: the same run, bit for bit, and nothing large on the devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from algorithms import ALGORITHMS, BOX
from helpers import programs
from helpers.programs import ENV, NUM_ENVS, anakin, assert_equal, started
from helpers.served import ServedFromHost
from helpers.streams import rows_of
from helpers.tpu_compiler import tpu_compiler  # noqa: F401

import jaxrl
from jaxrl.buffers import replay
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import FrameStack, Lifo, Prioritized, Replay, Sequence, View
from jaxrl.parallel import memory, targets
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.parallel.targets import Target

SERVED = ServedFromHost(ENV)
SAC = ALGORITHMS["sac"]
LOCKSTEP = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True)
RUNS = {
    "sac": (SAC, BOX, anakin()),
    "sac on four devices": (SAC.replace(view=View(4, Lifo(), max_times_sampled=1)), BOX, anakin(4)),
    "r2d2": (programs.R2D2, ENV, anakin()),
    "r2d2 on four devices": (programs.R2D2, ENV, anakin(4)),
    "r2d2 of host environments": (programs.R2D2, SERVED, LOCKSTEP),
}


def after(name, place, chunks=3):
    """The state of a run after some chunks, of which the replay wraps."""
    algo, env, topology = RUNS[name]
    algo = algo.replace(storage=place)
    with started(topology, algo, env) as (program, state):
        for _ in range(chunks):
            assert_lies(state, place)
            state, _ = program.chunk(algo, env, state, 40 if algo.rollout_length is None else 4, 10**4)
        assert int(state.learner.updates) > 5 and int(state.buffers["replay"].ring.filled) == 32
        assert_lies(state, place)
        return state


def assert_lies(state, place):
    ring = state.buffers["replay"].ring
    large = jax.tree.leaves((ring.rows.observation, ring.carry))
    kinds = {x.sharding.memory_kind for x in large}
    assert kinds == {"pinned_host" if place == "host" else "device"}
    rest = [x for x in jax.tree.leaves(state) if not any(x is y for y in large)]
    assert {x.sharding.memory_kind for x in rest} == {"device"}


@pytest.mark.long
@pytest.mark.exact
@pytest.mark.parametrize("name", RUNS)
def test_the_memory_does_not_change_the_run(name):
    assert_equal(after(name, "ring"), after(name, "host"))


@pytest.mark.parametrize("sequence", [None, Sequence(3, period=2, end="truncate")])
def test_stacks_are_made_of_frames_on_the_host(sequence):
    rows, found = rows_of([[5, 7, 4], [9, 3, 4]], ("terminated", "truncated")), {}
    frames = [rows.observation]
    for _ in range(2):
        frames.append(jnp.where(rows.first, frames[-1], jnp.roll(frames[-1], 1, axis=0)))
    rows = rows.replace(observation=jnp.stack(frames[::-1], axis=-1))
    for place in ("ring", "host"):
        source = Replay(24, 8, 1, sequence=sequence, sampler=Prioritized(), frame_stack=FrameStack(3), storage=place)
        buffers = replay.bind({"replay": source}, num_envs=2, rollout_length=4, shards=1, replicas=SingleReplica())
        buffer = buffers["replay"]
        state, add = buffer.init(rows, ()), jax.jit(lambda state, rows: buffer.add(state, rows, ()))  # noqa: B023
        for start in range(0, 16, 4):
            state = add(state, jax.tree.map(lambda x: x[start : start + 4], rows))  # noqa: B023
        assert state.ring.rows.observation.sharding.memory_kind == ("pinned_host" if place == "host" else "device")
        found[place] = jax.jit(buffer.sample)(state, jax.random.key(1))[1]
    assert jnp.ptp(found["host"].sample_info.step.astype(jnp.int32)) > 0
    assert_equal(found["ring"], found["host"])


# --- what is refused, and what is counted ----------------------------------------------------------------------------


def test_it_is_counted_on_the_host(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", process_index=0)
    source = Replay(10**6, 8, 8, storage="host")
    rows = rows_of([[8]] * 4)
    rows = rows.replace(observation=jnp.zeros((8, 4, 100)))
    program = anakin().bind(SAC.replace(storage="host"), BOX)
    sharding = program.layout.shardings(SAC.replace(storage="host")).buffers["replay"].ring.rows.observation
    bound = replay.bind({"replay": source}, num_envs=4, rollout_length=4, shards=1, replicas=SingleReplica())["replay"]
    shapes = jax.eval_shape(lambda: bound.init(rows, ()))
    observation = jax.ShapeDtypeStruct(shapes.ring.rows.observation.shape, jnp.float32, sharding=sharding)
    state = shapes.replace(ring=shapes.ring.replace(rows=shapes.ring.rows.replace(observation=observation)))

    def check(state, host, device, **how):
        monkeypatch.setattr(memory, "free_on_host", lambda: host)
        monkeypatch.setattr(memory, "free_on_device", lambda gpu: device)
        algo, run = SimpleNamespace(experience={"replay": source}), SimpleNamespace(buffers={"replay": state})
        memory.check_run(algo, run, [gpu], **how)

    check(state, 2**29, 2**26, saved=False)  # 400 MB of observations there, and what is left here
    check(state, 2**30, 2**26)
    with pytest.raises(ConfigError, match=r"3\d\d MiB .*'host'"):
        check(shapes, 2**30, 2**26, saved=False)
    with pytest.raises(ConfigError, match="needs 381 MiB of the host"):
        check(state, 2**28, 2**26, saved=False)
    with pytest.raises(ConfigError, match="need 7.. MiB of the host"):
        check(state, 2**29, 2**26)
    with pytest.raises(ConfigError, match=r"use at most [^;]*$"):
        check(state, 2**30, 2**20)  # which holds nothing more that could lie elsewhere


def test_runs_of_one_program_are_refused(monkeypatch):
    algo = programs.DQN.replace(storage="host")
    with pytest.raises(ConfigError, match="storage='host': .*train"):
        jaxrl.sweep(algo, ENV, seeds=2, **programs.SWEEP)
    card = Target("h100", (SimpleNamespace(platform="gpu"),), 2**36)
    monkeypatch.setattr(targets, "get", lambda name: card)
    with pytest.raises(ConfigError, match="host memory of h100"):
        jaxrl.compile_for("h100", algo, ENV)


@pytest.mark.long
def test_compiled_for_a_tpu_it_is_no_argument_of_the_device(tpu_compiler):  # noqa: F811
    algo = programs.DQN.replace(capacity=100_000)
    chunks = {
        place: jaxrl.compile_for("v5e:2x2", algo.replace(storage=place), ENV, num_envs=8, devices=1).programs[1]
        for place in ("ring", "host")
    }
    saved = chunks["ring"].argument_bytes - chunks["host"].argument_bytes
    assert saved >= 100_000 * 4 * 4, "the observations"
