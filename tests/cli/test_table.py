"""The table that the command line reads before JAX is imported, held to the code; and what is not in it."""

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
from helpers.registered import OWN_ALGORITHMS, nothing_registered_for_good

import jaxrl
from jaxrl.cli import describe, fields, main, table
from jaxrl.core import registry
from jaxrl.envs.env_registry import environments


def test_the_table_is_what_the_code_says():
    assert json.loads(json.dumps(describe.table())) == table.load()


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Each time that a table is made, which takes seconds otherwise."""
    found = []
    monkeypatch.setattr(table, "_made", lambda: found.append(1) or '{"commands": 1}')
    monkeypatch.setattr(table, "FILE", tmp_path / "table.json")
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    yield found
    assert table.load.__wrapped__() == {"commands": 1}


def test_a_table_that_is_missing_is_made_once(made, tmp_path):
    assert table.load.__wrapped__() == table.load.__wrapped__() == {"commands": 1} and len(made) == 1
    assert [path.name[:4] for path in (tmp_path / "cache").iterdir()] == ["cli-"]


@pytest.mark.parametrize(
    "damaged", [lambda text: text[:-1], lambda text: "x" + text[1:], lambda text: "", lambda _: "["]
)
def test_a_table_that_is_damaged_is_made_again(damaged, made, tmp_path):
    table.load.__wrapped__()
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(damaged(kept.read_text()))
    assert table.load.__wrapped__() == {"commands": 1} and len(made) == 2


def test_a_table_of_other_code_is_made_again(made, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "_PACKAGE", tmp_path / "checkout" / "jaxrl")
    code = tmp_path / "checkout" / "jaxrl" / "a.py"
    code.parent.mkdir(parents=True)
    code.write_text("a = 1")
    (tmp_path / "checkout" / "pyproject.toml").touch()
    table._write(table.FILE, table._source(), table._made())  # as set-up does, and the wheel
    assert table.load.__wrapped__() == {"commands": 1} and len(made) == 1
    os.utime(code, (1, 1))
    assert table.load.__wrapped__() == {"commands": 1} and len(made) == 2
    (tmp_path / "checkout" / "pyproject.toml").unlink()  # installed: times are the installer's
    os.utime(code, (2, 2))
    assert table.load.__wrapped__() == {"commands": 1} and len(made) == 2
    code.write_text("a = 12")
    assert table.load.__wrapped__() == {"commands": 1} and len(made) == 3


@pytest.mark.parametrize("setting", ["off", "{}/file/cache", "~nobody-of-this-name/cache"])
def test_where_no_table_can_be_kept_it_is_made_each_time(setting, made, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXRL_CACHE", setting.format(tmp_path))
    assert table.load.__wrapped__() == table.load.__wrapped__() == {"commands": 1} and len(made) == 2


@pytest.mark.parametrize("name", OWN_ALGORITHMS)
def test_flags_from_the_table_are_those_of_the_class(name):
    assert table.algorithm_flags(name) == fields.algorithm_flags(jaxrl.make_algorithm(name))


@pytest.mark.parametrize("command", table.load()["commands"])
def test_no_flag_of_a_command_has_the_name_of_a_field(command):
    """The command line would have two flags of one name, and the call in Python one argument."""
    own = {flag.name for flag in table.command_flags(command)}
    for name in table.algorithms():
        assert not own & {flag.name for flag in table.algorithm_flags(name)[0]}, name


def test_flags_of_a_preset_are_those_of_its_algorithm():
    for name, preset in table.load()["presets"].items():
        flags, helps = table.algorithm_flags(preset["algorithm"])
        changed = [dataclasses.replace(flag, default=preset["defaults"].get(flag.name, flag.default)) for flag in flags]
        assert (changed, helps) == fields.algorithm_flags(jaxrl.preset(name).algorithm), name


def test_environments_are_all():
    assert table.environments() == environments()


def test_names_of_another_version_are_asked_of_the_suite(monkeypatch):
    monkeypatch.setattr(table, "sys", SimpleNamespace(modules={}))  # as before anything has been imported
    kept = table.load()["environments"]
    monkeypatch.setitem(kept, "gymnax", kept["gymnax"] | {"names": ["Nothing-v0"]})
    assert "known: Nothing-v0" in table.environment_problems("gymnax:CartPole-v1")[0]
    monkeypatch.setitem(kept, "gymnax", kept["gymnax"] | {"version": "0"})
    assert table.environment_problems("gymnax:CartPole-v1") == []
    assert "CartPole-v1" in table.environment_problems("gymnax:CartPool-v1")[0]


def test_what_a_user_registered_is_known():
    with nothing_registered_for_good():

        @dataclasses.dataclass(frozen=True)
        class Corridor:
            length: int = 5

        jaxrl.register("mine:Corridor-v0", Corridor)
        assert table.environment_problems("mine:Corridor-v0") == []
        assert "did you mean 'mine:Corridor-v0'" in table.environment_problems("mine:Coridor-v0")[0]
        assert "mine:Corridor-v0" in table.environments()


def test_an_algorithm_of_a_users_has_flags(capsys):
    from jaxrl.algos.base import algorithm, number

    with nothing_registered_for_good():

        @algorithm
        class MyPPO(jaxrl.PPO):
            """A variant of a user's own."""

            temperature: jaxrl.schedules.Scalar = number(0.5, above=0.0, help="of the policy")

        assert "myppo" in table.algorithms() and "myppo" not in table.load()["algorithms"]
        assert registry.find("algorithm:myppo") is MyPPO
        with pytest.raises(SystemExit):
            main.main(["train", "myppo", "--help"])
        assert "--temperature" in capsys.readouterr().out
        assert (
            main.main(["train", "myppo", "--env", "gymnax:CartPole-v1", "--total-steps", "1", "--temperature=0"]) == 2
        )
        assert "MyPPO.temperature=0.0 must be more than 0" in capsys.readouterr().err
        assert main.main(["train", "myyppo"]) == 2
        assert "did you mean 'myppo'" in capsys.readouterr().err
