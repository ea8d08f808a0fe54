"""What is refused before anything is compiled or allocated, and what the messages say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers.streams import Fed, rows_of

from jaxrl.buffers import checks, memory, replay, signature
from jaxrl.errors import ConfigError
from jaxrl.sources import FrameStack, Prioritised, Replay, Sequence

GOOD = Replay(capacity=1000, batch_size=32, min_size=100)
ROWS = rows_of([[4, 4], [8], [8], [8]])


def problems(rollout=4, **changes):
    return checks.source_problems({"replay": dataclasses.replace(GOOD, **changes)}, 8, rollout, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 50}, "capacity=50 is less than min_size=100; raise it"),
        ({"capacity": 100, "n_step": 12}, "capacity=100 cannot hold items of 8 environments; use 160 at least"),
        ({"batch_size": 30}, "batch_size=30 does not divide over 4 shards; use a multiple of it"),
        ({"n_step": 0}, "n_step=0 must be at least 1"),
        ({"max_times_sampled": -1}, "max_times_sampled=-1"),
        ({"over": "nobody"}, "over='nobody' is not a source that stores rows; use one of []"),
        ({"sequence": Sequence(0)}, "length=0"),
        ({"sequence": Sequence(4, end="stop")}, "end='stop' must be one of"),
        ({"sequence": Sequence(4, period=6, stored_carry=True)}, "period=6 must be a multiple of the 4 rows"),
        ({"sequence": Sequence(4, end="write", stored_carry=True)}, "use end='continue', or rollout_length=1"),
        ({"sampler": Prioritised(normalise="most")}, "normalise='most'"),
        ({"frame_stack": FrameStack(0)}, "frames must be at least 1"),
        ({"frame_stack": FrameStack(4, fill="blue")}, "fill one of ('repeat', 'zeros')"),
    ],
)
def test_sources_that_cannot_be_served(changes, said):
    assert any(said in line for line in problems(**changes)), problems(**changes)


def test_sources_that_can():
    assert problems() == []
    assert problems(sequence=Sequence(8, 4, burn_in=4, stored_carry=True), frame_stack=FrameStack(4)) == []


def test_the_least_capacity_that_is_named_works():
    for changes in ({"n_step": 12}, {"sequence": Sequence(9)}, {"frame_stack": FrameStack(4)}):
        line = problems(capacity=100, **changes)[0] if problems(capacity=100, **changes) else ""
        if "use" in line:
            least = int(line.split("use ")[1].split()[0])
            assert problems(capacity=least, **changes) == []


def test_rows_that_do_not_fit_the_storage_are_named():
    fed = Fed({"replay": dataclasses.replace(GOOD, capacity=40)}, ROWS, rollout=4)
    wrong = ROWS.replace(observation=np.zeros((8, 4, 3), np.float32), action=ROWS.action.astype(np.float32))
    with pytest.raises(ConfigError) as error:
        fed.feed(wrong)
    assert error.value.problems == [
        "rows for replay source 'replay': action is float32[...]; expected int32[...]",
        "rows for replay source 'replay': observation is float32[..., 3]; expected float32[...]",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extras": ("log_prob",)}, "rows have no extras['log_prob']; act gives ['error']"),
        ({"sampler": Prioritised(insertion="error")}, "extras['error'] is int32[8, 4]; expected float32[8, 4]"),
        ({"frame_stack": FrameStack(3)}, "frame_stack=3 frames along axis -1: observation has shape ()"),
    ],
)
def test_what_a_source_asks_of_rows(changes, said):
    rows = ROWS.replace(extras={"error": np.zeros((8, 4), np.int32)})
    with pytest.raises(ConfigError) as error:
        replay.init({"replay": dataclasses.replace(GOOD, **changes)}, rows, (), num_envs=4, rollout=4, shards=1)
    assert said in str(error.value)


def test_signatures_name_what_is_missing_and_what_is_too_much():
    shape = jax.ShapeDtypeStruct
    expected = {"a": shape((2,), jnp.float32), "b": {"c": shape((), jnp.uint8)}}
    given = {"a": shape((3,), jnp.float32), "b": {"d": shape((), jnp.uint8)}}
    assert signature.problems(expected, given) == [
        "['a'] is float32[3]; expected float32[2]",
        "['b']['c'] is missing; expected uint8[]",
        "['b']['d'] is not expected; it is uint8[]",
    ]
    assert signature.problems(expected, expected) == []


def test_memory_is_asked_for_before_it_is_taken():
    source = dataclasses.replace(GOOD, capacity=10**9)
    rows = rows_of([[8]] * 4)
    shapes = jax.eval_shape(
        lambda: replay.init({"replay": source}, rows, (), num_envs=4, rollout=4, shards=1)  # 20-odd GB
    )
    with pytest.raises(ConfigError) as error:
        memory.check(shapes, {"replay": source}, devices=jax.devices()[:1], free={"host": 2**30, "device": None})
    message = str(error.value)
    assert "an asynchronous save's copy" in message and "1 GiB are free" in message
    fitting = int(message.split("capacity=")[1].split()[0])
    assert 0 < fitting < 10**8

    def fits(capacity, **changes):
        sources = {"replay": dataclasses.replace(source, capacity=capacity)}
        shapes = jax.eval_shape(lambda: replay.init(sources, rows, (), num_envs=4, rollout=4, shards=1))
        memory.check(shapes, sources, devices=jax.devices()[:1], free={"host": 2**30, "device": None}, **changes)

    fits(fitting)
    fits(int(fitting * 1.9), saved=False)
    with pytest.raises(ConfigError):
        fits(int(fitting * 1.2))
    with pytest.raises(ConfigError):
        fits(fitting, runs=2)


def test_free_memory_is_known_here():
    free = memory.free_on_host()
    assert free is None or 2**24 < free < 2**50
    assert memory.free_on_device(jax.devices()[0]) is None
