"""How settings present themselves: complete help, short reprs that make the same object again, tables for notebooks."""

import dataclasses
import inspect
import pydoc
from collections.abc import Mapping
from functools import partial
from types import UnionType

import jax.numpy as jnp
import pytest
from helpers.registered import OWN_ALGORITHMS

import jaxrl
from jaxrl import networks
from jaxrl.algos import optimizers
from jaxrl.core import registry, schedules
from jaxrl.core.types import EnvSpec
from jaxrl.envs import TimeLimit, wrappers
from jaxrl.run import callbacks

DISCRETE = EnvSpec("probe", jaxrl.spaces.Box(-1.0, 1.0, (4,)), jaxrl.spaces.Discrete(2))
CONTINUOUS = EnvSpec("probe", jaxrl.spaces.Box(-1.0, 1.0, (4,)), jaxrl.spaces.Box(-1.0, 1.0, (2,)))
IMAGES = EnvSpec("probe", jaxrl.spaces.Box(0.0, 1.0, (10, 10, 4)), jaxrl.spaces.Discrete(2))
LONGEST = 300  # characters: three lines


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_help_shows_every_field_with_default_and_limits(name):
    cls = OWN_ALGORITHMS[name]
    text = " ".join(inspect.getdoc(cls).split())
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)  # with a bar before each line
    assert text in " ".join(" ".join(line.removeprefix(" |") for line in shown.splitlines()).split())
    for field in dataclasses.fields(cls):
        assert f"{field.name}: " in text and " ".join(field.metadata["help"].split()) in text
        assert f"(default: {field.default!r})" in text
        limits = field.metadata["limits"]
        assert "low" not in limits or f"at least {limits['low']:g}" in text
    assert list(inspect.signature(cls).parameters) == [field.name for field in dataclasses.fields(cls)]


def settings_classes():
    for kind in ("core", "head", "network", "optimizer", "sampler", "source", "topology", "torso", "wrapper"):
        yield from (cls for cls in registry.registered(kind).values() if cls.__module__.startswith("jaxrl."))
    yield from (jaxrl.Record, jaxrl.Processes, jaxrl.RayProcesses)


@pytest.mark.parametrize("cls", list(settings_classes()), ids=lambda cls: cls.__name__)
def test_help_of_every_class_of_settings_names_its_fields(cls):
    text = inspect.getdoc(cls)
    for field in dataclasses.fields(cls):
        assert field.name in text, f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_reprs_of_algorithms_make_them_again(name):
    names = {**vars(jaxrl.networks), **vars(schedules), **vars(optimizers), **OWN_ALGORITHMS}
    names |= {cls.__name__: cls for cls in OWN_ALGORITHMS.values()}
    algo = OWN_ALGORITHMS[name]()
    assert repr(algo) == f"{type(algo).__name__}()"
    for spec in (DISCRETE, CONTINUOUS, IMAGES):
        resolved = algo.resolve(spec, 8)
        assert len(repr(resolved)) < LONGEST
        assert eval(repr(resolved), names) == resolved


def test_reprs_of_environments_fit_three_lines():
    env = jaxrl.make("gymnax:CartPole-v1", gravity=5.0, wrappers=(partial(TimeLimit, max_steps=30),))
    assert repr(env) == (
        "AutoReset(env=TimeLimit(env=EpisodeStatistics(env=make('gymnax:CartPole-v1', gravity=5.0)), max_steps=30))"
    )
    mapped = jaxrl.envs.with_parameters(env, gravity=jnp.ones(3))
    assert "gravity=<float32[3]>" in repr(mapped)
    for name in ("gymnax:Pendulum-v1", "gymnax:Breakout-MinAtar", "brax:fast", "gymnasium:CartPole-v1"):
        assert len(repr(jaxrl.make(name))) < LONGEST and f"make('{name}')" in repr(jaxrl.make(name))


def test_notebooks_see_tables():
    table = jaxrl.PPO(gamma=0.5)._repr_html_()
    assert "<b>gamma</b>" in table and "<code>0.5</code>" in table and "discount factor" in table
    assert "<b>clip</b>" not in table and all(field.name in table for field in dataclasses.fields(jaxrl.PPO))
    table = jaxrl.make("gymnax:CartPole-v1")._repr_html_()
    assert "Discrete(n=2)" in table and "AutoReset, EpisodeStatistics" in table and "gravity" in table
    assert "Box(" in jaxrl.make("gymnasium:CartPole-v1")._repr_html_()
    assert "&lt;" in jaxrl.PPO(gamma=jnp.ones(3))._repr_html_()


@pytest.mark.parametrize("module", [jaxrl, jaxrl.envs, networks, jaxrl.spaces, jaxrl.schedules, wrappers, callbacks])
def test_public_modules_list_public_names_only(module):
    names = dir(module)
    assert names and set(getattr(module, "__all__", names)) == set(names)
    for name in names:
        found = getattr(module, name)
        home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", "jaxrl")
        assert not name.startswith("_") and (str(home).startswith("jaxrl") or isinstance(found, UnionType | Mapping))
