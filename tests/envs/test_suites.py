"""Suites of other distributions: found by entry point, used by name, saved and loaded; the page `docs/new_suite.md`."""

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.distributions import install, install_suite
from helpers.processes import python
from helpers.refused import raises, refused
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl import envs
from jaxrl.cli import main
from jaxrl.core import suite_modules
from jaxrl.core.errors import ConfigError
from jaxrl.envs.configs import from_config, to_config

PAGE = (Path(__file__).parents[2] / "docs" / "new_suite.md").read_text()
MODULE, USE = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(PROJECT,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(COMMANDS,) = re.findall(r"^```shell\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, where distributions are installed; what they import and register is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    with nothing_registered_for_good():
        yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def walks(folder):
    (folder / "walks.py").write_text(MODULE)
    install(folder, PROJECT)
    return folder


def test_it_is_made_by_name_with_parameters(walks):
    assert "walks" not in sys.modules
    env = envs.make("walks:Ring", length=7, slip=1, auto_reset=None).env
    assert repr(env) == "make('walks:Ring', length=7, slip=1.0)" and env.observation_space.shape == (7,)
    assert envs.parameters(env) == {"cost": 0.01, "slip": 1.0, "max_steps": 50}
    state, first = env.reset(jax.random.key(0))
    _, step = env.step(state, jnp.int32(1), jax.random.key(1))  # slips, over the beginning
    assert first.first and step.terminated and step.reward == 1.0 and np.argmax(step.observation) == 6
    with pytest.raises(ConfigError) as caught:
        envs.make("walks:Ring", slipp=0.5, cost="much")
    assert "did you mean 'slip'" in caught.value.problems[0] and "cost='much'" in caught.value.problems[1]
    refused(lambda: envs.make("walks:Rung"), "'Rung'; did you mean 'Ring'")
    refused(lambda: envs.make("walk:Ring"), "'walk'; did you mean 'walks'")
    refused(lambda: envs.make("Ring"), "'walks:Ring'")
    for length in (4.5, True, "five", [3]):
        raises(ConfigError, "parameter length=.* default 5", envs.make, "walks:Ring", length=length)
    assert envs.make("walks:Ring", length=np.int64(4)).observation_space.shape == (4,)
    refused(lambda: envs.make("walks:Ring", slip="0.1,cost=0.2"), "str was passed instead of float")


def test_a_time_limit_truncates_and_an_arrival_terminates(walks):
    env = envs.make("walks:Corridor", length=3, max_steps=4)
    state, keys = env.reset(jax.random.key(0))[0], jax.random.split(jax.random.key(1), 6)
    left, right = (jax.lax.scan(lambda s, key, a=a: env.step(s, jnp.int32(a), key), state, keys)[1] for a in (0, 1))
    assert np.flatnonzero(left.truncated).tolist() == [3] and not left.terminated.any() and left.first[4]
    assert np.flatnonzero(right.terminated).tolist() == [1, 4] and not right.truncated.any()
    envs.check_env(env, steps=0)


@pytest.mark.long
def test_it_is_trained_saved_loaded_and_evaluated(walks):
    algo = jaxrl.PPO(rollout_length=4, epochs=1, minibatches=1)
    run_dir = walks / "run"
    small = {"total_steps": 32, "num_envs": 4, "evaluation_episodes": 2, "evaluate_every": 0, "progress": False}
    jaxrl.train(algo, "walks:Corridor", **small, run_dir=run_dir)
    written = json.loads((run_dir / "config.json").read_text())["environment"]
    assert (written["suite"], written["name"]) == ("walks", "Corridor") and "walks." not in json.dumps(written)
    policy = jaxrl.load(run_dir)
    evaluated = jaxrl.evaluate(policy.algo, policy.actor, "walks:Corridor", policy.spec, episodes=2)
    assert np.isfinite(evaluated.metrics()["return_mean"])
    env = envs.make("walks:Ring", length=4, cost=0.5)
    back = from_config(json.loads(json.dumps(to_config(env))))
    assert back == env and jax.tree.structure(back) == jax.tree.structure(env)


def test_it_is_listed(walks, capsys):
    assert {"walks:Corridor", "walks:Ring", "gymnax:CartPole-v1"} <= set(jaxrl.environments())
    assert main.main(["envs", "walks"]) == 0
    assert capsys.readouterr().out.split() == ["walks:Corridor", "walks:Ring"]
    assert main.main(["train", "ppo", "--env", "walks:Rung", "--total-steps", "8"]) == 2
    assert "did you mean 'Ring'" in capsys.readouterr().err


def test_numbers_that_change_nothing_are_refused(folder):
    install_suite(folder, "walks", MODULE.replace("-self.cost", "-0.0"))
    raises(ConfigError, "cost=0.5 .*changes nothing", envs.make, "walks:Ring", cost=0.5)
    env = envs.make("walks:Ring")
    raises(ConfigError, "cost=0.5 .*changes nothing", envs.with_parameters, env, cost=0.5)
    written = to_config(env)
    assert envs.parameters(from_config(written | {"parameters": written["parameters"] | {"cost": 0.5}}))["cost"] == 0.5


def test_states_may_hold_keys_and_numbers_of_python(folder):
    code = MODULE.replace("return (start, start), Step", "return (start, 0), Step")
    install_suite(folder, "walks", code)
    envs.check_env(envs.make("walks:Ring"), steps=0)
    keyed = MODULE.replace("(start, start)", "(start, start, key)")
    keyed = keyed.replace("position, time = state", "position, time, own = state")
    keyed = keyed.replace("return (position, time + 1), ", "return (position, time + 1, jax.random.fold_in(own, 1)), ")
    install_suite(folder, "keyed", keyed.replace('"walks"', '"keyed"').replace("walks=", "keyed="))
    envs.check_env(envs.make("keyed:Ring"), steps=0)


# --- what is not looked up, and what is wrong --------------------------------------------------------------------


def test_own_suites_read_no_metadata(walks, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("read"))
    env = envs.make("probe:Constant")
    assert from_config(to_config(env)) is not None and "walks" not in sys.modules


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", r"suite 'mine', of mine 2.0 \(mine\), cannot be imported: ZeroDivisionError: division by zero"),
        ("import surely_missing", "cannot be imported: ModuleNotFoundError: No module named 'surely_missing'"),
        ("def names():\n    return ()", r"must be a module with functions names\(\) and make\("),
        ("", r"of mine 2.0 \(mine\), must be a module"),
    ],
)
def test_a_module_that_is_no_suite_is_an_error_that_names_its_package(folder, code, words, capsys):
    install_suite(folder, "mine", code)
    for look_up in (
        lambda: envs.make("mine:X"),
        lambda: from_config({"suite": "mine", "name": "X", "parameters": {}, "wrappers": []}),
    ):
        raises(ConfigError, words, look_up)
    assert main.main(["train", "ppo", "--env", "mine:X", "--total-steps", "8"]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    with pytest.warns(UserWarning, match="mine.*not listed"):
        names = jaxrl.environments()
    assert "gymnax:CartPole-v1" in names and not any(name.startswith("mine:") for name in names)


def test_a_module_that_registers_no_class_is_said_to(folder):
    install_suite(folder, "mine", "def names():\n    return ('X',)\ndef make(name):\n    return None")
    raises(
        ConfigError,
        r'does not register the class.*registry.add\("suite", mine=CLASS\)',
        from_config,
        {"suite": "mine", "name": "X", "parameters": {}, "wrappers": []},
    )


@pytest.mark.parametrize("name", [*suite_modules.SUITES, "user", "dm_env", "two words"])
def test_names_of_jaxrls_own_suites_cannot_be_taken(folder, name):
    install_suite(folder, name, "raise SystemExit('imported')", distribution="impostor")
    with pytest.warns(UserWarning, match=f"impostor 2.0.* '{name}'"):
        assert name not in suite_modules.declared()
    assert envs.make("gymnax:CartPole-v1").name == "gymnax:CartPole-v1" and "impostor" not in sys.modules


def test_two_distributions_with_one_suite_are_named(walks):
    install_suite(walks, "walks", MODULE, distribution="other-walks")
    refused(lambda: envs.make("walks:Ring"), "by other-walks 2.0")
    with pytest.warns(UserWarning, match="not listed"):
        assert "walks:Ring" not in jaxrl.environments()


def test_a_folder_that_is_on_the_path_twice_has_one_suite(walks):
    link = walks / "again"
    link.symlink_to(walks)
    sys.path.insert(0, str(link))
    assert envs.make("walks:Ring").name == "walks:Ring"


def test_an_installed_suite_takes_no_registrations(walks):
    raises(ConfigError, "walks:Mine.* is taken", jaxrl.register, "walks:Mine", lambda: None)


@pytest.mark.long
def test_the_page_works_as_printed(walks):
    """In processes of their own, as the package is installed for all."""
    python_path = os.pathsep.join([str(walks), os.environ.get("PYTHONPATH", "")])
    use = USE.replace("total_steps=20_000", "total_steps=2_048, progress=False")
    lines = [["-c", use]]
    for line in COMMANDS.strip().split("\n"):
        short = line.replace("20000", "2048 --no-progress --evaluation-episodes 4")
        lines.append(["-m", *short.split()])
    for words in lines:
        python(*words, env=os.environ | {"PYTHONPATH": python_path})
