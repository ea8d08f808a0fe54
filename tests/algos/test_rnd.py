"""Random network distillation: a whole update in numpy, and what its stream of observations is."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs
from helpers.field_tables import expected_table
from helpers.on_policy import SPEC, B, T, broken_moments, collect, learner, moments, updated, updated_on_two
from helpers.oracle import exact, gradient
from helpers.refused import refused
from helpers.rnd import EPS, Past
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import rnd
from jaxrl.algos.base import replace
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.algos.optimizers import Adam
from jaxrl.algos.q_learning import transition_keys
from jaxrl.algos.rnd import RND
from jaxrl.cli.sweep import read_space
from jaxrl.core.config import decode, encode
from jaxrl.core.schedules import Linear, resolve_schedules
from jaxrl.networks import MLP, ActorCritic
from jaxrl.parallel.replicas import SingleReplica
from jaxrl.sweeps.distributions import Uniform
from jaxrl.sweeps.search_spaces import search_space

BONUS = RND(
    learning_rate=0.03,
    gamma=0.8,
    gae_lambda=0.7,
    extrinsic_weight=3.0,
    intrinsic_weight=0.5,
    observation_clip=1.3,
    predictor_fraction=1.0,
    features=3,
    widths=(5,),
    torso=MLP((4,)),
)
ONCE = {
    "rollout_length": T,
    "network": ActorCritic(MLP((4,)), policy_gain=2.0),
    "exploration_bonus": BONUS,
    "learning_rate": 0.1,
    "optimizer": Adam(eps=1e-2),  # so large that a step shows the size of its gradient
}
ALGORITHMS = {
    "ppo": jaxrl.PPO(**ONCE, epochs=1, minibatches=1),
    "a2c": jaxrl.A2C(**ONCE),
    "impala": jaxrl.IMPALA(**ONCE),
    "vmpo": jaxrl.VMPO(**ONCE, epochs=1, minibatches=1),
}


DECAYS = {1: 0.9, 2: 0.999}  # of Adam's averages of gradients to this power


def rollouts(algo, spec=SPEC):
    """Two of other time steps, the second with endings of each kind, by an actor of other parameters."""
    actor = resolve_schedules(algo, jnp.float32(0)).actor(learner(algo, 1))
    for seed, timesteps in ((1, moments(seed=7)), (2, broken_moments())):
        yield collect(algo, actor, timesteps, jax.random.key(seed), spec)


def chosen_rows(fraction):
    """Those of the predictor in the first pass of an update on one device, by the key of `updated`."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), 1))[1]
    chance = jax.vmap(lambda k: jax.random.uniform(k, (T,)))(transition_keys(key, B, SingleReplica())).T
    return np.asarray(chance) < fraction


def adam(params, gradient, averages, number):
    """Parameters after a step of Adam, and its running averages."""
    moved, ahead = {}, {}
    for power, decay in DECAYS.items():
        added = jax.tree.map(lambda g, n=power: g**n, gradient)
        moved[power] = jax.tree.map(lambda m, x, d=decay: d * m + (1 - d) * x, averages[power], added)
        ahead[power] = jax.tree.map(lambda m, d=decay: m / (1 - d**number), moved[power])
    rate = BONUS.learning_rate
    return jax.tree.map(lambda p, m, v: p - rate * m / (np.sqrt(v) + EPS), params, ahead[1], ahead[2]), moved


