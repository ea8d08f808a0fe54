"""What a start imports: each test looks at `sys.modules` in a process of its own."""

import json
import subprocess
import sys

import pytest

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
    """The top packages that a process has imported after `program`."""
    last = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", f"{program}\n{last}"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
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
def test_gymnax_gets_a_library_when_it_uses_it():
    program = """
import sys, jaxrl.envs.gymnax
from gymnax.environments import spaces
assert "gymnasium" not in sys.modules
assert spaces.gymnax_space_to_gym_space(spaces.Discrete(3)) == sys.modules["gymnasium"].spaces.Discrete(3)
"""
    assert "matplotlib" not in imported(program)


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
from gymnax.environments.misc import pong
from gymnax.environments.bsuite import catch
import matplotlib.colors, matplotlib.pyplot, seaborn, gymnasium
assert spaces.gymnax_space_to_gym_space(spaces.Discrete(3)) == gymnasium.spaces.Discrete(3)
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


# What they print, and a part of it.
WORDS = [
    ("--help", "train an algorithm"),
    ("train --help", "jaxrl train ppo --help"),
    ("train ppo --help", "--network.torso"),
    ("train ppo --help-all", "--coordinator"),
    ("train --preset rainbow --help", "6.25e-05"),
    ("sweep dqn --help", "--grid"),
    ("tune dqn --help", "--space"),
    ("eval --help", "--step-timeout"),
    ("export-rlds --help", "array_record"),
    ("export-minari --help", "--env-spec"),
    ("export-replay --help", "--unfinished"),
    ("dataset --help", "--split"),
    ("plot --help", "learning_curves.png"),
    ("doctor --help", "--run-dir"),
    ("algos", "purejaxrl-cartpole"),
    ("envs gymnasium", "gymnasium:CartPole-v1"),
    ("--version", "jaxrl"),
]
ERRORS = [
    ("trian", "did you mean 'train'"),
    (f"train pppo {RUN}", "unknown algorithm 'pppo'; did you mean 'ppo'"),
    (f"sweep pppo {RUN}", "unknown algorithm 'pppo'; did you mean 'ppo'"),
    ("train ppo --preset purejaxrl-carpole", "did you mean 'purejaxrl-cartpole'"),
    ("train dqn --preset purejaxrl-cartpole", "is for PPO, not for dqn"),
    (f"train ppo {RUN} --learnig-rate 1e-3", "unknown flag '--learnig-rate'; did you mean '--learning-rate'"),
    (f"train ppo {RUN} --gamma 1.5", "PPO.gamma=1.5 must be at least 0 and at most 1"),
    (f"train ppo {RUN} --learning-rate linear:1", "write linear:START:END[:UNTIL]"),
    (f"train ppo {RUN} --network.torso mpl:64", "unknown part 'mpl'; did you mean 'mlp'"),
    ("train ppo", "--total-steps N"),
    ("train ppo --env gymnax:CartPool-v1 --total-steps 1", "did you mean 'CartPole-v1'"),
    ("train ppo --env brax:annt --total-steps 1", "did you mean 'ant'"),
    ("train ppo --env envpool:Pongg-v5 --total-steps 1", "'Pong-v5'"),
    ("train ppo --env gymnasium:CartPol-v1 --total-steps 1", "'CartPole-v1'"),
    ("train ppo --env gymnaxx:CartPole-v1 --total-steps 1", "unknown suite 'gymnaxx'"),
    ("train ppo --env CartPole-v1 --total-steps 1", "'gymnasium:CartPole-v1' or 'gymnax:CartPole-v1'"),
    ("train ppo --env CartPole --total-steps 1", "jaxrl envs lists those of all suites"),
    ("eval nowhere --env gymnax:CartPool-v1", "did you mean 'CartPole-v1'"),
    ("envs gym", "unknown suite 'gym'; did you mean 'gymnax'"),
]


# What lists every suite imports those whose names are not in the table.
WITHOUT_JAX = {*table.load()["environments"], *suites.INSTALLED_NAMES}
if not any(map(suites.installed, {*suite_modules.SUITES} - WITHOUT_JAX)):
    WORDS.append(("envs", "gymnasium:CartPole-v1"))


@pytest.fixture(scope="module")
def said():
    """By command line, its exit code, what it printed, and what it had imported then of what is heavy."""
    program = """
import contextlib, io, json, sys
from jaxrl.cli.main import main
found = {}
for command in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(command.split())
        except SystemExit as ended:
            code = ended.code
    heavy = {"jax", "flax", "optax", "gymnax", "brax", "envpool"} & {name.partition(".")[0] for name in sys.modules}
    found[command] = [code, " ".join(printed.getvalue().split()), sorted(heavy)]
print(json.dumps(found))
"""
    commands = json.dumps([command for command, _ in (*WORDS, *ERRORS)])
    ran = subprocess.run([sys.executable, "-c", program, commands], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(("command", "part"), WORDS)
def test_words_come_before_jax(said, command, part):
    code, printed, heavy = said[command]
    assert (code, heavy) == (0, []) and part in printed


@pytest.mark.parametrize(("command", "part"), ERRORS)
def test_errors_come_before_jax(said, command, part):
    code, printed, heavy = said[command]
    assert (code, heavy) == (2, []) and part in printed
