"""What an actor runs is compiled once a run: a second time would hold all environments, and be paid in every start."""

import pytest
from helpers.programs import ALGORITHMS, NUM_ENVS, started

import jaxrl
from jaxrl.parallel.host_rollout import HostSteps

ACTORS = ("beginnings", "roots", "storage", "act", "act_some", "finish")


def compiled():
    return {name: getattr(HostSteps, name)._cache_size() for name in ACTORS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "act"),
    [({}, "act"), ({"ready": 2}, "act_some")],
    ids=["one batch a group", "ready"],
)
def test_an_actors_programs_are_compiled_once(topology, act):
    algo = ALGORITHMS["ppo"].replace(rollout_length=3)  # a length of its own: no other test has compiled it
    env = jaxrl.make("envpool:CartPole-v1", num_threads=2)
    before = compiled()
    with started(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology), algo, env) as (program, state):
        for _ in range(3):
            state, _ = program.chunk(algo, env, state, 1, 100)
    new = {name: size - before[name] for name, size in compiled().items()}
    assert new[act] == 1 and max(new.values()) == 1
