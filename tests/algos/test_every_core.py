"""Every recurrent family with every core that unrolls in parallel: it learns from what acted, and can be kept."""

import dataclasses

import jax
import numpy as np
import pytest
from algorithms import ALGORITHMS
from helpers.programs import ENV, NUM_ENVS, ROWS, SMALL, Interrupt, all_finite, anakin, assert_equal
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.fields import Memory
from jaxrl.networks import LRU, Actor, ActorCritic, Critic, GTrXL, MinGRU, QNetwork

CORES = {"mingru": MinGRU(8, layers=2), "lru": LRU(8), "gtrxl": GTrXL(8, layers=2, heads=2, memory=5)}
PENDULUM = jaxrl.make("gymnax:Pendulum-v1", max_steps_in_episode=12)
SEQUENCES = {"memory": Memory(length=6, burn_in=2), "batch_size": 40, "replay_ratio": 1 / ROWS}


def with_core(family, core):
    """Return the algorithm and its environment."""
    network = ActorCritic(SMALL, core=core, previous_action=True)
    policy, critic = Actor(torso=SMALL, core=core, widths=()), Critic(torso=SMALL, core=core, widths=())
    fields = {
        "recurrent_ppo": {"network": network, "epochs": 1, "minibatches": 1},
        "a2c": {"network": network},
        "impala": {"network": dataclasses.replace(network, shared=True)},
        "vmpo": {"network": network},
        "pqn": {"network": QNetwork(SMALL, core=core)},
        "r2d2": {"network": QNetwork(SMALL, core=core, previous_reward=True)},
        "sac": {"policy": policy, "critic": critic, **SEQUENCES},
        "td3": {"policy": dataclasses.replace(policy, stochastic=False), "critic": critic, **SEQUENCES},
    }[family]
    return ALGORITHMS[family].replace(**fields), PENDULUM if family in ("sac", "td3") else ENV


def train(family, core, iterations=6, **settings):
    algo, env = with_core(family, CORES[core])
    settings = {"evaluation_episodes": 4, "progress": False, "log_every": ROWS, "topology": anakin()} | settings
    return jaxrl.train(algo, env, total_steps=iterations * ROWS, **settings)


@pytest.mark.parametrize(
    ("family", "core"),
    one_quick(
        [(family, core) for family in ("recurrent_ppo", "impala") for core in CORES],
        ("recurrent_ppo", "mingru"),
    ),
)
def test_an_update_unrolls_what_acted(family, core):
    """In one pass over a rollout, probabilities are those of acting: of single steps, from the carry that was kept."""
    result = train(family, core)
    divergences = [row["update/approximate_kl"] for row in result.metrics if "update/approximate_kl" in row]
    norms = [row["update/gradient_norm"] for row in result.metrics if "update/gradient_norm" in row]
    assert len(divergences) == 6 and np.abs(divergences).max() < 1e-6 and min(norms) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "core"),
    [(family, core) for family in ("a2c", "vmpo", "pqn", "r2d2", "sac", "td3") for core in CORES],
)
def test_every_family_learns_with_it_and_its_policy_can_be_kept(family, core, tmp_path):
    result = train(family, core, run_dir=tmp_path / "run")
    begun = train(family, core, iterations=1, topology=jaxrl.Anakin(num_envs=NUM_ENVS, devices=1, shards=4))
    before, after = (jax.tree.leaves(r.policy.actor.params) for r in (begun, result))
    assert all_finite(result.state) and all(np.any(a != b) for a, b in zip(before, after, strict=True))
    loaded, carries = jaxrl.load(tmp_path / "run"), [None, None]
    for step in range(8):
        seen = np.random.default_rng(step).normal(size=(5, *result.policy.spec.observation_space.shape))
        first = np.arange(5) == step
        actions = []
        for i, policy in enumerate((result.policy, loaded)):
            action, carries[i] = policy(seen.astype(np.float32), carries[i], first=first, reward=np.ones(5, np.float32))
            actions.append(action)
        np.testing.assert_array_equal(*actions)


@pytest.mark.long
@pytest.mark.parametrize("family", ["recurrent_ppo", "r2d2"])
def test_a_run_with_a_memory_of_steps_goes_on_bit_for_bit(family, tmp_path):
    settings = {"checkpoint_every": 2 * ROWS}
    whole = train(family, "gtrxl", iterations=12, run_dir=tmp_path / "whole", **settings)
    half = train(family, "gtrxl", iterations=12, run_dir=tmp_path / "run", loggers=[Interrupt(4 * ROWS)], **settings)
    assert half.stopped == "interrupted" and half.total_steps < whole.total_steps
    resumed = train(family, "gtrxl", iterations=12, run_dir=tmp_path / "run", **settings)
    assert_equal(whole.state, resumed.state)
