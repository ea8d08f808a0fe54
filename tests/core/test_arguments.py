"""Arguments of public calls: whole numbers of any type are taken, and what cannot be right is one error of ours."""

import dataclasses
import inspect
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises, refused
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.cli import values
from jaxrl.core import registry
from jaxrl.core.arguments import SEEDS, checked, is_whole, members, whole_arguments
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import whole
from jaxrl.data import views
from jaxrl.run.directory import loading
from jaxrl.run.policies.policy import Policy
from jaxrl.sweeps import launcher

# Public functions and methods that take counts.
CALLS = [
    *(getattr(jaxrl, name) for name in jaxrl.__all__ if inspect.isfunction(getattr(jaxrl, name))),
    jaxrl.Result.evaluate,
    jaxrl.Dataset.split,
    Policy.initial_carry,
    loading.load_run,
    launcher.launch,
    views.transitions,
]
COUNTED = {
    f"{call.__qualname__}.{name}": (call, name)
    for call in CALLS
    for name, parameter in inspect.signature(call).parameters.items()
    if is_whole(parameter.annotation) and name not in ("hide", *SEEDS)  # `make` converts `hide` itself
}


@given(st.integers(-(2**53), 2**53))
def test_whole_numbers_of_any_type_are_taken(number):
    for written in (number, np.int64(number), float(number), np.float64(number), np.asarray(number)):
        assert type(whole(written)) is int and whole(written) == number
    for text in (str(number), f"{number:_}", f"{float(number)!r}"):
        assert values.read(values.Kind("int"), text) == number


@given(st.floats(allow_nan=True, allow_infinity=True).filter(lambda x: not x.is_integer()))
def test_other_numbers_stay_as_they_are(number):
    assert whole(number) is number
    refused(lambda: _counts(number), "whole")


@pytest.mark.parametrize("value", ["5", True, np.True_, None, [5], np.asarray([5, 6]), jnp.float32(5.5), object()])
def test_what_is_no_number_stays_as_it_is(value):
    assert whole(value) is value


@checked(count={"low": 1})
def _counts(count: int, other: int | None = None, share: float = 0.5, name: str = "", fine: bool = True):
    return count, other


@checked()
def _takes_anything(run: Any, count: int = 1):
    return run, count


@pytest.mark.parametrize("run", ["a path", None, 3, object()])
def test_what_is_annotated_with_any_may_be_anything(run):
    assert _takes_anything(run, 2.0) == (run, 2)


def test_all_problems_are_raised_at_once():
    assert _counts(3.0, np.int32(2)) == (3, 2) and type(_counts(3.0)[0]) is int
    with pytest.raises(ConfigError) as raised:
        _counts(0, "x", share=math.nan, name=3, fine=1)
    assert raised.value.problems == [
        "count=0 must be at least 1",
        "other='x' must be a whole number",
        "share=nan must be a finite number",
        "name=3 must be a string",
        "fine=1 must be True or False",
    ]
    raises(TypeError, "missing", _counts)


@pytest.mark.parametrize("name", COUNTED)
def test_every_public_call_takes_whole_numbers_of_any_type(name):
    call, argument = COUNTED[name]
    seen = {}

    def spy(*args, **kwargs):
        seen.update(kwargs)

    spy.__signature__ = inspect.signature(call)  # as the decorators of `call` see it
    assert hasattr(call, "__wrapped__"), f"{call.__qualname__} is not decorated"
    whole_arguments(spy)(**{argument: np.int64(7)})
    assert type(seen[argument]) is int and seen[argument] == 7


def test_parameters_of_environments_are_whole_numbers_of_any_type():
    hidden = jaxrl.make("gymnax:CartPole-v1", hide=np.int64(1))
    assert hidden == jaxrl.make("gymnax:CartPole-v1", hide=(1.0,)) == jaxrl.make("gymnax:CartPole-v1", hide=1)
    assert type(jaxrl.make("gymnasium:CartPole-v1", workers=np.int64(0)).workers) is int
    refused(lambda: jaxrl.make("gymnasium:CartPole-v1", workers=1.5), "workers=1.5")


def dataclasses_with_counts():
    for kind in ("algorithm", "core", "head", "network", "optimizer", "sampler", "source", "topology", "torso"):
        for name, cls in registry.registered(kind).items():
            fields = [f for f in dataclasses.fields(cls) if is_whole(f.type) or tuple[int, ...] in members(f.type)]
            required = [f for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
            if fields and cls.__module__.startswith("jaxrl.") and set(required) <= set(fields):
                yield pytest.param(cls, fields, id=f"{kind}:{name}")


@pytest.mark.parametrize(("cls", "fields"), list(dataclasses_with_counts()))
def test_every_class_of_settings_takes_whole_numbers_of_any_type(cls, fields):
    def made(number):
        return cls(**{f.name: number if is_whole(f.type) else (number, number) for f in fields if f.init})

    usual = made(4)
    for number in (np.int64(4), 4.0, np.float32(4)):
        assert made(number) == usual and hash(made(number)) == hash(usual)
        found = [getattr(made(number), field.name) for field in fields]
        assert all(type(x) is int for value in found for x in (value if isinstance(value, tuple) else [value]))
