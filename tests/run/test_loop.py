"""The loop: how long its chunks are in several processes, and what a run that goes on holds at once."""

import gc

import jax
import numpy as np
import pytest
from helpers import programs
from helpers.patience import Clock
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, ROWS
from helpers.served import ServedFromHost

import jaxrl
from jaxrl.parallel.multihost import distributed
from jaxrl.parallel.program import Program
from jaxrl.run.directory.checkpoint import Checkpointer
from jaxrl.run.loop import evaluating, journal, run_loop, timing
from jaxrl.run.policies.evaluation import Evaluation


def live_bytes():
    """Of all arrays on devices."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def train(folder):
    algo = DQN.replace(capacity=NUM_ENVS * 8192)
    return programs.train(folder, algo=algo, total_steps=3 * ROWS, evaluate_every=0, evaluation_episodes=4)


@pytest.mark.long
def test_a_run_that_goes_on_never_holds_two_replays(tmp_path, monkeypatch):
    buffers = train(tmp_path / "run").state.buffers
    replay = sum(x.nbytes for x in jax.tree.leaves(buffers))
    del buffers
    before, held, restore = live_bytes(), [], Checkpointer.restore

    def measured(self, template):
        held.append(live_bytes() - before)
        restored = restore(self, template)
        held.append(live_bytes() - before)
        return restored

    monkeypatch.setattr(Checkpointer, "restore", measured)
    train(tmp_path / "run")
    at_first, at_last = held
    assert replay > 1e6 and at_first < 0.2 * replay, "only shapes are made before"
    assert 0.9 * replay < at_last < 1.2 * replay


@pytest.fixture
def clocked(monkeypatch):
    """A function that has the laps of runs read a clock, and chunks dispatched once that has been read."""

    def use(clock, then=lambda length: None):
        ended, chunk = [], Program.chunk

        class Watched(run_loop.BackgroundTask):
            def __init__(self, work, name="background"):
                super().__init__(work, name)
                ended.extend([self] if name == "report" else [])

        def dispatched(self, algo, env, state, length, *others):
            for one in ended:
                one.wait()  # the thread has looked at the clock
            then(length if ended else None)
            return chunk(self, algo, env, state, length, *others)

        monkeypatch.setattr(Program, "chunk", dispatched)
        monkeypatch.setattr(run_loop, "BackgroundTask", Watched)
        monkeypatch.setattr(journal, "Laps", lambda: timing.Laps(clock))
        monkeypatch.setattr(run_loop, "_CHUNK_SECONDS", 4.0)

    return use


def test_a_chunk_has_its_own_time_where_dispatching_it_waits(clocked, monkeypatch):
    """As on a GPU, where a loop of unknown length holds its dispatch, and with actors on the host: one second each.

    The report of a chunk is read when the next one was dispatched, so when that has ended too.
    """
    clock = Clock()

    def dispatched(length):
        clock.now += length or 30.0  # the first one compiles

    def evaluated(*arguments, **settings):
        clock.now += 7.0
        return Evaluation(np.ones(1, np.float32), np.ones(1, np.int32), 0)

    clocked(clock, dispatched)
    monkeypatch.setattr(evaluating, "evaluate", evaluated)
    result = programs.train(total_steps=32 * ROWS, evaluate_every=12 * ROWS, evaluation_episodes=4)
    rows = [row for row in result.metrics if "steps_per_second" in row]
    assert len(rows) > 8 and all(row["steps_per_second"] == ROWS for row in rows), rows
    assert result.steps_per_second == ROWS
    assert [result.seconds[part] for part in ("train", "evaluate")] == [32.0, 3 * 7.0]
    assert result.seconds["compile"] + result.seconds["start"] == 29.0 and result.wall_seconds == 30.0 + 31.0 + 21.0
    for row in rows:
        evaluations = (row["step"] - 1) // (12 * ROWS)  # before this chunk
        assert row["seconds"] == 30.0 + (row["step"] // ROWS - 1) + 7.0 * evaluations


class Clocked(ServedFromHost):
    """Environments whose steps move a clock, by an eighth of a second each."""

    clock = Clock()

    def build(self, num_envs, seed, first_env=0):
        host = super().build(num_envs, seed, first_env)
        step = host.step

        def move(actions):
            self.clock.now += 1 / 8
            return step(actions)

        host.step = move
        return host


@pytest.mark.long
@pytest.mark.parametrize("algo", [PPO, DQN], ids=["ppo", "dqn"])
def test_rates_of_actors_on_the_host_are_those_of_a_clock(algo, clocked):
    """An audit found 718,464 steps/s shown for 1,659: a chunk that collects had the time of the next one."""
    env = Clocked(ENV)
    clocked(env.clock)
    settings = {"topology": jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True), "evaluation_episodes": 1}
    result = programs.train(algo=algo, env=env, eval_env=ENV, total_steps=24 * ROWS, evaluate_every=0, **settings)
    rows = [row for row in result.metrics if "steps_per_second" in row]
    assert len(rows) > 4 and all(row["steps_per_second"] == ROWS for row in rows), rows
    for row, before in zip(rows[1:], rows, strict=False):
        seconds = (row["step"] - before["step"]) / ROWS
        assert row["updates_per_second"] == pytest.approx(row["train/updates"] / seconds)


def test_chunks_are_as_long_as_the_first_process_has_measured(monkeypatch):
    """Also after an evaluation; else processes whose clocks differ would run different programs at once."""
    lengths, chunk = [], Program.chunk

    def with_a_slow_leader(what, value):
        if what != "signals":
            return [value]
        asked, seconds = value
        slow = [*seconds[:-1], 60.0] if isinstance(seconds, list | tuple) else 60.0
        return [[0, slow], [asked, seconds]]

    def measured(self, algo, env, state, length, *others):
        lengths.append(length)
        return chunk(self, algo, env, state, length, *others)

    monkeypatch.setattr(distributed, "exchange", with_a_slow_leader)
    monkeypatch.setattr(Program, "chunk", measured)
    programs.train(total_steps=32 * ROWS, evaluate_every=8 * ROWS, evaluation_episodes=4)
    assert lengths == [1] * 32
