"""What one reads to understand an update: the lines of algos/ in functions that it enters while a run is traced."""

import collections
import sys
from pathlib import Path

import jax
import pytest
from helpers.code_size import lines_of_code

import jaxrl

FOLDER = str(Path(jaxrl.__file__).parent / "algos")
DISCRETE, CONTINUOUS = "gymnax:CartPole-v1", "gymnax:Pendulum-v1"
# The environment, lines and files, and lines also outside of `update`: a change may lower these numbers.
MOST = {
    "ppo": (DISCRETE, 415, 8, 498),
    "sac": (CONTINUOUS, 432, 14, 642),
    "dqn": (DISCRETE, 335, 8, 417),
    "td3": (CONTINUOUS, 407, 10, 563),
    "crossq": (CONTINUOUS, 449, 15, 659),
    "reppo": (CONTINUOUS, 593, 14, 703),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MOST)
def test_an_update_is_read_in_few_lines(name):
    algo, depth, (env, *most) = jaxrl.make_algorithm(name), 0, MOST[name]
    updates = {kind.update.__code__ for kind in type(algo).__mro__ if "update" in vars(kind)}
    within, anywhere = collections.defaultdict(set), collections.defaultdict(set)

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        depth += (code in updates) * {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and code.co_filename.startswith(FOLDER):
            for found in [anywhere, within][: 1 + (depth > 0)]:
                found[code.co_filename] |= lines_of_code(code)

    train = jaxrl.make_train(algo, env, total_steps=20_000)
    sys.setprofile(profile)
    try:
        jax.make_jaxpr(train)(jax.random.key(0))
    finally:
        sys.setprofile(None)
    read = [sum(map(len, within.values())), len(within), sum(map(len, anywhere.values()))]
    assert all(now <= limit for now, limit in zip(read, most, strict=True)), read
