"""What a start imports: each test looks at `sys.modules` in a process of its own."""

import json
import subprocess
import sys

import pytest

# What is for pictures, files, logs and other suites, and none of it for a run that has not begun.
NOT_YET = {"PIL", "brax", "gymnasium", "matplotlib", "orbax", "pandas", "scipy", "seaborn", "tensorboardX"}


def imported(program: str) -> set[str]:
    """The top packages that a process has imported after `program`."""
    last = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", f"{program}\n{last}"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return {name.partition(".")[0] for name in json.loads(ran.stdout.splitlines()[-1])}


def test_importing_jaxrl_imports_nothing_else():
    found = imported("import jaxrl; assert 'train' in dir(jaxrl)") - imported("pass")
    assert found - sys.stdlib_module_names == {"jaxrl"}


def test_what_trains_imports_nothing_that_waits():
    found = imported("import jaxrl; jaxrl.train; jaxrl.PPO; jaxrl.make('gymnax:CartPole-v1')")
    assert not found & NOT_YET
    assert {"gymnax", "jax"} <= found


@pytest.mark.parametrize(
    "first", ["import jaxrl.envs.gymnax", pytest.param("import seaborn, jaxrl.envs.gymnax", marks=pytest.mark.long)]
)
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
