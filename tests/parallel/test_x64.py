"""Training where JAX computes with 64 bits, `JAX_ENABLE_X64=1`: in processes of their own, and mostly traced only."""

import pytest
from helpers.processes import environment, python
from helpers.registered import OWN_ALGORITHMS


def traced(*cases):
    """The cases of `helpers/x64.py` that a process with 64 bits traces: of those named, or all."""
    return python("-m", "helpers.x64", *cases, env=environment(JAX_NUM_CPU_DEVICES="1")).stdout.splitlines()


@pytest.mark.long
def test_a_replay_and_noise_are_traced_with_64_bits():
    """One of each kind of family: of values, with noise, on rollouts, from a dataset."""
    cases = ["dqn discrete", "td3 continuous", "ppo continuous", "bc discrete"]
    assert sorted(traced(*cases)) == sorted(cases)


@pytest.mark.long
def test_every_algorithm_and_every_kind_of_replay_are_traced_with_64_bits():
    found = traced()
    own = set(OWN_ALGORITHMS)
    assert {case.split()[0] for case in found} >= own, "those of other tests are registered here too"
    assert {"prioritized", "lifo", "heap", "flashbax", "sequences", "frames"} <= set(found)
