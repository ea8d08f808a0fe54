"""What one reads to understand an update: the lines of algos/ in functions that it enters while a run is traced."""

import collections
import sys

import jax
import pytest
from helpers.code_size import lines_of_code

import jaxrl

FOLDER = jaxrl.algos.__path__[0]
DISCRETE, CONTINUOUS = "gymnax:CartPole-v1", "gymnax:Pendulum-v1"
# The environment, lines and files, and lines also outside of `update`: a change may lower these numbers.
MOST = {
    "ppo": (DISCRETE, 415, 8, 500),
    "sac": (CONTINUOUS, 431, 14, 643),
    "dqn": (DISCRETE, 334, 8, 418),
    "td3": (CONTINUOUS, 406, 10, 564),
    "crossq": (CONTINUOUS, 448, 15, 660),
    "reppo": (CONTINUOUS, 593, 14, 705),
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
        depth += (code in updates) * ((event == "call") - (event == "return"))
        if event == "call" and code.co_filename.startswith(FOLDER):
            for found in [anywhere, within] if depth else [anywhere]:
                found[code.co_filename] |= lines_of_code(code)

    train = jaxrl.make_train(algo, env, total_steps=20_000)
    sys.setprofile(profile)
    try:
        jax.make_jaxpr(train)(jax.random.key(0))
    finally:
        sys.setprofile(None)
    read = [sum(map(len, within.values())), len(within), sum(map(len, anywhere.values()))]
    assert [*map(max, read, most)] == most, read
