"""Rate limiters: exact sequences of allowing and blocking."""

import jax
import pytest

from jaxrl.buffers import limiter
from jaxrl.core.errors import ConfigError


class Limited:
    """What is inserted and drawn where a `LimiterState` allows it."""

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


def play(limits, moves):
    """Which of the moves are allowed: i insert, s sample, d delete (always)."""
    limited, seen = Limited(limits), ""
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


@pytest.mark.parametrize(("limits", "moves", "expected"), SEQUENCES)
def test_exact_sequences(limits, moves, expected):
    assert play(limits, moves) == expected


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: limiter.min_size(0), "min_size=0"),
        (lambda: limiter.queue(0), "size=0"),
        (lambda: limiter.sample_to_insert_ratio(4.0, 10, 3.0), "error_buffer=4.0 or more"),
        (lambda: limiter.sample_to_insert_ratio(0.0, 10, 3.0), "ratio=0.0"),
    ],
)
def test_impossible_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
