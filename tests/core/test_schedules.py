"""Schedules: their values, their place in an algorithm, and their text on the command line."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.core import schedule_text, schedules
from jaxrl.core.schedules import Constant, Cosine, Exponential, Linear, PiecewiseConstant

EVERY = [
    Constant(3.0),
    Linear(2.5e-4, 0.0),
    Linear(1.0, 0.05, until=0.1),
    Cosine(1e-3, 1e-5),
    Exponential(1.0, 0.01, until=0.5),
    PiecewiseConstant((1e-3, 3e-4, 1e-4), (0.5, 0.75)),
]


def truth(schedule, progress):
    """The value in float64, from the formula."""
    if isinstance(schedule, Constant):
        return schedule.value
    if isinstance(schedule, PiecewiseConstant):
        return schedule.values[sum(progress >= boundary for boundary in schedule.boundaries)]
    done = min(progress / schedule.until, 1.0)
    if isinstance(schedule, Linear):
        return schedule.start + (schedule.end - schedule.start) * done
    if isinstance(schedule, Cosine):
        return schedule.end + 0.5 * (schedule.start - schedule.end) * (1 + math.cos(math.pi * done))
    return schedule.start * (schedule.end / schedule.start) ** done


@pytest.mark.parametrize("schedule", EVERY, ids=schedules.to_config)
def test_values(schedule):
    progress = [0.0, 0.03125, 0.25, 0.5, 0.625, 0.75, 1.0]
    values = jax.jit(jax.vmap(schedule))(jnp.float32(progress))
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, [truth(schedule, p) for p in progress], rtol=2e-6, atol=1e-10)
    assert schedule(0.5).shape == ()


@pytest.mark.parametrize("cls", [Linear, Cosine, Exponential])
def test_both_ends_are_exact_and_the_end_stays(cls):
    schedule = cls(0.3, 0.7, until=0.6)
    assert float(schedule(0.0)) == np.float32(0.3)
    for progress in (0.6, 0.8, 1.0, 1.1):  # a last chunk may overshoot the total
        assert float(schedule(jnp.float32(progress))) == pytest.approx(0.7, rel=1e-7)
    assert float(cls(0.3, 0.7)(-0.1)) == np.float32(0.3)


def test_the_numbers_are_leaves_and_can_be_swept():
    starts = jnp.float32([1e-4, 3e-4, 1e-3])
    swept = jax.vmap(lambda start: Linear(start, 0.0)(0.5))(starts)
    np.testing.assert_allclose(swept, starts / 2)
    assert len(jax.tree.leaves(PiecewiseConstant((1.0, 2.0), (0.5,)))) == 3
    slope = jax.grad(lambda until: Linear(1.0, 0.0, until)(0.25))(jnp.float32(0.5))
    np.testing.assert_allclose(slope, 0.25 / 0.5**2, rtol=1e-6)


@struct.dataclass
class Optimizer:
    b1: float = 0.9
    eps: float = 1e-5


@struct.dataclass
class Settings:
    learning_rate: float | schedules.Schedule = 2.5e-4
    clip: float | schedules.Schedule = 1
    value_rate: float | schedules.Schedule | None = None
    optimizer: Optimizer = Optimizer()
    epochs: int = struct.field(pytree_node=False, default=4)
    name: str = struct.field(pytree_node=False, default="clip")


def test_at_makes_numbers_of_everything_that_is_traced_and_leaves_the_rest():
    scheduled = Optimizer(eps=Linear(1e-5, 1e-3))
    settings = Settings(learning_rate=Linear(1.0, 0.0), value_rate=Exponential(1.0, 0.01), optimizer=scheduled)
    now = jax.jit(schedules.resolve_schedules)(settings, jnp.float32(0.25))
    assert isinstance(now, Settings)
    assert (now.epochs, now.name) == (4, "clip")
    expected = Settings(0.75, 1.0, 0.01**0.25, Optimizer(0.9, 1e-5 * 0.75 + 1e-3 * 0.25))
    assert jax.tree.structure(now) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(now), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape, ours.weak_type) == (jnp.float32, (), False)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert schedules.resolve_schedules(Settings(), 0.0).value_rate is None


def test_at_works_where_some_numbers_are_mapped():
    rates = jnp.float32([1.0, 2.0])

    def rate(start, progress):
        return schedules.resolve_schedules(Settings(learning_rate=Linear(start, 0.0)), progress).learning_rate

    np.testing.assert_allclose(jax.jit(jax.vmap(rate, (0, None)))(rates, jnp.float32(0.5)), rates / 2)
    swept = Settings(clip=rates)
    np.testing.assert_array_equal(schedules.resolve_schedules(swept, 0.5).clip, rates)


def test_at_twice_is_at_once():
    once = schedules.resolve_schedules(Settings(learning_rate=Linear(1.0, 0.0)), 0.5)
    jax.tree.map(np.testing.assert_array_equal, once, schedules.resolve_schedules(once, 0.9))


# --- text ----------------------------------------------------------------------------------------------------------


def test_what_is_written_has_the_fields_of_the_schedules():
    assert set(schedule_text.USAGE) == set(schedules.SCHEDULES)
    for name, counts in schedule_text.COUNTS.items():
        fields = dataclasses.fields(schedules.SCHEDULES[name])
        assert counts == (sum(field.default is dataclasses.MISSING for field in fields), len(fields))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        (" 2 ", 2.0),
        ("-.5", -0.5),
        (1, 1.0),
        ("constant:2", Constant(2.0)),
        ("linear:2.5e-4:0", Linear(2.5e-4, 0.0)),
        ("Linear: 1 : 0.05 : 0.1", Linear(1.0, 0.05, 0.1)),
        ("cosine:1e-3:1e-5", Cosine(1e-3, 1e-5)),
        ("exponential:1:0.01:0.5", Exponential(1.0, 0.01, 0.5)),
        ("piecewise:1e-3:0.5:3e-4:0.75:1e-4", PiecewiseConstant((1e-3, 3e-4, 1e-4), (0.5, 0.75))),
        ("piecewise:2", PiecewiseConstant((2.0,), ())),
    ],
)
def test_parse(text, value):
    assert schedules.parse(text) == value
    assert type(schedules.parse(text)) is type(value)


sizes = st.floats(2.0**-126, 3.4e38)  # that float32 holds
numbers = st.one_of(st.just(0.0), sizes, sizes.map(lambda x: -x))
positive = st.floats(1e-30, 1e30)
fractions = st.floats(2.0**-126, 1.0)


@given(
    st.one_of(
        numbers,
        st.builds(Constant, numbers),
        st.builds(Linear, numbers, numbers, fractions),
        st.builds(Cosine, numbers, numbers, fractions),
        st.builds(Exponential, positive, positive, fractions),
        st.builds(lambda a, b, edge: PiecewiseConstant((a, b), (edge,)), numbers, numbers, st.floats(0.01, 0.99)),
    )
)
def test_config_text_gives_the_same_back_digit_for_digit(value):
    assert schedules.parse(schedules.to_config(value)) == value


def test_config_of_arrays_is_their_number():
    assert schedules.to_config(jnp.float32(0.5)) == 0.5
    assert schedules.to_config(Linear(jnp.float32(0.5), 0)) == "linear:0.5:0.0:1.0"


def test_traced_schedules_and_correct_ones_have_no_problems():
    def told(schedule):
        return "\n".join(schedules.schedule_problems("PPO.clip", schedule))

    assert not any(told(schedule) for schedule in [*EVERY, 0.3, jnp.float32(2.0), None])
    jax.jit(lambda end: told(Exponential(1.0, end)) or end)(-1.0)  # traced numbers cannot be looked at


def test_the_interface_has_no_value():
    with pytest.raises(NotImplementedError):
        schedules.Schedule()(0.5)
