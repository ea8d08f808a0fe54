"""The rows of docs/systems.md, and their commands and tests in tests/systems.toml."""

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np

from helpers.made import whole
from helpers.recorded import write_rlds
from jaxrl.data.episodes import TERMINATED
from jaxrl.run.presets import preset

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "systems.md").read_text()
FOUND = [line for line in PAGE.split("\n") if line.startswith("| ") and not line.startswith("| feature |")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in FOUND]
CHECKS = tomllib.loads((TESTS / "systems.toml").read_text())
# As typed, with what stands before them.
LINES = sorted({line for check in CHECKS.values() for line in check["commands"]})
COMMANDS = [line[line.index("jaxrl ") :] for line in LINES]


def write_datasets(folder):
    """Write the datasets that the commands read, data/cartpole and data/pendulum."""
    for name, width, action in (("cartpole", 4, np.int32(1)), ("pendulum", 3, np.float32([0.5]))):
        observations, actions = np.zeros((6, width), np.float32), np.stack([action] * 6)
        reward, discount = np.ones((2, 6), np.float32)
        episode = whole(observations, actions, reward, discount, TERMINATED)
        write_rlds(folder / "data" / name, [episode] * 60)


TRAINING = ("train", "sweep", "tune", "pbt")
LONGEST = 128  # steps of a rollout


def shortened(line):
    """Return the environment variables and the words of a command that is to make a few updates, in its own process.

    A preset makes one round of rollouts, after those that fill its small replay; one of whole episodes as many as
    complete a few. A dataset alone is learned from in a few updates. Others take a few more steps than fill their
    replay at first.
    """
    variables, words = line[: line.index("jaxrl ")].split(), shlex.split(line[line.index("jaxrl ") :])[1:]
    added: dict[str, int | str | None] = {}
    if words[0] in TRAINING:
        added |= {"--evaluation-episodes": 2, "--no-progress": None}
        added |= {} if "--run-dir" in words else {"--run-dir": "runs/new"}
        if "--preset" in words:
            published = preset(words[words.index("--preset") + 1])
            length = getattr(published.algorithm, "rollout_length", None) or 1
            if length > LONGEST:
                length = LONGEST
                added |= {"--rollout-length": length}
            steps = published.topology["num_envs"] * length
            if getattr(published.algorithm, "whole_episodes", None):
                added |= {"--whole-episodes": f"episodes=2:max_length={length}"}
                steps *= 2  # by then every environment completed an episode
            if hasattr(published.algorithm, "min_size"):
                least = max(steps, 1_000)
                added |= {"--min-size": least, "--capacity": 8 * least}
                steps = least + 5 * steps  # a sequence may take some rollouts
            added |= {"--total-steps": steps, "--evaluate-every": 0}
        else:
            added |= {"--total-steps": 50 if "--eval-env" in words else 1_200}
            words = [re.sub(r"max_length=\d+", "max_length=40", word) for word in words]
    further = [str(word) for pair in added.items() for word in pair if word is not None]
    return dict(variable.split("=") for variable in variables), words + further
