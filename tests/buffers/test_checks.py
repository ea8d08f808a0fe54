"""What is refused before anything is compiled or allocated, and what the messages say."""

import dataclasses

import numpy as np
import pytest
from helpers.streams import Fed, rows_of

from jaxrl.buffers import checks, replay
from jaxrl.core.errors import ConfigError
from jaxrl.core.sources import FrameStack, Prioritized, Replay, Sequence
from jaxrl.parallel.replicas import SingleReplica

GOOD = Replay(capacity=1000, batch_size=32, min_size=100)
ROWS = rows_of([[4, 4], [8], [8], [8]])


def problems(rollout=4, **changes):
    return checks.source_problems({"replay": dataclasses.replace(GOOD, **changes)}, 8, rollout, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 50}, "capacity=50 must be at least min_size=100"),
        ({"capacity": 100, "n_step": 12}, "capacity=100 is too small for items of 8 environments; use at least 160"),
        ({"batch_size": 30}, "batch_size=30 is not divisible by 4 shards; use a multiple"),
        ({"n_step": 0}, "n_step=0 must be a whole number of at least 1"),
        ({"max_times_sampled": -1}, "max_times_sampled=-1"),
        ({"over": "nobody"}, "over='nobody' is not a source that stores rows; use one of []"),
        ({"sequence": Sequence(0)}, "length=0"),
        ({"sequence": Sequence(4, end="stop")}, "end='stop' must be one of"),
        ({"sequence": Sequence(4, period=6, stored_carry=True)}, "period=6 must be a multiple of the 4 rows"),
        ({"sequence": Sequence(4, end="write", stored_carry=True)}, "use end='continue' or 'truncate', or rollout_"),
        ({"sequence": Sequence(4, 8, "truncate", stored_carry=True)}, "period=8 must be the 4 rows between two stored"),
        ({"sampler": Prioritized(normalize="most")}, "normalize='most'"),
        ({"frame_stack": FrameStack(0)}, "frame_stack.frames=0 must be a whole number of at least 1"),
        ({"frame_stack": FrameStack(4, fill="blue")}, "fill='blue' must be one of ('repeat', 'zeros')"),
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
            least = int(line.split("use ")[1].removeprefix("at least ").split()[0])
            assert problems(capacity=least, **changes) == []


def bound(source):
    replicas = SingleReplica()
    return replay.bind({"replay": source}, num_envs=4, rollout_length=4, shards=1, replicas=replicas)["replay"]


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
        ({"extras": ("log_prob",)}, "rows have no extras['log_prob']; act returns ['error']"),
        ({"sampler": Prioritized(insertion="error")}, "extras['error'] is int32[8, 4]; expected float32[8, 4]"),
        ({"frame_stack": FrameStack(3)}, "frame_stack=3 frames along axis -1: observation has shape ()"),
    ],
)
def test_what_a_source_asks_of_rows(changes, said):
    rows = ROWS.replace(extras={"error": np.zeros((8, 4), np.int32)})
    with pytest.raises(ConfigError) as error:
        bound(dataclasses.replace(GOOD, **changes)).init(rows, ())
    assert said in str(error.value)
