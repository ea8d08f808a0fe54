"""A learner that draws while actors insert: the balance stays within its tolerance, whatever the sides' schedules."""

from math import ceil, floor

import jax
import numpy as np
import pytest
from helpers.programs import DQN, ENV, NUM_ENVS, PPO, all_finite, started
from helpers.refused import refused
from helpers.served import ServedFromHost
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxrl
from jaxrl.parallel.sebulba import rate_limit
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.rate_limit import Counts, RateLimit

HOST = ServedFromHost(ENV)
ROUND = 8 * NUM_ENVS  # environment steps
ALGO = DQN.replace(replay_ratio=5 / ROUND, capacity=64 * ROUND)  # 5 updates of 32 transitions a round
UPDATE = ALGO.batch_size


def topology(error_buffer, **fields):
    return jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, error_buffer=error_buffer, **fields)


def after_move(limit, counts, is_update):
    return counts.updated() if is_update else counts.stored(limit.steps)


@pytest.mark.parametrize(
    ("tolerance", "inserted", "updates", "ready", "moves"),
    [
        (1, 0, 0, "++++++++", "iiisisis"),  # two rounds until there is enough, one ahead, then each in turn
        (1, 0, 0, "--------", "iisisisi"),
        (2, 0, 0, "++++++++", "iiiisisi"),
        (2, 0, 0, "--------", "iissisis"),
        (2, 0, 0, "--++-+--", "iiiisiss"),  # who was behind catches up
        (2, 8, 4, "+-------", "isisisis"),  # updates were ahead, as far as they may be
    ],
)
def test_exact_moves(tolerance, inserted, updates, ready, moves):
    """An update for every two steps once there are four; i stores a round of two, s updates, + is a round there.

    Of rounds that are there as many are stored as the tolerance lets in; without one, updates go as far ahead.
    """
    limit, counts, made = RateLimit(0.5, 4, 2, tolerance), Counts(inserted, updates), ""
    for there in ready:
        is_update = limit.is_update_next(counts, is_round_ready=there == "+")
        counts, made = after_move(limit, counts, is_update), made + "is"[is_update]
    assert made == moves
    assert counts == (inserted + 2 * made.count("i"), updates + made.count("s"))


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    ratio=st.fractions(min_value="1/64", max_value=3, max_denominator=64),
    steps=st.integers(1, 64),
    min_size=st.integers(1, 300),
    slack=st.floats(0, 8),
    inserted=st.integers(0, 400),
    ready=st.lists(st.booleans(), min_size=1, max_size=120),
)
def test_the_balance_stays_within_the_tolerance_on_every_schedule(ratio, steps, min_size, slack, inserted, ready):
    """`ready` says of every decision whether a round of rollouts is there: slow actors, slow learners, and any mix."""
    ratio = float(ratio)
    tolerance = max(1.0, ratio * steps) + slack
    limit = RateLimit(ratio, min_size, steps, tolerance)
    assert limit.tolerance >= limit.least_tolerance
    # Begun anew, or gone on with at a balance that such a run may have.
    inserted = inserted // steps * steps
    updates = max(0, round(ratio * (inserted - min_size)))
    assume(abs(ratio * (inserted - min_size) - updates) <= tolerance or inserted <= min_size)
    counts = Counts(inserted, updates)
    for there in ready:
        is_update = limit.is_update_next(counts, is_round_ready=there)
        counts, before = after_move(limit, counts, is_update), inserted
        if is_update:
            assert inserted >= min_size, "an update before there is enough"
            updates += 1
        else:
            inserted += steps
        balance = ratio * (inserted - min_size) - updates
        if inserted > min_size:
            assert -tolerance - 2e-6 <= balance
        if before >= min_size:
            assert balance <= tolerance + 2e-6
        if is_update:  # the side that is not ahead goes first, if it can
            assert not there or ratio * (inserted + steps - min_size) - updates + 1 > tolerance - 2e-6
    assert counts == (inserted, updates)
    # Both sides always there: after a while the ratio is kept.
    start = inserted, updates
    for _ in range(400):
        counts = after_move(limit, counts, limit.is_update_next(counts, is_round_ready=True))
    if start[0] >= min_size:
        assert abs(ratio * (counts.inserted - start[0]) - (counts.updates - start[1])) <= 2 * tolerance + 2e-6


