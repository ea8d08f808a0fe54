"""A pool of full rollouts: no group waits for another, none is learned from too late, and each is learned from once."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from algorithms import ALGORITHMS
from helpers.patience import PATIENCE, within
from helpers.pools import check_ends_while_groups_wait, rows_learned, watch_learning
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, all_finite, assert_equal, plain, ran, started
from helpers.refused import refused
from helpers.served import ServedFromHost
from helpers.spoiled import Spoiled
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.core import config
from jaxrl.core.errors import ConfigError, EnvironmentFailedError
from jaxrl.core.types import env_spec
from jaxrl.parallel.sebulba.collector import StepCollector
from jaxrl.parallel.sebulba.learning import HostLearning
from jaxrl.parallel.sebulba.selection import Selection, batches_at_hand

HOST = ServedFromHost(ENV)
LENGTH = 8
IMPALA = ALGORITHMS["impala"].resolve(env_spec(HOST), 4)

# --- which rollouts make a batch ---------------------------------------------------------------------------------


@given(
    groups=st.integers(1, 9),
    size=st.integers(1, 9),
    queue=st.integers(1, 3),
    slack=st.integers(0, 6),
    period=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_rollout_is_learned_from_too_late_and_nobody_waits_forever(groups, size, queue, slack, period, seed):
    """A simulation: groups collect at speeds of their own, on a clock that the next rollout to be full moves."""
    rng, size = np.random.default_rng(seed), min(size, groups)
    lag = batches_at_hand(size, groups, queue) + period + slack
    selection = Selection(size, groups, queue, period=period, max_lag=lag)
    seconds = rng.exponential(rng.choice([1.0, 30.0], groups))
    full, collecting, ends = [[] for _ in range(groups)], {}, np.full(groups, np.inf)
    version, now, lags = 0, 0.0, []
    while version < 60:
        for group in range(groups):
            if group not in collecting and len(full[group]) <= queue:
                collecting[group], ends[group] = version // period * period, now + seconds[group] * rng.random()
        batch = selection.choose(full, collecting, version)
        if not batch:
            group = int(np.argmin(ends))
            assert ends[group] < np.inf, "nobody collects, and nothing is learned from"
            now, ends[group] = ends[group], np.inf
            full[group].append(collecting.pop(group))
            continue
        assert len(batch) == size
        taken = [full[group].pop(0) for group in batch]
        assert taken == sorted(taken) and max(taken) <= min((left[0] for left in full if left), default=version)
        lags += [version - of for of in taken]
        version += 1
    assert max(lags) <= lag


def test_the_oldest_go_first_and_a_group_may_give_two():
    pool = Selection(3, 3, 1, max_lag=9)
    assert pool.choose([[4], [2, 3], [3]], {}, 5) == [1, 2, 1]
    assert pool.choose([[2, 2], [2, 2], [2]], {}, 5) == [0, 1, 2], "of one age first one of every group"
    assert pool.choose([[4], [], [3]], {1: 4}, 5) == [], "too few"
    assert pool.choose([[8], [8, 8], []], {2: 1}, 8) == [0, 1, 1]
    assert pool.choose([[9], [8, 8], []], {2: 1}, 9) == [], "two batches are at hand: it has to be full now"


def test_one_of_every_group_is_taken_once_all_are_full():
    every = Selection(3, 3, 1)
    assert every.choose([[0], [], [0, 1]], {1: 0}, 0) == []
    assert every.choose([[0], [0], [0, 1]], {}, 0) == [0, 1, 2]


# --- whole runs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class FirstIsSlow(Spoiled):
    """Environments of which those of the first group do `then` at a step."""

    def build(self, num_envs, seed, first_env=0):
        host = super().build(num_envs, seed, first_env)
        host.at = self.at if first_env == 0 else -1
        return host


@pytest.fixture
def free():
    """Set to let the environments go on that wait for it, at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow(free):
    """Environments of which those of the first group wait for `free` at their fifth step."""
    return FirstIsSlow(ENV, at=5, then=lambda host: free.wait(PATIENCE))


POOL = jaxrl.Sebulba(num_envs=NUM_ENVS, actors=4, learner_batch=4)


@pytest.mark.long
def test_a_group_that_hangs_holds_up_no_other(slow, free, monkeypatch):
    """The others are learned from while it is at its first steps; once it is there, it is learned from too."""
    learned = watch_learning(monkeypatch)
    with within(PATIENCE), started(POOL, IMPALA, slow) as (program, state):
        state, report = program.chunk(IMPALA, slow, state, 10, 100)
        assert not free.is_set() and int(state.steps_per_env) == 10 * LENGTH
        free.set()
        state, report = program.chunk(IMPALA, slow, state, 10, 100)
        assert report.actors["policy_lag_max"] >= 10, "the slow group's is the oldest, and is learned from"
        assert all_finite(plain(state.learner)) and int(state.learner.updates) == 20
    assert rows_learned(learned) == 20 * 4 * LENGTH


