"""Whole episodes out of rollouts, against a few lines of Python that keep them in lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import programs

import jaxrl
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.buffers.episode_buffer import EpisodeBuffer
from jaxrl.core.errors import ConfigError
from jaxrl.core.report import EpisodeSums, make_report
from jaxrl.core.sources import Episodes
from jaxrl.core.types import Rollout, TimeStep
from jaxrl.parallel.replicas import SingleReplica

ENVS, LENGTH, LONGEST = 6, 5, 16


class Player:
    """Environments whose episodes are of random lengths, some of them longer than allowed; some break."""

    def __init__(self, seed, mean_length, breaks=0.0):
        self.rng, self.mean_length, self.breaks = np.random.default_rng(seed), mean_length, breaks
        self.left, self.first = self._lengths(ENVS), np.ones(ENVS, bool)
        self.count = np.zeros(ENVS, np.int64)

    def _lengths(self, n):
        return self.rng.geometric(1 / self.mean_length, n)  # transitions, at least one

    def timesteps(self):
        """What all environments show, and on to the next step."""
        last = self.left == 0
        shown = {
            "observation": (np.arange(ENVS) * 10_000 + self.count).astype(np.float32),
            "reward": np.where(self.first, 0.0, self.rng.normal(size=ENVS)).astype(np.float32),
            "terminated": last & (self.count % 2 == 0),
            "truncated": last & (self.count % 2 == 1),
            "first": self.first,
        }
        broke = ~last & (self.rng.random(ENVS) < self.breaks)
        self.first = last | broke
        self.left = np.where(self.first, self._lengths(ENVS), self.left - 1)
        self.count += 1
        return shown

    def rollouts(self, count):
        steps = [self.timesteps() for _ in range(count * LENGTH + 1)]
        for start in range(0, count * LENGTH, LENGTH):
            some = steps[start : start + LENGTH + 1]
            shown = TimeStep(**{name: np.stack([step[name] for step in some]) for name in some[0]})
            yield Rollout(
                timesteps=shown.replace(previous_action=shown.observation - 1),
                action=shown.observation[:-1] + np.float32(0.5),
                extras={"value": shown.observation[:-1] + np.float32(0.25)},
                carry=np.zeros((ENVS, 2), np.float32),
                final_carry=np.ones((ENVS, 2), np.float32),
                statistics=np.float32(start),
                version=np.int32(start),
            )


class Lists:
    """The oracle: episodes as lists of observations, by shard."""

    def __init__(self, buffer):
        self.buffer, self.going = buffer, [None] * ENVS
        self.waiting = [[] for _ in range(buffer.shards)]

    def add(self, rollout):
        first, last = np.asarray(rollout.timesteps.first), np.asarray(rollout.timesteps.last)
        seen = np.asarray(rollout.timesteps.observation)
        per_shard = ENVS // self.buffer.shards
        going = np.reshape([episode is not None for episode in self.going], (-1, per_shard)).sum(1)
        free = [self.buffer.slots - len(w) - int(g) for w, g in zip(self.waiting, going, strict=True)]
        for t in range(LENGTH):
            for env in range(ENVS):
                shard = env // per_shard
                if first[t, env]:
                    self.going[env] = None
                    if free[shard] > 0:
                        free[shard] -= 1
                        self.going[env] = []
                episode = self.going[env]
                if episode is None:
                    continue
                episode.append(seen[t, env])
                if last[t, env] or len(episode) == LONGEST + 1:
                    self.waiting[shard].append(episode)
                    self.going[env] = None

    def batches(self):
        return min(len(waiting) for waiting in self.waiting) // self.buffer.episodes

    def take(self):
        taken = [waiting[: self.buffer.episodes] for waiting in self.waiting]
        self.waiting = [waiting[self.buffer.episodes :] for waiting in self.waiting]
        return [episode for some in taken for episode in some]


def bound(shards, count):
    source = Episodes(count=count, max_length=LONGEST, length=LENGTH, unit=3)
    return EpisodeBuffer(source, ENVS, shards, SingleReplica(shards), jnp.full(2, 7.0))


@pytest.mark.parametrize(
    ("shards", "count", "mean_length", "breaks"),
    [(1, 4, 6.0, 0.0), (2, 6, 3.0, 0.1), (3, 3, 1.5, 0.0), (2, 2, 12.0, 0.0)],
)
def test_batches_are_the_episodes_in_the_order_in_which_they_ended(shards, count, mean_length, breaks):
    buffer, player, seen = bound(shards, count), Player(shards, mean_length, breaks), 0
    lists, state = Lists(buffer), None

    @jax.jit
    def add(state, rollout):
        state = buffer.add(state, rollout)
        return state, buffer.batches(state)

    @jax.jit
    def take(state, rollout):
        state, batch = buffer.take(state, rollout)
        return state, (batch, batch.rows)

    for rollout in player.rollouts(30):
        state = buffer.init(rollout) if state is None else state
        state, complete = add(state, rollout)
        lists.add(rollout)
        assert int(complete) == lists.batches()
        for _ in range(lists.batches()):
            state, found = take(state, rollout)
            check(*jax.device_get(found), lists.take(), buffer, rollout)
            seen += 1
    assert seen > 10
    assert (np.asarray(state.index.ended) < 100).all(), "numbers begin anew"


def check(batch, rows, episodes, buffer, rollout):
    longest = buffer.lengths[-1]
    assert batch.whole_episodes and batch.timesteps.first.shape == (longest + 1, buffer.source.count)
    np.testing.assert_array_equal(batch.carry, 7.0)
    np.testing.assert_array_equal(batch.statistics, rollout.statistics)
    for column, episode in enumerate(episodes):
        transitions = len(episode) - 1
        number = np.minimum(np.arange(longest + 1), transitions)
        expected = np.asarray(episode)[number]
        np.testing.assert_array_equal(batch.timesteps.observation[:, column], expected)
        np.testing.assert_array_equal(batch.timesteps.previous_action[:, column], expected - 1)
        np.testing.assert_array_equal(batch.extras["value"][:, column], expected[:-1] + 0.25)
        if transitions < longest:
            np.testing.assert_array_equal(batch.action[:, column], expected[:-1] + 0.5)
        np.testing.assert_array_equal(rows.weight[:, column], np.arange(longest) < transitions)
        assert batch.timesteps.first[0, column] and not batch.timesteps.first[1 : transitions + 1, column].any()
        assert batch.timesteps.first[transitions + 1 :, column].all()
        ended = np.asarray(rows.terminated | rows.truncated)[:, column]
        # One that was cut has not ended: what follows is bootstrapped from.
        assert ended.sum() == (transitions < LONGEST or bool(batch.timesteps.last[transitions, column]))


def test_a_batch_is_cut_behind_its_longest_episode():
    buffer = bound(1, 2)
    assert buffer.lengths == (3, 6, 18), "a sixteenth, a quarter and all of 16, in units of 3"
    for mean_length in (1.01, 3.0, 12.0):
        state = None
        for rollout in Player(0, mean_length).rollouts(6):
            state = buffer.add(buffer.init(rollout) if state is None else state, rollout)
        state, batch = buffer.take(state, rollout)
        longest = int(batch.rows.weight.sum(0).max())
        length, total = buffer.cut_to_length(batch, lambda cut: (jnp.int32(cut.action.shape[0]), cut.rows.reward.sum()))
        assert length == min(length for length in buffer.lengths if length >= longest)
        np.testing.assert_allclose(total, batch.rows.reward.sum(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.exact
def test_a_run_goes_on_in_the_middle_of_episodes(tmp_path):
    """As the run that was not interrupted, bit for bit, and all that is not still going on is learned from."""
    algo = programs.PPO.replace(
        whole_episodes=WholeEpisodes(episodes=8, max_length=12), rollout_length=14, learning_rate=1e-2
    )
    settings = {"num_envs": programs.NUM_ENVS, "progress": False, "evaluate_every": 0, "evaluation_episodes": 2}
    rows = 14 * programs.NUM_ENVS
    whole = jaxrl.train(algo, programs.ENV, total_steps=6 * rows, **settings)
    jaxrl.train(algo, programs.ENV, total_steps=2 * rows, run_dir=tmp_path / "run", **settings)
    again = jaxrl.train(algo, programs.ENV, total_steps=6 * rows, run_dir=tmp_path / "run", **settings)
    programs.assert_equal(whole.state, again.state)
    totals = [row for row in whole.metrics if "train/transitions" in row]
    learned = sum(row["train/learned_fraction"] * row["train/transitions"] for row in totals)
    lived = sum(row["train/transitions"] for row in totals)
    assert lived - 2 * 8 * 12 <= learned <= lived, "all but what goes on, and what waits for a batch"


@pytest.mark.parametrize(
    ("fields", "shards"), [({}, 8), ({"whole_episodes": WholeEpisodes(episodes=8, max_length=2**20 - 3)}, 1)]
)
def test_shards_are_few_where_a_batch_waits_for_each(fields, shards):
    algo = programs.PPO.replace(**fields)
    assert jaxrl.Anakin(num_envs=8, devices=1).bind(algo, programs.ENV).layout.shards == shards


def test_room_that_cannot_be_is_refused_at_once():
    algo = programs.PPO.replace(whole_episodes=WholeEpisodes(episodes=8, max_length=2**31 - 1))
    with pytest.raises(ConfigError, match="2,147,483,647 transitions"):
        jaxrl.Anakin(num_envs=8, devices=1).bind(algo, programs.ENV)


def test_the_part_that_was_learned_from_is_of_all_iterations():
    """Also of those without a batch, and of those with several."""
    reports = [
        make_report(
            EpisodeSums.zero().replace(steps=jnp.float32(100.0)),
            {"learned_transitions": jnp.float32(mean)},
            jnp.float32(made),
            {},
        )
        for mean, made in ((0.0, 0), (100.0, 1), (50.0, 3))
    ]
    total = reports[0].add(reports[1], jnp.int32(1)).add(reports[2], jnp.int32(2))
    np.testing.assert_allclose(total.metrics()["train/learned_fraction"], 250.0 / 300.0, rtol=1e-6)
    assert reports[0].metrics()["train/learned_fraction"] == 0.0
