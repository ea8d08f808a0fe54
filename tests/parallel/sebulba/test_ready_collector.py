"""Acting for the environments that are ready first: the same rows whoever that is, and no rollout that never ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, assert_equal, plain, started
from helpers.refused import refused
from helpers.served import JaxHostEnvironment, ServedFromHost
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.core import keys
from jaxrl.core.types import env_spec
from jaxrl.parallel.host_rollout import HostSteps, complete
from jaxrl.parallel.sebulba.collector import Published, ReadyScheduler, StepCollector

# --- turns -------------------------------------------------------------------------------------------------------


@given(
    ready=st.integers(1, 5),
    batches=st.integers(1, 5),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_turns_end_whoever_is_ready_first(ready, batches, length, data):
    group = ready * batches
    slowness = data.draw(st.lists(st.integers(0, 3), min_size=group, max_size=group))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    turns, at_work, places = ReadyScheduler(group, ready, length), {}, [[] for _ in range(group)]
    while not turns.over:
        turn = turns.take()
        if turn is None:
            assert len(at_work) >= ready, "a batch can be received"
            came = sorted(at_work, key=at_work.get)[:ready]
            for env_id in came:
                del at_work[env_id]
            turns.came(np.asarray(came))
            continue
        env_ids, at = turn
        assert len(set(env_ids.tolist())) == ready and not set(env_ids.tolist()) & set(at_work)
        for env_id, place in zip(env_ids.tolist(), at.tolist(), strict=True):
            places[env_id].append(place)
            at_work[env_id] = len(places[env_id]) + rng.random() * 20.0 ** slowness[env_id]
    assert places == [list(range(length))] * group and not at_work and turns.take() is None


def test_a_slow_environment_stops_the_others_only_where_a_batch_would_lack_it():
    turns, at_work = ReadyScheduler(8, 4, 10), set()
    acted = np.zeros(8, int)
    while (turn := turns.take()) is not None or len(at_work - {7}) >= 4:  # environment 7 never comes
        if turn is not None:
            at_work |= set(turn[0].tolist())
            acted[turn[0]] += 1
        else:
            came = sorted(at_work - {7})[:4]
            at_work -= set(came)
            turns.came(np.asarray(came))
    left = 10 - acted
    assert acted[7] == 1 and left[7] == left.sum() / 4, "it has to act in every batch that is left"
    assert acted.sum() == 44


# --- what is collected ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffled(ServedFromHost):
    """Environments that are ready in an order by chance."""

    order: int = 0

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        host = ShuffledEnvironment(self.env, num_envs, seed, first_env)
        host.batch_size, host.rng = batch_size, np.random.default_rng(self.order)
        return host


class ShuffledEnvironment(JaxHostEnvironment):
    name = "shuffled"

    def async_reset(self):
        if self._state is None:
            self.steps_per_env, self.actions = np.zeros(self.num_envs, np.uint32), np.zeros(self.num_envs, np.int32)
        self._ticks = int(self.steps_per_env[0])  # all are where the rollout ended
        self.newest = self.reset()
        self.at_work, self.sent = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)

    def send(self, actions, env_ids):
        assert not self.at_work[env_ids].any() and len(set(env_ids)) == self.batch_size == len(actions)
        self.at_work[env_ids] = self.sent[env_ids] = True
        self.actions[env_ids] = actions

    def recv(self):
        assert self.at_work.sum() >= self.batch_size, "it would wait for ever"
        env_ids = self.rng.choice(np.flatnonzero(self.at_work), self.batch_size, replace=False).astype(np.int32)
        step = self.sent & np.isin(np.arange(self.num_envs), env_ids)
        before = self._state, self.newest
        self._state, self.newest = _step_some(self._env, before, self.actions, self._roots, self.steps_per_env, step)
        self.steps_per_env, self.sent = self.steps_per_env + step, self.sent & ~step
        self.at_work[env_ids] = False
        return env_ids, jax.tree.map(lambda x: np.asarray(x)[env_ids], self.newest)


@jax.jit
def _step_some(env, before, actions, roots, steps_per_env, step):
    """All take a step, so that they are rounded as in a batch of all, and those in `step` keep it."""
    act_keys = jax.vmap(lambda root, tick: keys.tick_keys(root[None], tick, 1)[0, 0])(roots, steps_per_env)
    after = jax.vmap(env.step)(before[0], actions, act_keys)
    return jax.tree.map(lambda x, y: jnp.where(step.reshape(-1, *(1,) * (y.ndim - 1)), y, x), before, after)


def rollouts(collector, published):
    """One rollout for each that is published, as numpy."""
    collected = []
    for what in published:
        collected.append(plain(complete(collector.collect(what, None))))
    collector.host.close()
    return collected


@pytest.fixture(scope="module")
def published():
    """A recurrent policy with normalized observations, in three versions."""
    algo = ALGORITHMS["recurrent_ppo"]
    algo = jaxrl.schedules.resolve_schedules(algo, jnp.float32(0.0))
    actor = jax.jit(lambda version: algo.actor(algo.init(jax.random.key(version), env_spec(ENV))))
    actors = [actor(version) for version in range(3)]
    return [Published(algo, actor, np.int32(version)) for version, actor in enumerate(actors)]


STEPS = HostSteps(env_spec(ENV), 2 * NUM_ENVS, NUM_ENVS, 8)


def collector(host, **ready):
    made = StepCollector(STEPS, host, jax.random.key(3), NUM_ENVS, jax.devices()[0], **ready)
    made.begin_at(2**32 - 10)  # ticks wrap
    return made


@pytest.fixture(scope="module")
def in_step(published):
    return rollouts(collector(ServedFromHost(ENV).build(NUM_ENVS, 3, NUM_ENVS)), published)


@pytest.mark.long
@pytest.mark.parametrize(("ready", "order"), [(2, 0), (4, 0), (4, 1)])
def test_who_is_ready_first_changes_nothing(ready, order, published, in_step):
    made = collector(Shuffled(ENV, order).build_async(NUM_ENVS, ready, 3, NUM_ENVS), ready=True)
    assert_equal(made.first_timestep(), ServedFromHost(ENV).build(NUM_ENVS, 3, NUM_ENVS).reset())
    collected = rollouts(made, published)
    assert made.stepping.seconds > 0 and made.stepping.since is None
    for one, other in zip(in_step, collected, strict=True):
        assert_equal(one, other, 1e-5)  # products are rounded differently in batches of another size
        # Whatever is not the network's: bit by bit.
        assert_equal(lived(one), lived(other))


def lived(collected):
    rollout = collected.rollout
    return rollout.rows.replace(extras={}), rollout.timesteps, collected.episodes


# --- whole runs --------------------------------------------------------------------------------------------------


def run(env, iterations, **topology):
    """The state, the report and all rows after some iterations, as numpy."""
    algo = ALGORITHMS["ppo"]
    with started(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology), algo, env) as (program, state):
        state, report, fetch = program.recorded_chunk(
            algo, env, state, iterations, 100, recorded=program.layout.recorded(algo, 1)
        )
        return plain((state, report, fetch()))


@pytest.mark.long
def test_envpool_gives_the_same_rows_and_the_same_update():
    env = jaxrl.make("envpool:CartPole-v1", max_episode_steps=12, num_threads=2)
    one = run(env, 1)
    state, report, rows = run(env, 1, ready=2)
    assert_equal(one[0], state, 1e-5)
    assert_equal(one[1].replace(actors={}), report.replace(actors={}), 1e-5)
    assert_equal(one[2], rows)
    assert one[1].actors["inference_batch"] == NUM_ENVS and report.actors["inference_batch"] == 2


@pytest.mark.long
def test_runs_go_on_and_learn_from_every_row():
    state, report, _ = run(Shuffled(ENV), 6, ready=2, queue=2)
    assert int(np.asarray(state.steps_per_env.low)) == 6 * 8 and report.failed_at == -1 and report.iterations == 6
    assert 0 <= report.actors["policy_lag"] <= 3 and report.actors["stepping_seconds"] > 0


def test_remote_environments_are_refused(monkeypatch):
    monkeypatch.setattr(jaxrl.Remote, "problems", lambda *_: [])  # Ray need not be here
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, ready=2, remote=jaxrl.Remote())
    refused(lambda: topology.bind(ALGORITHMS["ppo"], Shuffled(ENV)), "ready=2 with remote")