@pytest.mark.long
def test_an_error_ends_the_run_though_other_groups_fill_every_batch(monkeypatch):
    learned, learn = [], HostLearning.learn

    def learn_late(*arguments):
        learned.append(1)
        until = time.monotonic() + PATIENCE / 2
        while program.host._threads._error is None and time.monotonic() < until:
            time.sleep(1e-3)
        return learn(*arguments)

    def fail(host):
        raise ZeroDivisionError("in step 5")

    monkeypatch.setattr(HostLearning, "learn", learn_late)
    env = FirstIsSlow(ENV, at=5, then=fail)
    with within(PATIENCE), started(POOL, IMPALA, env) as (program, state):
        with pytest.raises(ZeroDivisionError, match="in step 5"):
            program.chunk(IMPALA, env, state, 100, 100)
    assert len(learned) <= 1


@pytest.mark.long
def test_a_group_that_hangs_for_too_long_is_named_though_others_fill_every_batch(slow, free):
    program = dataclasses.replace(POOL, max_lag=10**6, step_timeout=5.0).bind(IMPALA, slow)
    try:
        with within(PATIENCE), pytest.raises(EnvironmentFailedError, match="step_timeout is 5 s"):
            state = program.start(IMPALA, slow, 3)
            while True:
                state, _ = program.chunk(IMPALA, slow, state, 20, 10**9)
    finally:
        free.set()
        program.close()


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_each_rollout_is_normalized_as_it_was_acted(devices, slow, free):
    """Of parameters that never change, the statistics of each version alone do: every probability ratio is 1."""
    algo = PPO.replace(learning_rate=1e-30, normalize_observation=True)
    topology = dataclasses.replace(POOL, devices=devices, shards=2)
    mixed, divergence, until = False, [], time.monotonic() + PATIENCE / 2
    with started(topology, algo, slow) as (program, state):
        while not mixed and time.monotonic() < until:
            state, report = program.chunk(algo, slow, state, 1, 10**6)
            mixed = report.actors["policy_lag"] < report.actors["policy_lag_max"] and len(divergence) > 3
            divergence.append(float(report.metrics()["update/approximate_kl"]))
            if len(divergence) == 3:
                free.set()  # its rollout is of the first version, the others are not
        free.set()
    assert mixed and max(map(abs, divergence)) < 1e-6, divergence


@pytest.mark.long
def test_it_learns_and_resumes_with_other_random_numbers(tmp_path, monkeypatch):
    began_at, begin_at = [], StepCollector.begin_at
    monkeypatch.setattr(StepCollector, "begin_at", lambda self, steps: began_at.append(steps) or begin_at(self, steps))
    settings = {"topology": POOL, "progress": False, "evaluate_every": 0, "evaluation_episodes": 4}
    settings |= {"run_dir": tmp_path / "run"}
    first = jaxrl.train(IMPALA, HOST, total_steps=4 * ROWS, **settings)
    assert first.total_steps == 4 * ROWS and int(first.state.steps_per_env) * 4 == 4 * ROWS
    with pytest.warns(RuntimeWarning, match=f"resumed at step {4 * ROWS}; {NUM_ENVS} host environments start new"):
        again = jaxrl.train(IMPALA, HOST, total_steps=6 * ROWS, **settings)
    most = int(first.state.steps_per_env) * 2  # of one group that would have been in every batch twice
    assert began_at == [0] * 4 + [most] * 4
    assert int(again.state.learner.updates) == 12 and {"actors/policy_lag_max"} <= set(again.metrics[-2])


@pytest.mark.long
@pytest.mark.parametrize("name", ["recurrent_ppo", "impala"])
def test_a_pool_of_one_group_takes_what_a_round_takes(name):
    algo = ALGORITHMS[name].resolve(env_spec(HOST), 4)
    found = []
    for topology in ({"lockstep": True}, {"learner_batch": NUM_ENVS}):
        state, report = ran(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology), algo, HOST, 1)
        found.append((state, report.replace(actors={})))
    assert_equal(*found)


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("ready", [None, 1])
def test_it_ends_while_groups_wait_for_room(ready, interrupted, monkeypatch):
    """Also where the environments of a group that are ready first act first."""
    env = HOST
    if ready is not None:
        pytest.importorskip("envpool")
        env = jaxrl.make("envpool:CartPole-v1")
    check_ends_while_groups_wait(env, monkeypatch, interrupted=interrupted, actors=4, ready=ready)


def test_recording_is_refused(tmp_path):
    refused(lambda: jaxrl.train(IMPALA, HOST, total_steps=ROWS, topology=POOL, record=tmp_path / "data"), "record")


def test_a_run_of_before_is_read_where_a_field_that_is_gone_was_not_set():
    written = config.encode(jaxrl.Sebulba(num_envs=8))
    assert config.decode(written | {"batching": None}) == jaxrl.Sebulba(num_envs=8)
    with pytest.raises(ConfigError, match="no field batching"):
        config.decode(written | {"batching": 4})