@pytest.mark.parametrize(("devices", "fraction"), one_quick([(1, 0.4), (1, 1.0), (2, 1.0)]))
def test_two_updates_of_the_bonus_are_those_of_numpy(devices, fraction):
    algo = ALGORITHMS["ppo"].resolve(SPEC, B)
    algo = algo.replace(exploration_bonus=BONUS.replace(predictor_fraction=fraction))
    update = updated if devices == 1 else updated_on_two
    state = learner(algo)
    past, chosen = Past(algo.exploration_bonus, state.bonus), chosen_rows(fraction)
    assert fraction == 1.0 or 0.1 < chosen.mean() < 0.9
    params = exact(state.bonus.learned.params)
    averages = dict.fromkeys(DECAYS, jax.tree.map(np.zeros_like, params))
    for number, rollout in enumerate(rollouts(algo), 1):
        seen = past.see(params, np.asarray(rollout.timesteps.observation, np.float64))
        predictor_loss, value_loss = past.losses(params, seen, chosen)
        slope = gradient(functools.partial(past.loss, seen=seen, chosen=chosen), params)
        params, averages = adam(params, slope, averages, number)
        state, info = update(algo, state, rollout)
        mine, near = state.bonus, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(near, mine.learned.params, params)
        jax.tree.map(near, mine.learned.optimizer_state[0].mu, averages[1])
        assert not rollout.rows.weight.all()
        metrics = {
            "predictor_loss": predictor_loss,
            "intrinsic_value_loss": value_loss,
            "intrinsic_reward": seen.reward[np.asarray(rollout.rows.weight)].mean(),
        }
        for name, value in metrics.items():
            np.testing.assert_allclose(info.metrics[name], value, rtol=1e-5, err_msg=name)
        near([mine.mean, mine.deviation], [past.mean, past.deviation])
        jax.tree.map(np.testing.assert_array_equal, mine.target, learner(algo).bonus.target)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_policies_learn_from_the_weighted_sum_of_both_advantages(name):
    """An update without a bonus, whose advantages are replaced, changes policy and value in the same way."""
    algo = ALGORITHMS[name].resolve(SPEC, B)
    state, plain = learner(algo), algo.replace(exploration_bonus=None)
    *_, rollout = rollouts(algo)
    params = exact(state.bonus.learned.params)
    seen = Past(BONUS, state.bonus).see(params, np.asarray(rollout.timesteps.observation, np.float64))
    intrinsic = jnp.asarray(seen.advantages, jnp.float32)
    if name == "impala":
        network = state.network.variables
        output, _, _ = algo.unroll(network, algo.inputs(rollout), (), SPEC, train=False)
        ratio = jnp.exp(output.distribution.log_prob(rollout.action) - rollout.extras["log_prob"])
        assert ratio.max() > 1.1 and ratio.min() < 0.9
        intrinsic = jnp.minimum(ratio, 1.0) * intrinsic

    def learned(algo):
        state = learner(algo)
        new, _ = jax.jit(lambda state: updated.__wrapped__(algo, state, rollout))(state)
        return jax.tree.leaves(new.network.params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rnd, "with_bonus", lambda bonus, advantages, _: 3.0 * advantages + 0.5 * intrinsic)
        by_hand = learned(plain)
    for a, b in zip(learned(algo), by_hand, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert any(not np.allclose(a, b, atol=1e-4) for a, b in zip(by_hand, learned(plain), strict=True))


@pytest.mark.long
def test_each_pass_takes_other_rows_and_all_take_each_equally_often():
    """With a quarter and four passes of one minibatch, four steps see each row once; the value sees all each time."""
    algo = ALGORITHMS["ppo"].resolve(SPEC, B).replace(epochs=4)
    state = learner(algo)
    *_, rollout = rollouts(algo)
    still = BONUS.replace(learning_rate=1e-30)
    bonuses = still, still.replace(predictor_fraction=0.25)
    whole, part = (updated(algo.replace(exploration_bonus=x), state, rollout)[1].metrics for x in bonuses)
    np.testing.assert_allclose(part["intrinsic_value_loss"], whole["intrinsic_value_loss"], rtol=1e-5)
    # Parts of unlike size have equal weight, so only nearly.
    np.testing.assert_allclose(part["predictor_loss"], whole["predictor_loss"], rtol=0.1)
    assert part["predictor_loss"] != whole["predictor_loss"]


def test_by_default_what_was_seen_a_hundred_times_is_less_new():
    """At the paper's learning rate of 1e-4 it is 0.94 as new."""
    bonus = RND(features=3, widths=(5,), torso=BONUS.torso)
    algo = ALGORITHMS["ppo"].resolve(SPEC, B).replace(exploration_bonus=bonus)
    *_, rollout = rollouts(algo)
    state, first = updated(algo, learner(algo), rollout)
    for _ in range(100):
        state, last = updated(algo, state, rollout)
    assert last.metrics["predictor_loss"] < 0.7 * first.metrics["predictor_loss"]


@pytest.mark.long
def test_what_follows_a_whole_episode_is_not_of_the_stream():
    algo = ALGORITHMS["a2c"].resolve(SPEC, B).replace(whole_episodes=WholeEpisodes(episodes=B))
    state = learner(algo)
    *_, rollout = rollouts(algo)
    rollout = rollout.replace(whole_episodes=True)
    beyond = np.cumsum(~np.asarray(rollout.rows.weight), axis=0) > 0
    observation = np.array(rollout.timesteps.observation)
    observation[1:][beyond] = 1e3
    other = rollout.replace(timesteps=rollout.timesteps.replace(observation=jnp.asarray(observation)))
    assert beyond.any()
    (one, _), (two, _) = updated(algo, state, rollout), updated(algo, state, other)
    for a, b in zip(jax.tree.leaves(one.bonus), jax.tree.leaves(two.bonus), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bonus_is_written_and_read():
    algo = jaxrl.PPO(exploration_bonus=RND(gamma=0.9, learning_rate=Linear(1e-3, 0.0), widths=(8, 8), torso=MLP((3,))))
    assert decode(encode(algo)) == algo


@pytest.mark.long
def test_it_resumes_bit_for_bit_and_its_numbers_may_be_swept(tmp_path):
    algo = programs.PPO.replace(learning_rate=1e-2, exploration_bonus=BONUS)
    whole = programs.resumed(tmp_path, algo, programs.ENV, 4 * programs.ROWS, num_envs=programs.NUM_ENVS)
    assert programs.all_finite(whole.state.learner.bonus)
    space = {"exploration_bonus.intrinsic_weight": [0.0, 0.5]}
    swept = jaxrl.sweep(algo, programs.ENV, seeds=[3, 4], devices=1, mapping="vmap", **space, **programs.SWEEP)
    assert len(swept.configurations) == 2 and not swept.failed.any()
    one, other = (jax.tree.leaves(learner.network.params)[0] for learner in swept.learners)
    assert one.shape[0] == 2 and not np.allclose(one, other)


def test_its_fields_are_searched_by_dotted_names():
    algo = jaxrl.PPO(exploration_bonus=BONUS)
    words = ["exploration_bonus.gamma=uniform:0.5:0.9", "exploration_bonus.features=3,4"]
    space = read_space(algo, "--space", words)
    assert space == {"exploration_bonus.gamma": Uniform(0.5, 0.9), "exploration_bonus.features": [3, 4]}
    fixed, ranges = search_space(algo, space | {"exploration_bonus.gae_lambda": 0.3})
    assert space.items() <= ranges.items() and replace(algo, **fixed).exploration_bonus.gae_lambda == 0.3
    both = replace(algo, exploration_bonus=RND(), **{"exploration_bonus.gamma": 0.5})
    assert both.exploration_bonus == RND(gamma=0.5)
    for name, path in ((None, "exploration_bonus.gamma"), (BONUS, "exploration_bonus.gama"), (BONUS, "gamma.gamma")):
        call = functools.partial(replace, jaxrl.PPO(exploration_bonus=name), **{path: 0.5})
        refused(call, "'gama'" if path.endswith("gama") else path)
    path = "exploration_bonus.gamma"
    refused(functools.partial(search_space, algo, {path: Uniform(0.5, 1.5)}), f"PPO.{path}=1.5")


def test_the_page_has_the_table_of_its_fields():
    assert expected_table(RND) in (Path(__file__).parents[2] / "docs" / "exploration.md").read_text()
