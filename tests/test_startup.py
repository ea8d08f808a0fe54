"""Imports of a start: each test looks at `sys.modules` in a process of its own."""

import json
import sys

import pytest
from helpers.processes import python

from jaxrl.cli import table
from jaxrl.core import suite_modules, suites

# What is for pictures, files, logs and other suites, and none of it for a run that has not begun.
NOT_YET = {
    "PIL",
    "brax",
    "google_crc32c",
    "gymnasium",
    "matplotlib",
    "orbax",
    "pandas",
    "scipy",
    "seaborn",
    "tensorboardX",
}


def imported(program: str) -> set[str]:
    """Return the top packages that a process has imported after `program`."""
    last = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    ran = python("-c", f"{program}\n{last}")
    return {name.partition(".")[0] for name in json.loads(ran.stdout.splitlines()[-1])}


def test_importing_jaxrl_imports_nothing_else():
    found = imported("import jaxrl; assert 'train' in dir(jaxrl)") - imported("pass")
    assert found - sys.stdlib_module_names == {"jaxrl"}


@pytest.mark.long
def test_what_trains_imports_nothing_that_waits():
    found = imported("import jaxrl; jaxrl.train; jaxrl.PPO; jaxrl.make('gymnax:CartPole-v1')")
    assert not found & NOT_YET
    assert {"gymnax", "jax"} <= found


@pytest.mark.long
@pytest.mark.parametrize("first", ["import jaxrl.envs.gymnax", "import seaborn, jaxrl.envs.gymnax"])
def test_gymnax_finds_what_it_draws_with(first):
    # Its own modules are imported with stand-ins, which become the libraries when they are used, and only there.
    program = f"""
import sys
{first}
early = {{"matplotlib", "seaborn", "gymnasium"}} & set(sys.modules)
assert early == ({{"matplotlib", "seaborn"}} if "seaborn" in {first!r} else set()), early
assert not any("_Deferred" in type(module).__name__ for module in sys.modules.values())
from gymnax.environments import spaces
assert spaces.gymnax_space_to_gym_space(spaces.Discrete(3)) == sys.modules["gymnasium"].spaces.Discrete(3)
assert early or "matplotlib" not in sys.modules
from gymnax.environments.misc import pong
from gymnax.environments.bsuite import catch
import matplotlib.colors, matplotlib.pyplot, seaborn, gymnasium
assert pong.sns.color_palette is seaborn.color_palette
assert pong.colors.ListedColormap is matplotlib.colors.ListedColormap
assert catch.plt.subplots is matplotlib.pyplot.subplots
assert catch.jax is sys.modules["jax"]
"""
    assert {"gymnax", "seaborn"} <= imported(program)


@pytest.mark.long
def test_a_gymnax_that_was_imported_is_left_alone():
    program = """
import sys, types
import gymnax
kept = gymnax.environments.misc.pong.sns
import jaxrl.envs.gymnax
assert jaxrl.envs.gymnax.gymnax is gymnax
assert kept is gymnax.environments.misc.pong.sns is sys.modules["seaborn"]
"""
    assert "seaborn" in imported(program)


# --- the command line --------------------------------------------------------------------------------------------

RUN = "--env gymnax:CartPole-v1 --total-steps 1000"


WORDS = [
    "--help",
    "train --help",
    "train ppo --help",
    "train ppo --help-all",
    "train --preset rainbow --help",
    "sweep dqn --help",
    "tune dqn --help",
    "eval --help",
    "export-rlds --help",
    "export-minari --help",
    "export-replay --help",
    "dataset --help",
    "plot --help",
    "doctor --help",
    "algos",
    "envs gymnasium",
    "--version",
]
ERRORS = [
    "trian",
    f"train pppo {RUN}",
    f"sweep pppo {RUN}",
    "train ppo --preset purejaxrl-carpole",
    "train dqn --preset purejaxrl-cartpole",
    f"train ppo {RUN} --learnig-rate 1e-3",
    f"train ppo {RUN} --gamma 1.5",
    f"train ppo {RUN} --learning-rate linear:1",
    f"train ppo {RUN} --network.torso mpl:64",
    "train ppo",
    "train ppo --env gymnax:CartPool-v1 --total-steps 1",
    "train ppo --env brax:annt --total-steps 1",
    "train ppo --env envpool:Pongg-v5 --total-steps 1",
    "train ppo --env gymnasium:CartPol-v1 --total-steps 1",
    "train ppo --env gymnaxx:CartPole-v1 --total-steps 1",
    "train ppo --env CartPole-v1 --total-steps 1",
    "train ppo --env CartPole --total-steps 1",
    "eval nowhere --env gymnax:CartPool-v1",
    "envs gym",
]

# What lists every suite imports those whose names are not in the table.
WITHOUT_JAX = {*table.load()["environments"], *suites.INSTALLED_NAMES}
if not any(map(suites.installed, {*suite_modules.SUITES} - WITHOUT_JAX)):
    WORDS.append("envs")


def test_words_and_errors_come_before_jax():
    """Their texts are tested by tests/cli and tests/test_wrong.py."""
    program = """
import contextlib, io, json, sys
from jaxrl.cli.main import main
found = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(command.split())
        except SystemExit as ended:
            code = ended.code
    heavy = {"jax", "flax", "optax", "gymnax", "brax", "envpool"} & {name.partition(".")[0] for name in sys.modules}
    found[command] = [code, *heavy]
print(json.dumps(found))
"""
    ran = python("-c", program, json.dumps(WORDS + ERRORS))
    assert json.loads(ran.stdout) == dict.fromkeys(WORDS, [0]) | dict.fromkeys(ERRORS, [2])
