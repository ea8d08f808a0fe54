"""Seeds: every one that is accepted gives other random numbers, and every other value is refused by name."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.core import keys
from jaxrl.core.errors import ConfigError
from jaxrl.core.limits import checked_seed, seed_problems
from jaxrl.data.order import permuted
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.networks import MLP, ActorCritic
from jaxrl.plots.curves import bootstrap_interval
from jaxrl.run.directory.follow import follow
from jaxrl.sweeps.distributions import Uniform, checked_seeds, configurations

SEEDS = st.integers(0, 2**63 - 1)
NO_SEEDS = [-1, 2**63, 2**70, 0.0, 1.5, np.float32(1), True, np.True_, "3", None, np.zeros(1, int), jnp.float32(1)]
PPO = jaxrl.PPO(rollout_length=8, epochs=1, minibatches=1, network=ActorCritic(torso=MLP((8,))))


@given(SEEDS)
def test_the_words_of_a_root_key_are_those_of_the_seed(seed):
    found = keys.root_key(seed)
    assert jax.random.key_data(found).tolist() == [seed >> 32, seed % 2**32]
    assert jax.random.key_data(keys.root_key(seed % 2**32)).tolist() == [0, seed % 2**32]


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, 2**31, 2**32 - 1])
def test_below_two_to_the_32_it_is_the_key_of_jax(seed):
    of_ours, of_jax = keys.root_key(seed), jax.random.key(seed)
    np.testing.assert_array_equal(jax.random.key_data(of_ours), jax.random.key_data(of_jax))
    np.testing.assert_array_equal(jax.random.bits(of_ours, (4,)), jax.random.bits(of_jax, (4,)))


def test_other_algorithms_have_the_words_twice():
    with jax.default_prng_impl("rbg"):
        assert jax.random.key_data(keys.root_key(5 * 2**32 + 3)).tolist() == [5, 3, 5, 3]
        np.testing.assert_array_equal(jax.random.key_data(keys.root_key(3)), jax.random.key_data(jax.random.key(3)))


def test_with_64_bit_integers_it_is_the_key_of_jax():
    with jax.enable_x64(True):
        of_jax = jax.random.key_data(jax.random.key(2**62 + 5))
        np.testing.assert_array_equal(jax.random.key_data(keys.root_key(2**62 + 5)), of_jax)


@given(SEEDS, st.sampled_from([2**32, 2**40, 2**62, 5 * 2**33]))
def test_seeds_that_differ_in_their_high_word_give_other_numbers(seed, added):
    other = (seed + added) % 2**63
    for derived in (
        environment_seeds(seed, 8) != environment_seeds(other, 8),
        permuted(np.arange(200), 200, seed).tolist() != permuted(np.arange(200), 200, other).tolist(),
        configurations(3, {"clip": Uniform(0, 1)}, seed) != configurations(3, {"clip": Uniform(0, 1)}, other),
        keys.held_out_seed(seed) != keys.held_out_seed(other),
        keys.evaluation_seed(seed) != keys.evaluation_seed(other),
    ):
        assert derived


@given(SEEDS)
def test_integers_of_numpy_and_jax_are_the_same_seed(seed):
    for kind in (np.int64, np.uint64, np.asarray):
        assert checked_seed("seed", kind(seed)) == seed and type(checked_seed("seed", kind(seed))) is int
    assert checked_seed("seed", jnp.int32(seed % 2**31)) == seed % 2**31
    assert checked_seeds([np.int64(seed)]) == [seed]


@pytest.mark.parametrize("seed", NO_SEEDS, ids=repr)
def test_what_is_not_a_seed_is_refused_by_name(seed):
    [problem] = seed_problems("search_seed", seed)
    assert problem.startswith("search_seed=") and "from 0 to 2^63 - 1" in problem


def calls():
    """Everything in public that takes a seed: (name, call of a seed)."""
    env, settings = "gymnax:CartPole-v1", {"total_steps": 16, "num_envs": 2, "progress": False}
    yield "train", lambda seed: jaxrl.train(PPO, env, seed=seed, **settings)
    yield "sweep", lambda seed: jaxrl.sweep(PPO, env, seeds=[seed], **settings)
    searched = {"num_samples": 2, "learning_rate": Uniform(1e-4, 1e-3)}
    yield "sweep's search", lambda seed: jaxrl.sweep(PPO, env, search_seed=seed, **searched, **settings)
    yield "pbt", lambda seed: jaxrl.pbt(PPO, env, seed=seed, **settings)
    yield "tune", lambda seed: jaxrl.tune(PPO, env, search_seed=seed, trials=1, **settings)
    yield "check_env", lambda seed: jaxrl.check_env(jaxrl.make(env), seed=seed)
    yield "check_env of a recipe", lambda seed: jaxrl.check_env(jaxrl.make("gymnasium:CartPole-v1"), seed=seed)
    yield "gymnasium", lambda seed: jaxrl.make("gymnasium:CartPole-v1").build(1, seed)
    yield "envpool", lambda seed: jaxrl.make("envpool:CartPole-v1").build(1, seed)
    yield "bootstrap", lambda seed: bootstrap_interval([np.zeros((2, 1))], seed=seed)


@pytest.mark.parametrize(("name", "call"), list(calls()), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True], ids=repr)
def test_every_call_refuses_what_is_not_a_seed(name, call, seed):
    raises(ConfigError, rf"seeds?={seed!r} ", call, seed)


@pytest.mark.long
def test_a_policy_is_evaluated_drawn_and_exported_by_seeds_alone(trained, tmp_path):
    result = trained(0)
    for call in (
        lambda seed: result.evaluate(2, seed=seed),
        lambda seed: jaxrl.render(result.policy, "gymnax:CartPole-v1", tmp_path / "a.gif", seed=seed),
        lambda seed: jaxrl.export_rlds(result.policy, "gymnax:CartPole-v1", tmp_path / "a", episodes=1, seed=seed),
        lambda seed: next(follow(tmp_path, seed=seed)),
    ):
        raises(ConfigError, "seed=-2 ", call, -2)
    assert not list(tmp_path.iterdir())
    data = jaxrl.load_dataset(
        f"rlds:{jaxrl.export_rlds(result.policy, 'gymnax:CartPole-v1', tmp_path / 'a', episodes=4, progress=False)}"
    )
    for call in (lambda seed: data.split(0.5, seed=seed), lambda seed: data.loader(2, seed=seed)):
        for seed in (-2, 2**63, 1.5):
            raises(ConfigError, rf"seed={seed} ", call, seed)
    large = [result.evaluate(8, seed=seed).returns.tolist() for seed in (1, 2**32 + 1, np.int64(2**32 + 1))]
    assert large[0] != large[1] == large[2]


@pytest.fixture(scope="module")
def trained():
    """A result of two updates by its seed."""
    settings = {"total_steps": 32, "num_envs": 2, "evaluate_every": 0, "evaluation_episodes": 2, "progress": False}
    return lambda seed: jaxrl.train(PPO, "gymnax:CartPole-v1", seed=seed, **settings)


@pytest.mark.long
def test_runs_of_seeds_above_two_to_the_32_differ(trained):
    def learned(seed):
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(trained(seed).state.learner.network.params)])

    found = [learned(seed) for seed in (0, 2**32, 2**62, np.int64(2**62))]
    assert not (found[0] == found[1]).all() and not (found[1] == found[2]).all()
    np.testing.assert_array_equal(found[2], found[3])


def test_no_function_of_ours_takes_a_seed_that_is_not_tried_here():
    """A new public function with a seed is to be tried above."""
    taking = {name for name in jaxrl.__all__ if _takes_a_seed(getattr(jaxrl, name))}
    assert taking <= {
        "train",
        "sweep",
        "pbt",
        "tune",
        "check_env",
        "evaluate",
        "render",
        "export_rlds",
        "export_minari",
    }


def _takes_a_seed(found):
    return inspect.isfunction(found) and bool({"seed", "seeds"} & set(inspect.signature(found).parameters))
