"""Tables of docs/choosing.md: the environments that each algorithm takes at its defaults, and what it then chooses.

`tests/test_docs.py` compares the page with them; `scripts/update_field_tables.py` writes them to the page.
"""

import pathlib
import re

import numpy as np

from jaxrl.algos import ALGORITHMS
from jaxrl.core import spaces
from jaxrl.core.types import EnvSpec

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "choosing.md"
NUM_ENVS = 8
NAMES = [path.stem for path in sorted((PAGE.parent / "algorithms").glob("*.md"))]  # whoever runs may register others
_PLACE = re.compile(r"(<!-- kinds: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

VECTOR = spaces.Box(-np.inf, np.inf, (4,))
ACTIONS = {
    "`Discrete`": spaces.Discrete(3),
    "`MultiDiscrete`": spaces.MultiDiscrete((3, 2)),
    "bounded `Box`": spaces.Box(-1.0, 1.0, (2,)),
    "unbounded `Box`": spaces.Box(-np.inf, np.inf, (2,)),
    "`Dict`, `Tuple`": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)),))}),
}
OBSERVATIONS = {
    "vector": VECTOR,
    "10×10 grid": spaces.Box(0.0, 1.0, (10, 10, 4)),
    "84×84 frames": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "dictionary": spaces.Dict({"vector": VECTOR, "frame": spaces.Box(0, 255, (84, 84, 3), np.uint8)}),
    "`Discrete`": spaces.Discrete(5),
}


def problems(name: str, observation: spaces.Space, action: spaces.Space) -> list[str]:
    """Return the problems of an algorithm at its defaults with an environment of these spaces."""
    spec = EnvSpec("an environment", observation, action)
    return ALGORITHMS[name]().resolve(spec, NUM_ENVS).validate(spec, NUM_ENVS, NUM_ENVS)


def with_tables(text: str) -> str:
    """Return a page with the tables between `<!-- kinds: NAME -->` and `<!-- end -->` made again."""
    tables = {"actions": _actions, "observations": _observations}
    return _PLACE.sub(lambda found: f"{found[1]}{tables[found[2]]()}\n{found[3]}", text)


def _actions() -> str:
    lines = [f"| algorithm | {' | '.join(ACTIONS)} |", "|---" * (len(ACTIONS) + 1) + "|"]
    for name in NAMES:
        taken = ["" if problems(name, VECTOR, action) else "yes" for action in ACTIONS.values()]
        lines.append(f"| `{name}` | {' | '.join(taken)} |")
    return "\n".join(lines)


def _observations() -> str:
    lines = ["| observations | PPO's torso | shared by policy and value |", "|---|---|---|"]
    for name, observation in OBSERVATIONS.items():
        spec = EnvSpec("an environment", observation, spaces.Discrete(3))
        network = ALGORITHMS["ppo"]().resolve(spec, NUM_ENVS).network
        lines.append(f"| {name} | `{type(network.torso).__name__}` | {'yes' if network.shared else 'no'} |")
    return "\n".join(lines)
