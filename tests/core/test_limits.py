"""Limits of numbers: what float32 cannot hold is refused by name, everywhere that a number enters a program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.algos.base import field_problems
from jaxrl.algos.optimizers import Adam, Muon
from jaxrl.core.limits import number_problems, problem
from jaxrl.core.schedules import Cosine, Exponential, Linear, PiecewiseConstant, schedule_problems


@given(st.floats(width=64), st.sampled_from([None, {"low": 0.0}, {"above": -1.0, "below": 1e39}, {"high": 1.0}]))
def test_numbers_are_those_that_float32_holds_within_the_limits(number, limits):
    with np.errstate(over="ignore", under="ignore"):
        held = np.float32(number)
    normal = number == 0 or (abs(number) >= np.finfo(np.float32).tiny and np.isfinite(held))
    bounds = limits or {}
    within = bounds.get("low", -math.inf) <= number <= bounds.get("high", math.inf)
    within &= bounds.get("above", -math.inf) < number < bounds.get("below", math.inf)
    expected = bool(math.isfinite(number) and normal and within)
    assert (problem(number, limits) is None) == expected


@pytest.mark.parametrize("number", [1e300, -1e39, 1e-60, -1e-45, 10**60, 10**400, np.float64(1e300)], ids=str)
def test_what_overflows_or_underflows_is_refused_by_name(number):
    for label, problems in (
        ("DQN.v_max", field_problems(jaxrl.DQN(v_max=number))),
        ("PPO.value_learning_rate.end", schedule_problems("PPO.value_learning_rate", Linear(1.0, number))),
        ("PPO.entropy_cost", schedule_problems("PPO.entropy_cost", PiecewiseConstant((1.0, number), (0.5,)))),
        ("cpus_per_run", number_problems("cpus_per_run", abs(number), {"low": 0})),
    ):
        [found] = [problem for problem in problems if "has no effect" not in problem]
        assert found.startswith(label)
        assert any(
            part in found for part in ("from 1.18e-38 to 3.4e+38 in magnitude", "must be a finite", "at least 0")
        )


def test_of_a_schedule_and_an_optimizer_every_number_counts():
    for value, named in (
        (Linear(1e-3, 1e-60), "end"),
        (Cosine(1e300, 0.0), "start"),
        (Linear(1e-3, 0.0, until=1e-60), "until"),
        (Exponential(1e-3, 1e-39), "end"),
        (Linear(np.ones(2), 0.0), "start"),
    ):
        [found] = field_problems(jaxrl.PPO(learning_rate=value))
        assert found.startswith(f"PPO.learning_rate.{named}=")
    for optimizer, named in ((Adam(eps=1e-60), "eps"), (Muon(adam_b1=math.nan), "adam_b1"), (Adam(b1="0.9"), "b1")):
        [found] = field_problems(jaxrl.PPO(optimizer=optimizer))
        assert found.startswith(f"PPO.optimizer.{named}=")


@pytest.mark.parametrize(
    "value",
    [np.asarray([1e-3, 1e-4]), jnp.ones((1,)), 1j, object(), [1e-3, 1e-4]],
    ids=["numpy", "jax", "complex", "object", "list"],
)
def test_what_is_not_one_number_is_refused_by_name(value):
    assert [found.partition("=")[0] for found in field_problems(jaxrl.PPO(gamma=value))] == ["PPO.gamma"]


def test_scalars_of_numpy_and_jax_are_numbers_and_tracers_are_not_looked_at():
    for value in (
        np.float32(0.5),
        np.float64(0.5),
        np.asarray(0.5),
        jnp.float32(0.5),
        jnp.bfloat16(0.5),
        np.int8(1),
        0,
    ):
        assert field_problems(jaxrl.PPO(gamma=value)) == []
    jax.eval_shape(lambda rate: jnp.float32(len(field_problems(jaxrl.PPO(optimizer=Adam(eps=rate))))), 1e-5)
    assert field_problems(jaxrl.PPO(learning_rate=Linear(1e-3, 0.0))) == [], "it may end at what it may not be"
