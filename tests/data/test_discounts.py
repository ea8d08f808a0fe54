"""Discounts of an environment's own, from its steps to a dataset and back, and into what learners take."""

import dataclasses

import dm_probes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.discounted import Discounted
from helpers.made import ENDINGS, made, transitions_in_words
from helpers.recorded import as_dataset
from helpers.registered import nothing_registered_for_good

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.buffers import batches
from jaxrl.core import registry
from jaxrl.core.sources import Sequence
from jaxrl.core.types import NetworkInputs, Rollout
from jaxrl.data import views
from jaxrl.data.rows import EpisodeCutter, rows_from_episode
from jaxrl.networks import MLP, QNetwork

GAMMA, STEPS, BATCH = 0.95, 9, 2


@pytest.fixture(scope="module")
def lived():
    """Episodes of four steps of a dm_env environment that discounts by 0.9, and the rows they were cut from."""
    host = jaxrl.from_dm_env(dm_probes.Counting, length=4, within=0.9).build(BATCH, 0)
    actions = np.zeros((STEPS, BATCH, 2), np.float32)
    timesteps = [host.reset(), *map(host.step, actions)]
    host.close()
    timesteps = jax.tree.map(lambda *x: jnp.stack(x), *timesteps)
    rows = Rollout(timesteps, jnp.asarray(actions), extras={}, carry=(), final_carry=()).rows
    return [episode for _, episode in EpisodeCutter(BATCH).add(rows)], rows


def test_rows_of_dm_env_have_the_discounts_that_followed(lived):
    episodes, rows = lived
    np.testing.assert_array_equal(rows.discount[:5, 0], np.float32([0.9, 0.9, 0.9, 0, 0]))
    assert len(episodes) == BATCH and episodes[0].discount.tolist() == np.float32([0.9, 0.9, 0.9, 0, 0]).tolist()


def test_a_dataset_keeps_them(lived, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    episodes, _ = lived
    default = dataclasses.replace(episodes[0], discount=np.float32([1, 1, 1, 0, 0]))
    dataset = as_dataset(tmp_path, *episodes, default)
    assert not dataset.report().faults
    for before, after in zip(episodes, dataset, strict=False):
        np.testing.assert_array_equal(after.discount, before.discount)
    assert rows_from_episode(dataset[1]).discount.tolist() == episodes[1].discount.tolist()
    assert rows_from_episode(dataset[2]).discount is None, "it follows from the ending"
    with dataset.loader(12, n_step=2) as loader:  # an epoch: both kinds in a batch
        batch = loader.batch(0)
    # Of the first episode's four transitions, the discounts of both steps; the last end with the episode.
    wanted = sorted([0.81, 0.81, 0.0, 0.0] * 2 + [1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(np.sort(batch.bootstrap), wanted, rtol=1e-6)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("n", [1, 3])
def test_n_step_targets_are_sums(ending, n):
    """sum_k (prod_{j<k} gamma d_j) r_k, and the product of all times the value of where they lead."""
    episode = made(8, ending, seed=3, discounted=True)
    batch = jax.tree.map(jnp.asarray, views.transitions(dataclasses.replace(episode, extras={}), n))
    value = jnp.arange(8, dtype=jnp.float32) - 3.0
    found = q_learning.n_step_target(batch.rewards, batch.steps, batch.bootstrap, value, GAMMA)
    for t, rewards, steps, bootstrap in transitions_in_words(episode, n):
        wanted = np.sum(GAMMA ** np.arange(n) * rewards) + GAMMA**steps * bootstrap * value[t]
        np.testing.assert_allclose(found[t], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("discounted", [0, 1])
def test_parts_of_a_batch_may_differ_in_having_them(discounted):
    """An environment without discounts beside a dataset with some, and the other way round."""
    parts = [made(6, "truncated", seed, discounted=seed == discounted) for seed in (0, 1)]
    as_jax = lambda tree: jax.tree.map(jnp.asarray, tree)  # noqa: E731
    of = [as_jax(views.transitions(part)) for part in parts]
    assert sorted(x.bootstrap.dtype.name for x in of) == ["bool", "float32"]
    joined = batches.join(of, 1)
    np.testing.assert_array_equal(joined.bootstrap, np.concatenate([x.bootstrap for x in of]).astype(np.float32))
    of = [as_jax(views.sequences(part, Sequence(4, 2, "truncate"))) for part in parts]
    assert [x.rows.discount is None for x in of] == [discounted == 1, discounted == 0]
    joined = batches.join(of, 1)
    wanted = np.concatenate([np.where(x.rows.weight, x.rows.discounts, 0.0) for x in of], axis=1)
    np.testing.assert_array_equal(jnp.where(joined.rows.weight, joined.rows.discount, 0.0), wanted)


DQN = jaxrl.DQN(
    gamma=0.9,
    n_step=2,
    learning_rate=1e-2,
    network=QNetwork(MLP((16,))),
    capacity=512,
    min_size=64,
    batch_size=32,
    rollout_length=4,
    replay_ratio=0.25,
    target_period=10,
)


@pytest.mark.long
def test_runs_learn_and_keep_them(tmp_path):
    """A run on an environment that discounts by 0.5, its replay as a dataset, and a run on that, and on both."""
    pytest.importorskip("tensorflow_datasets")
    quiet = {"evaluate_every": 0, "evaluation_episodes": 4, "progress": False}

    def value(result, over_actions=jnp.max):
        """Of the first observation, 0, a step before the reward."""
        params, spec = result.policy.actor.params, result.policy.spec
        inputs = NetworkInputs(observation=jnp.zeros((1, 1, 1)))
        values, _, _ = result.algo.network.apply(params, inputs, (), spec=spec, model_state=(), train=False)
        return float(over_actions(values))

    with nothing_registered_for_good():
        registry.add("wrapper", Discounted)
        env = jaxrl.make("probe:TwoStepDiscount", wrappers=(Discounted,))  # by 0.5
        online = jaxrl.train(DQN, env, total_steps=4096, num_envs=4, run_dir=tmp_path / "run", **quiet)
        assert value(online) == pytest.approx(0.45, abs=0.05)
        path = jaxrl.export_replay(tmp_path / "run", tmp_path / "data")
        episode = jaxrl.load_dataset(f"rlds:{path}")[0]
        assert episode.discount.tolist() == [0.5, 0.0, 0.0] and episode.is_terminal[-1]
        dataset = {"dataset": f"rlds:{path}"}
        offline = jaxrl.train(DQN, **dataset, eval_env=env, total_steps=1000, **quiet)
        assert value(offline) == pytest.approx(0.45, abs=0.05)
        plain = jaxrl.make("probe:TwoStepDiscount")  # without discounts beside the dataset
        both = jaxrl.train(DQN, plain, **dataset, dataset_fraction=0.5, num_envs=4, total_steps=4096, **quiet)
        assert 0.4 < value(both, jnp.min) < 0.8 < value(both) < 0.95  # of the dataset's action, and of the run's own
