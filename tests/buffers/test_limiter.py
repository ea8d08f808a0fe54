"""Rate limiters: exact sequences of allowing and blocking, in compiled state and between threads."""

import threading
import time

import jax
import pytest

from jaxrl.buffers import limiter
from jaxrl.core.errors import ConfigError


class Compiled:
    """`HostLimiter`'s questions, asked of a `LimiterState`."""

    def __init__(self, limits):
        self.state = limiter.limiter(limits)

    def try_insert(self, count=1):
        allowed = bool(self.state.can_insert(count))
        if allowed:
            self.state = self.state.inserted(count)
        return allowed

    def try_sample(self, count=1):
        allowed = bool(self.state.can_sample(count))
        if allowed:
            self.state = self.state.sampled(count)
        return allowed

    def delete(self, count=1):
        self.state = self.state.deleted(count)


class Threaded:
    """The same of a `HostLimiter` that does not wait."""

    def __init__(self, limits):
        self.limiter = limiter.HostLimiter(limits)

    def try_insert(self, count=1):
        return self.limiter.await_insert(count, timeout=0.0)

    def try_sample(self, count=1):
        return self.limiter.await_sample(count, timeout=0.0)

    def delete(self, count=1):
        self.limiter.deleted(count)


def play(kind, limits, moves):
    """Which of the moves are allowed: i insert, s sample, d delete (always)."""
    limited, seen = kind(limits), ""
    for move in moves:
        if move == "d":
            limited.delete()
            seen += "d"
        else:
            allowed = limited.try_insert() if move == "i" else limited.try_sample()
            seen += move if allowed else "-"
    return seen


SEQUENCES = [
    (limiter.min_size(2), "sisisssdsiiis", "-i-isssd-iiis"),
    # Queue of 2: at most two wait, each is drawn once.
    (limiter.queue(2), "siiisssisi", "-ii-ss-isi"),
    # Two draws an insert from size 2 on, balance between 4 - 3 and 4 + 3.
    (limiter.sample_to_insert_ratio(2.0, 2, 3.0), "siissssiiiisss", "-iisss-iii-sss"),
    # Half a draw an insert: balance 1 +- 1.
    (limiter.sample_to_insert_ratio(0.5, 2, 1.0), "isisiiississ", "i-isiiis-is-"),
    (limiter.sample_to_insert_ratio(1.0, 1, (0.0, 2.0)), "iiisssi", "ii-ss-i"),
]


@pytest.mark.parametrize("kind", [Compiled, Threaded])
@pytest.mark.parametrize(("limits", "moves", "expected"), SEQUENCES)
def test_exact_sequences(kind, limits, moves, expected):
    assert play(kind, limits, moves) == expected


def test_a_small_ratio_stays_exact():
    """0.1 has no exact float32: 100,000 plain additions would be off by tens."""

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, 100_000, lambda _, s: s.inserted(1), state)

    state = run(limiter.limiter(limiter.sample_to_insert_ratio(0.1, 1, 5.0)))
    assert float(state.balance) == pytest.approx(10_000.0, abs=2e-3)
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 9_999, lambda _, s: s.sampled(1), s))(state)
    assert float(state.balance) == pytest.approx(1.0, abs=2e-3)


def test_the_ratio_can_be_set_while_running():
    state = limiter.limiter(limiter.queue(4)).inserted(4)
    assert not bool(state.can_insert(1))
    state = state.replace(samples_per_insert=state.samples_per_insert * 0.0)
    assert bool(state.can_insert(1))
    host = limiter.HostLimiter(limiter.queue(4))
    assert host.await_insert(4) and host.await_sample(2)
    host.set_ratio(0.5)
    assert host.metrics()["balance"] == 2.0
    assert host.await_insert(4, timeout=0.0) and not host.await_insert(1, timeout=0.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: limiter.min_size(0), "min_size=0"),
        (lambda: limiter.queue(0), "size=0"),
        (lambda: limiter.sample_to_insert_ratio(4.0, 10, 3.0), "error_buffer=4.0 or more"),
        (lambda: limiter.sample_to_insert_ratio(0.0, 10, 3.0), "ratio=0.0"),
        (lambda: limiter.updates_per_iteration(0.0, 10, 3), "ratio=0.0"),
    ],
)
def test_impossible_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("ratio", "rows", "batch", "updates"), [(8, 64, 256, 2), (1, 256, 256, 1), (0.5, 1024, 256, 2), (0.1, 2560, 256, 1)]
)
def test_the_plan_of_updates(ratio, rows, batch, updates):
    assert limiter.updates_per_iteration(ratio, rows, batch) == updates


def test_a_plan_that_is_no_whole_number_says_what_would_be():
    with pytest.raises(ConfigError, match="0.25 updates.*use 256 rows.*ratio=4"):
        limiter.updates_per_iteration(1, 64, 256)


def test_threads_wait_for_each_other():
    host = limiter.HostLimiter(limiter.queue(3))
    drawn = []

    def learner():
        while host.await_sample(1, timeout=20.0):
            drawn.append(host.metrics()["size"])
            host.deleted(1)

    thread = threading.Thread(target=learner)
    thread.start()
    time.sleep(0.05)
    for _ in range(200):
        assert host.await_insert(1, timeout=20.0)
    deadline = time.monotonic() + 20.0
    while len(drawn) < 200 and time.monotonic() < deadline:
        time.sleep(0.001)
    host.close()
    thread.join(20.0)
    assert not thread.is_alive() and len(drawn) == 200
    # An item is deleted after it is counted as drawn, so one more may be there.
    assert max(drawn) <= 4
    assert host.metrics()["sample_blocked_seconds"] > 0.04
    assert not host.await_insert(1) and not host.await_sample(1)


def test_counters_go_on_from_a_checkpoint():
    host = limiter.HostLimiter(limiter.queue(3))
    assert host.await_insert(3) and host.await_sample(1)
    again = limiter.HostLimiter(limiter.queue(3))
    again.restore(host.counters())
    assert again.await_insert(1, timeout=0.0) and not again.await_insert(1, timeout=0.0)
