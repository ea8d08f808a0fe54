"""Combined experience replay: what is in a batch, whose priorities are updated, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import ALGORITHMS, BATCH, SPEC, initial, transitions
from helpers.programs import DQN, ENV, all_finite, anakin, assert_equal
from helpers.refused import raises
from helpers.streams import Fed, rows_of
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos import combined_replay, fields
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Lifo, MaxHeap, MinHeap, Prioritized, Replay, View
from jaxrl.networks import GRU, MLP, QNetwork
from jaxrl.parallel.replicas import SingleReplica

# Four environments of 16 rows.
ROWS = rows_of([[5, 8, 3], [16], [2, 14], [16]], ("terminated", "truncated"))
OWN, LAST = 12, 4


def newest(items):
    return View(items, Lifo(), max_times_sampled=1)


def sources(shards=1, **changes):
    replay = Replay(capacity=4 * 16, batch_size=OWN + LAST, min_size=1, sampler=Prioritized(), **changes)
    return Fed(jaxrl.DQN(view=newest(LAST)).combined_sources(replay), ROWS, rollout=4, shards=shards)


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_the_newest_are_drawn_once_each_and_are_stored_once(shards):
    fed = sources(shards).feed(jax.tree.map(lambda x: x[:12], ROWS))
    assert fed.states["view"].ring is None
    own, first, second = fed.sample(0), fed.sample(1, "view"), fed.sample(2, "view")
    assert own.weight.shape == (OWN,) and np.asarray(own.weight).all()
    # Twelve rows of each environment: the transition that begins at tick 10 is the last whose next row is there.
    for tick, batch in ((10, first), (9, second)):
        assert np.asarray(batch.weight).all()
        np.testing.assert_array_equal(np.sort(batch.sample_info.step), [tick] * LAST)
        np.testing.assert_array_equal(np.sort(np.asarray(batch.observation) // 1000), range(LAST))
        np.testing.assert_array_equal(batch.sample_info.importance, 1.0)
    fed.feed(jax.tree.map(lambda x: x[12:], ROWS))
    np.testing.assert_array_equal(fed.sample(3, "view").sample_info.step, [14] * LAST)


def test_each_shards_transitions_lie_side_by_side():
    def only(values):
        return jax.tree.map(lambda x: jnp.asarray(values), transitions())

    one, other, replicas = only([1, 2, 3, 4]), only([10, 20]), SingleReplica(2)
    parts = {"replay": one, "view": other}
    both = combined_replay.combined_batch(parts, replicas)
    np.testing.assert_array_equal(both.weight, [1, 2, 10, 3, 4, 20])
    for view, named in ((View(1, MaxHeap()), {"replay", "view"}), (newest(1), {"replay"})):
        sources = jaxrl.DQN(view=view, prioritized=fields.PrioritizedReplay()).experience
        found = combined_replay.priorities(both.weight.astype(jnp.float32), sources, parts, replicas)
        assert found.keys() == named, "the newest are drawn by no priority"
        np.testing.assert_allclose(found["replay"], np.asarray(one.weight) + combined_replay.LEAST_PRIORITY)
        if "view" in named:
            np.testing.assert_allclose(found["view"], [10, 20])
    assert combined_replay.combined_batch({"replay": one}, replicas) is one
    assert combined_replay.priorities(one.weight, jaxrl.SAC().experience, {"replay": one}, replicas) == {}


@pytest.mark.long
@pytest.mark.parametrize("name", one_quick(["sac", "d4pg"], "d4pg"))
def test_an_update_is_that_of_both_parts(name):
    """A batch in two parts changes the learner as it does in one, and the priorities are those of the first."""
    algo = resolve_schedules(ALGORITHMS[name], jnp.float32(0))
    whole, cut = transitions(algo.n_step), BATCH - 4
    parts = {"replay": jax.tree.map(lambda x: x[:cut], whole), "view": jax.tree.map(lambda x: x[cut:], whole)}

    @jax.jit
    def update(batch):
        state, info = algo.update(initial(algo), batch, spec=SPEC, key=jax.random.key(1), replicas=SingleReplica())
        return state, info.priorities

    (one, priorities), (two, of_own) = update({"replay": whole}), update(parts)
    assert_equal(one, two, 1e-6)
    assert of_own.keys() == priorities.keys()
    for kind, priority in priorities.items():
        np.testing.assert_allclose(of_own[kind], priority[:cut], rtol=1e-6)


def test_a_run_is_the_same_on_any_number_of_devices():
    algo = DQN.replace(view=View(8, Prioritized(), 40, MinHeap()))
    train = {"total_steps": 256, "evaluate_every": 0, "progress": False}
    one, two = (jaxrl.train(algo, ENV, topology=anakin(devices), **train) for devices in (1, 2))
    assert all_finite(one.state)
    assert_equal(one.state.learner, two.state.learner, 1e-5)


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        (jaxrl.DQN(view=View(128)), "DQN.view=View.*items=128.* must be less than batch_size=128"),
        (jaxrl.DQN(view=View(1), network=QNetwork(MLP((4,)), core=GRU(4))), "networks without a recurrent core"),
        (jaxrl.DQN(view=View(1), storage="flashbax"), "needs a ring, from which all parts"),
        (jaxrl.SAC(view=View(1, capacity=64, remover=MinHeap())), "needs priorities, but SAC returns none"),
        (jaxrl.DQN(view="lifo"), "DQN.view=.lifo. is not a jaxrl.core.sources.View"),
        (jaxrl.DQN(view=View(0)), "DQN.view=View.*items=0 must be a whole number of at least 1"),
        (jaxrl.DQN(view=View(4, "lifo")), "sampler='lifo' is not a rule from jaxrl.core.sources"),
        (jaxrl.DQN(view=View(4, Prioritized(exponent=-1.0))), "exponent and beta must be numbers of at least 0"),
        (jaxrl.DQN(view=View(4, remover=MinHeap())), "has no effect without capacity"),
    ],
)
def test_what_is_refused(algo, words):
    raises(ValueError, words, jaxrl.train, algo, "gymnax:CartPole-v1", total_steps=1_000, progress=False)


def test_demonstrations_without_rewards_have_no_views():
    [found] = ALGORITHMS["sac"].replace(imitate=True, view=View(1)).validate(SPEC, 1, 1)
    assert "view=View(items=1) has no effect" in found


def test_an_update_without_priorities_is_named(monkeypatch):
    monkeypatch.setattr(combined_replay, "priorities", lambda *_: {})
    raises(
        ValueError,
        "DQN.update must return .*'replay'",
        jaxrl.train,
        DQN.replace(prioritized=fields.PrioritizedReplay()),
        ENV,
        total_steps=256,
        topology=anakin(),
    )
