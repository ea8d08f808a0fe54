"""One table of names: filled by the packages, extended by users, found without importing everything."""

import dataclasses
import json

import pytest
from helpers.processes import python
from helpers.refused import raises, refused
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl.core import registry, suite_modules, suites
from jaxrl.core.errors import ConfigError

KINDS = sorted(registry._HOMES)


@pytest.fixture(autouse=True)
def forgotten():
    with nothing_registered_for_good():
        yield


@dataclasses.dataclass(frozen=True)
class Mine:
    """A class of a user's own."""

    number: int = 1


def rule(learning_rate):
    return learning_rate


def test_names_lead_to_things_and_back():
    for kind in KINDS:
        known = registry.registered(kind)
        assert known, kind
        for name, thing in known.items():
            assert registry.find(f"{kind}:{name}") is thing
            assert registry.find(registry.name_of(thing)) is thing
    for suite in filter(suites.installed, suite_modules.SUITES):
        assert registry.name_of(registry.find(f"suite:{suite}")) == f"suite:{suite}"


def test_the_modules_of_a_kind_enter_all_of_its_names():
    """Whatever else was imported: a name is found in a process that has only just started."""
    code = (
        "import json; from jaxrl.core import registry; kinds = {!r}; [registry.registered(kind) for kind in kinds]; "
        "print(json.dumps({{kind: sorted(registry.registered(kind)) for kind in kinds}}))"
    )

    def registered(kinds):  # of a process without what other tests registered
        return json.loads(python("-c", code.format(kinds)).stdout)

    with_others = registered(KINDS)
    for kind in KINDS:
        assert registered([kind]) == {kind: with_others[kind]}


def test_registering_imports_nothing():
    code = "import sys; from jaxrl.core import registry; assert 'jaxrl.algos' not in sys.modules"
    python("-c", code)


def test_classes_and_functions():
    assert jaxrl.register(Mine) is Mine and jaxrl.register(rule) is rule
    assert registry.name_of(Mine) == "user:Mine" and registry.find("user:rule") is rule

    @jaxrl.register("another")
    @dataclasses.dataclass
    class Another:
        pass

    assert registry.find("user:another") is Another


def test_a_cell_may_be_run_again_but_another_definition_not():
    jaxrl.register("mine", Mine)
    again = dataclasses.make_dataclass("Mine", [("number", int)])
    again.__module__, again.__qualname__ = Mine.__module__, Mine.__qualname__
    jaxrl.register("mine", again)
    assert registry.find("user:mine") is again
    raises(ConfigError, "'mine' is taken by .*Mine", jaxrl.register, "mine", rule)
    with pytest.raises(ConfigError, match="taken"):
        jaxrl.register("mine:One-v0", lambda: None)
        jaxrl.register("mine:One-v0", lambda: None)


def test_an_algorithm_is_registered_by_its_decorator():
    assert jaxrl.register(jaxrl.PPO) is jaxrl.PPO and "PPO" not in registry.registered("user")
    raises(ConfigError, "'ppo' is taken by .*ppo.PPO", registry.add, "algorithm", ppo=Mine)


@pytest.mark.parametrize("name", ["", "two words", "-x", "a/b", ":x", "mine:", "user:X", "gymnax:X", "pro be:X"])
def test_bad_names(name):
    with pytest.raises(ConfigError) as caught:
        jaxrl.register(name, Mine)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("thing", [3, None, lambda x: x], ids=["number", "none", "lambda"])
def test_things_without_a_name(thing):
    refused(lambda: jaxrl.register(thing), "has no name")


def test_classes_must_be_dataclasses():
    class Plain:
        pass

    refused(lambda: jaxrl.register(Plain), "Plain is not a dataclass")


def test_unknown_names():
    refused(lambda: registry.registered("torsos"), "did you mean 'torso'")
    refused(lambda: registry.find("schedule:linea"), "did you mean 'linear'")
    assert registry.name_of(Mine) is None and registry.name_of([]) is None
