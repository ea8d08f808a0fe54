"""Where the time goes: every second in one part, and told in the sessions of a run that is resumed."""

import pytest
from helpers.patience import Clock

from jaxrl.cli.run_summary import report
from jaxrl.run.loop import timing
from jaxrl.run.loop.timing import ChunkTimes, Laps, described


def test_every_second_is_in_one_part():
    clock = Clock()
    laps = Laps(clock)
    for part, seconds in (("compile", 4.0), ("train", 2.0), ("evaluate", 1.0), ("train", 3.0), ("save", 0.5)):
        clock.now += seconds
        assert laps.lap(part) == seconds
    assert laps.wall == sum(laps.seconds.values()) == 10.5
    laps.move(1.5, "compile", "train")
    laps.move(9.0, "save", "train")  # no more than it has
    assert laps.seconds["compile"] == 2.5 and laps.seconds["train"] == 7.0 and laps.seconds["save"] == 0.0
    assert described(laps.seconds) == "compile 2.5, train 7.0, evaluate 1.0"


def test_a_lap_may_have_ended_before_it_is_written_down():
    clock = Clock()
    laps = Laps(clock)
    clock.now += 5.0
    assert laps.lap("train", until=clock.now - 2.0) == 3.0
    assert laps.lap("train", until=clock.now - 4.0) == 0.0, "no second is counted twice"
    assert laps.lap("save") == 2.0 and laps.session_seconds == laps.wall == 5.0


def test_no_speed_counts_what_actors_collected_while_a_program_compiled():
    clock = Clock()
    times, seconds = ChunkTimes(Laps(clock)), []
    for actors in ({"batches_at_hand": 1.5}, {}, {}, {}, {"compiled": 1.0, "batches_at_hand": 1.0}, {}, {}):
        clock.now += 2.0
        seconds.append(times.add(1, clock.now, actors))
    assert seconds == [None, None, None, 2.0, None, None, 2.0]


def test_programs_from_the_cache_are_told_apart():
    assert described({"start": 6.8, "train": 3.0}) == "start 6.8 (programs loaded from the cache), train 3.0"


def test_what_a_command_imports_is_counted_once():
    timing.command_begins()
    assert Laps().seconds["import"] > 0.0
    assert Laps().seconds["import"] == 0.0


RECORD = {
    "evaluation": {},
    "stopped": "finished",
    "problem": None,
    "total_steps": 500_000,
    "steps_per_second": 150_000.0,
    "wall_seconds": 10.0,
    "seconds": {"import": 3.0, "compile": 5.0, "train": 4.0, "save": 0.01},
    "session_steps": 500_000,
    "run_steps_per_second": 50_000.0,
    "total_seconds": 10.0,
}
SPEED = "speed: 150,000 steps/s while training, 50,000 including start-up and evaluation"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, [" in 10 s", SPEED, "seconds: import 3.0, compile 5.0, train 4.0"]),
        (
            {"session_steps": 200_000, "total_seconds": 40.0},
            [" in 40 s; since resuming, 200,000 steps in 10 s", SPEED],
        ),
        ({"session_steps": 0, "total_seconds": 40.0, "steps_per_second": 0.0}, [" in 40 s", "seconds: import"]),
    ],
    ids=["at once", "resumed", "had ended"],
)
def test_the_report_tells_both_speeds_and_both_totals(changed, lines):
    said = report(RECORD | changed, "PPO", "gymnax:CartPole-v1", None)
    assert said[0] == f"PPO on gymnax:CartPole-v1: 500,000 steps{lines[0]}"
    for line, expected in zip(said[1:], lines[1:], strict=False):
        assert line.startswith(expected)


def test_a_result_of_an_earlier_jaxrl_is_told_too():
    old = {name: RECORD[name] for name in list(RECORD)[:6]}
    assert report(old, "PPO", "e", None) == ["PPO on e: 500,000 steps in 10 s", "speed: 150,000 steps/s while training"]
