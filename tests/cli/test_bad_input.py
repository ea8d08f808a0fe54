"""Bad input on the command line that depends on the machine; `tests/test_wrong.py` has the rest."""

import os
import shutil

import pytest
from helpers.processes import environment, python
from helpers.refused import nothing_compiled
from helpers.strict_json import read_json

from jaxrl.cli import main
from jaxrl.core import suite_modules
from jaxrl.run.directory.run_directory import RunDirectory

TRAIN = ["train", "ppo", "--total-steps", "1000", "--env"]
RUN = [*TRAIN, "gymnax:CartPole-v1", "--run-dir"]


@pytest.fixture
def refused(capsys):
    """Run a command line that must be refused, and return its message."""

    def run(*argv):
        with nothing_compiled():
            assert main.main(argv) == 2
        return capsys.readouterr().err

    return run


def test_run_directory_in_use(refused, tmp_path):
    with RunDirectory(tmp_path, {"algorithm": "other"}):
        assert f"in use by process {os.getpid()}" in refused(*RUN, str(tmp_path))


def test_run_directory_of_another_configuration(refused, tmp_path):
    with RunDirectory(tmp_path, {"algorithm": {"type": "algorithm:ppo", "gamma": 0.5}, "seed": 0}):
        pass
    assert "algorithm.gamma: 0.5 -> 0.99" in refused(*RUN, str(tmp_path))
    assert read_json(tmp_path / "config.json")["seed"] == 0  # nothing lost


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that is read-only even to root")
def test_read_only_disk(refused):
    assert "/proc/self/run" in refused(*RUN, "/proc/self/run")


@pytest.mark.parametrize("env", ["brax:ant", "envpool:Pong-v5"])
def test_extra_that_is_not_installed(env, refused, monkeypatch):
    missing = env.partition(":")[0]
    monkeypatch.setattr("jaxrl.core.suites.installed", lambda suite: suite != missing)
    assert f"pip install 'jaxrl[{missing}]'" in refused(*TRAIN, env)


def test_a_suite_that_is_not_installed(refused, monkeypatch):
    monkeypatch.setitem(suite_modules.SUITES, "navix", suite_modules.Own("jaxrl.envs.suites.navix", "no_such_package"))
    assert "pip install 'jaxrl[navix]'" in refused("envs", "navix")


NO_DEVICE = """
import sys, jaxrl
from jaxrl.cli import main
try:
    jaxrl.make("gymnax:CartPole-v1")
except jaxrl.core.errors.ConfigError as error:
    print(error)
sys.exit(main.main(["train", "ppo", "--env", "gymnax:CartPole-v1", "--total-steps", "1000"]))
"""


@pytest.mark.long
def test_a_platform_that_is_not_there():
    """JAX raises an AssertionError without a word."""
    env = environment("JAX", JAX_PLATFORMS="tpu" if shutil.which("nvidia-smi") else "cuda")
    ended = python("-c", NO_DEVICE, env=env, code=2)
    assert "Traceback" not in ended.stderr
    for said in (ended.stdout, ended.stderr):
        assert f"JAX has no device of JAX_PLATFORMS={env['JAX_PLATFORMS']}" in said and "jaxrl[cuda13]" in said