def after(topology, iterations, state=None):
    """The state after so many rounds, in chunks of three, and the reports; `state` to go on from."""
    reports = []
    with started(topology, ALGO, HOST, 0) as (program, fresh):
        state = fresh if state is None else state.replace(timestep=fresh.timestep, carry=fresh.carry)
        for _ in range(0, iterations, 3):
            state, report = program.chunk(ALGO, HOST, state, 3, 10**6)
            reports.append(report)
        return jax.device_get((state, reports))


@pytest.mark.long
@pytest.mark.parametrize("fields", [{}, {"actors": 2}, {"devices": 2, "groups": 2}])
def test_a_run_keeps_the_ratio_within_the_tolerance_and_goes_on_where_it_was(fields):
    buffer = 6 * UPDATE
    there = topology(buffer, **fields)
    state, reports = after(there, 12)
    size = rate_limit.rate_limit(there.bind(ALGO, HOST).layout.experience(ALGO), buffer).min_size

    def balance(state):
        index = state.buffers["replay"].index
        assert int(index.inserted) == int(state.steps_per_env) * NUM_ENVS
        updates = int(state.learner.updates)
        assert int(index.sampled) == updates * UPDATE
        return ALGO.replay_ratio * (int(index.inserted) - size) - updates

    assert int(state.steps_per_env) == 12 * 8 and abs(balance(state)) <= 6
    metrics = [report.metrics() for report in reports]
    assert sum(row["train/updates"] for row in metrics) == int(state.learner.updates) > 30
    assert all(report.failed_at == -1 for report in reports) and all_finite(state.learner)
    reached = metrics[-1]["actors/replay_ratio"]
    assert reached == pytest.approx(int(state.learner.updates) / (12 * ROUND - size))
    assert abs(reached - ALGO.replay_ratio) <= 6 / (12 * ROUND - size)
    assert metrics[-1]["actors/policy_lag"] >= 0 and np.isfinite(metrics[-1]["update/loss"])
    assert sum(report.episodes.count for report in reports) > 20
    # The counters are those of the state: a run that goes on keeps to the balance that it had.
    state, _ = after(there, 6, state=state)
    assert int(state.steps_per_env) == 18 * 8 and abs(balance(state)) <= 6


@pytest.mark.long
def test_what_is_recorded_names_the_iterations_behind_the_policy_that_acted():
    """And not the versions that were published, of which there is one after every update."""
    with started(topology(8 * UPDATE), ALGO, HOST) as (program, state):
        recorded = program.layout.recorded(ALGO, 1)
        _, report, fetch = program.recorded_chunk(ALGO, HOST, state, 6, 10**6, recorded=recorded)
        _, versions = fetch()
    of_rounds = np.asarray(versions).reshape(6, 8)
    assert (of_rounds == of_rounds[:, :1]).all() and report.metrics()["train/updates"] > 6
    assert (of_rounds[:, 0] <= np.arange(6)).all() and (np.diff(of_rounds[:, 0]) >= 0).all()


@pytest.mark.long
@pytest.mark.parametrize("ready", [False, True])
def test_whoever_is_ahead_waits(ready, monkeypatch):
    """Actors that are never there before they are waited for, and actors that always are."""
    monkeypatch.setattr(ActorThreads, "is_round_ready", lambda *_: ready)
    state, _ = after(topology(8 * UPDATE), 9)
    updates, inserted = int(state.learner.updates), int(state.steps_per_env) * NUM_ENVS
    if ready:  # all are stored that the upper bound allows, and no update is made that need not be
        assert updates == ceil(ALGO.replay_ratio * (inserted - ALGO.min_size) - 8) > 0
    else:  # before the last round, every update is made that the lower bound allows
        assert updates == floor(ALGO.replay_ratio * (inserted - ROUND - ALGO.min_size) + 8)


@pytest.mark.parametrize(
    ("algo", "fields", "said"),
    [
        (ALGO, {"error_buffer": 3 * UPDATE}, "at least 160, the transitions sampled by the 5 updates"),
        (ALGO, {"error_buffer": 320.0, "lockstep": True}, "error_buffer=320.0 cannot be used with lockstep"),
        (ALGO, {"error_buffer": 320.0, "lag": 1}, "error_buffer=320.0 cannot be used with lockstep"),
        (PPO, {"error_buffer": 320.0, "lockstep": False}, "error_buffer=320.0"),
    ],
)
def test_what_cannot_be_kept_is_refused(algo, fields, said):
    refused(lambda: jaxrl.Sebulba(num_envs=NUM_ENVS, **fields).bind(algo, HOST), said)
