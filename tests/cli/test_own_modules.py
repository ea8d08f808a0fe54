"""Modules of a user's own on the command line: `--import`, and what it registers, from training to a sweep."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.processes import python
from helpers.registered import nothing_registered_for_good

from jaxrl.cli import main
from jaxrl.cli.imports import import_modules
from jaxrl.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENVIRONMENT_PAGE, ALGORITHM_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("own_environment", "new_algorithm"))
FEW = ["--num-envs", "4", "--evaluation-episodes", "2", "--no-progress"]
NETWORK = """
import flax.linen as nn
import jaxrl

@jaxrl.register
class Own(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, observation):
        features = nn.relu(nn.Dense(self.width)(observation))
        return nn.Dense(2)(features), nn.Dense(1)(features)

@jaxrl.register
def own():
    return jaxrl.networks.from_linen(Own())

@jaxrl.register
def no_network():
    return 3
"""


def code(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which a user has modules; what they register is forgotten."""
    page = ENVIRONMENT_PAGE.read_text()
    registered = 'jaxrl.register("my:Corridor", '
    (limited,) = re.findall(f"^  `({re.escape(registered)}lambda .*)`", page, re.MULTILINE)
    module = code(ENVIRONMENT_PAGE)[0].replace(f"{registered}Corridor)", f"from jaxrl.envs import TimeLimit\n{limited}")
    assert "TimeLimit" in module
    (tmp_path / "mine_env.py").write_text(module.replace('"my:Corridor"', '"mine:Corridor"'))
    (tmp_path / "mine_net.py").write_text(NETWORK)
    (tmp_path / "mine_broken.py").write_text("import mine_env\n1 / 0\n")
    (tmp_path / "mine_needy.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with nothing_registered_for_good():
        yield tmp_path
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


# --- what is wrong with it is told in a line -----------------------------------------------------------------------


def test_words_are_kept_and_modules_imported_once(folder):
    words = import_modules(["eval", "runs/x", "--import", "mine_env", "--best", "--import=mine_net,mine_env"])
    assert words == ["eval", "runs/x", "--best", "--import=mine_env,mine_net,mine_env"]
    assert {"mine_env", "mine_net"} <= set(sys.modules)
    assert import_modules(["eval", "runs/x"]) == ["eval", "runs/x"]


def test_modules_of_gymnasium_environments_are_found_in_the_current_folder(folder):
    import_modules(["train", "ppo", "--env", "gymnasium:CartPole-v1"])
    assert str(folder) not in sys.path
    assert import_modules(["eval", "--env=gymnasium:mine_gym:Line-v0"]) == ["eval", "--env=gymnasium:mine_gym:Line-v0"]
    assert sys.path[0] == str(folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--import"], "needs a module name"),
        (["--import", "--best"], "needs a module name"),
        (["--import", ""], "needs a module name"),
        (["--import", "mine_nowhere"], "no module 'mine_nowhere' in .* or among the installed"),
        (["--import", "mine_nowhere.part"], "no module 'mine_nowhere' in"),
        (["--import", "./mine_env.py"], "try --import mine_env"),
        (["--import", "mine_broken"], "--import mine_broken: ZeroDivisionError: division by zero"),
        (["--import", "mine_needy"], "--import mine_needy: ModuleNotFoundError: No module named 'surely_not_inst"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_imported(folder, words, told):
    with pytest.raises(ConfigError, match=told):
        import_modules(["algos", *words])


def test_the_traceback_of_a_broken_module_is_shown(folder, capsys):
    assert main.main(["algos", "--import", "mine_broken"]) == 2
    said = capsys.readouterr().err
    assert "1 / 0" in said and said.splitlines()[-1].startswith("error: --import mine_broken")


def told(capsys, *words):
    assert main.main([*words]) == 2
    return capsys.readouterr().err


def test_what_was_not_imported_is_asked_for(folder, capsys):
    train = ("train", "ppo", "--total-steps", "64", "--env")
    assert "--import MODULE" in told(capsys, *train, "mine:Corridor")
    assert "--import MODULE" in told(capsys, "train", "mine_algo", "--env", "gymnax:CartPole-v1", "--total-steps", "64")
    assert "pass its module to --import" in told(capsys, *train, "gymnax:CartPole-v1", "--network", "own")
    wrong = ("--import", "mine_net", "--network")
    assert "did not return a network: it returned 3" in told(capsys, *train, "gymnax:CartPole-v1", *wrong, "no_network")
    both = (*wrong, "own", "--network.torso", "mlp:8", "--network.shared", "true")
    said = told(capsys, *train, "gymnax:CartPole-v1", *both)
    assert said.count("cannot be used with --network, which replaces that network") == 2


# --- from training to a sweep --------------------------------------------------------------------------------------


def ran(*words, code=0):
    """A command line in a process of its own."""
    found = python("-m", "jaxrl.cli.main", *words, code=code, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return found.stdout + found.stderr


@pytest.mark.long
def test_an_environment_and_a_network_of_ones_own(folder):
    imported = ["--import", "mine_env,mine_net"]
    train = ["train", "ppo", *imported, "--env", "mine:Corridor", "--network", "own", "--rollout-length", "16", *FEW]
    train += ["--run-dir", "runs/mine", "--env-params", "half_width=3.0"]
    ran(*train, "--total-steps", "512")
    metrics = Path("runs/mine/metrics.jsonl")
    before = metrics.read_text()
    ran(*train, "--total-steps", "768")
    assert metrics.read_text().startswith(before)  # it was resumed
    text = Path("runs/mine/config.json").read_text()
    assert '"user:Own"' in text and '"parameters":{"half_width":3.0}' in re.sub(r"\s", "", text)
    assert '"mine"' in text and "mine_" not in text  # names, and no module
    assert "return" in ran("eval", "runs/mine", *imported, "--episodes", "2")
    said = ran("eval", "runs/mine", "--episodes", "2", code=2)
    assert said.count("\n") == 1 and "--import MODULE" in said
    ran("plot", "runs/mine", *imported)
    sweep = ["sweep", "ppo", *imported, "--env", "mine:Corridor", "--network", "own", "--rollout-length", "16", *FEW]
    assert "0.002" in ran(*sweep, "--total-steps", "256", "--seeds", "2", "--grid", "learning_rate=0.001,0.002")
    assert "mine:Corridor" in ran("envs", "mine", *imported)


@pytest.mark.long
def test_the_page_on_algorithms_from_an_empty_folder(folder):
    algorithm, replayed, loss = (
        next(block for block in code(ALGORITHM_PAGE) if word in block) for word in ("VPG", "SoftQ", "penalty")
    )
    names = re.findall(r"^(?:from .* )?import (.*)$", algorithm, re.MULTILINE)
    assert sum(len(line.split(",")) for line in names) <= 10
    Path("vpg.py").write_text(algorithm)
    Path("softq.py").write_text(replayed)
    Path("my_losses.py").write_text(loss)
    text = ALGORITHM_PAGE.read_text()
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    commands = [words[1:] for line in lines if (words := shlex.split(line))]
    assert [words[0] for words in commands] == ["train", "eval", "plot", "sweep", "train", "train", "eval"]
    few = {"--total-steps": "512", "--episodes": "2", "--seeds": "2", "--num-envs": "4"}
    for words in commands:
        shorter = [few.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        ran(*shorter, *(FEW[2:] if words[0] in ("train", "sweep") else []))
    assert "user:log_ratio_penalty" in Path("runs/penalty/config.json").read_text()
    refused = ["train", "softq", "--import", "softq", "--env", "gymnax:CartPole-v1", "--total-steps", "512"]
    assert "must be ActionValues()" in ran(*refused, "--network.head", "categoricalvalues", code=2)
    assert "VPG options" in ran("train", "vpg", "--import", "vpg", "--help")
