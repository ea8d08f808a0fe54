"""What goes wrong in actor threads reaches whoever trains, in bounded time, and leaves nothing behind."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest
from helpers.patience import PATIENCE
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, actor_threads
from helpers.spoiled import Spoiled, SpoiledEnvironment

import jaxrl
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.ray import actors as ray_actors
from jaxrl.parallel.sebulba import loop as sebulba
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.collector import Published
from jaxrl.parallel.sebulba.learning import HostLearning


def train(env, algo=PPO, **topology):
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology)
    return jaxrl.train(algo, env, total_steps=100 * ROWS, topology=topology, progress=False, evaluate_every=0)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    until = time.monotonic() + PATIENCE / 2
    while actor_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not actor_threads()


@pytest.mark.long
@pytest.mark.parametrize("topology", [{"actors": 2}, {"groups": 2}, {"lockstep": True}], ids=str)
def test_an_environment_that_raises(topology):
    def fail(host):
        raise ZeroDivisionError("in step 20")

    env = Spoiled(ENV, then=fail)
    with pytest.raises(ZeroDivisionError, match="in step 20") as caught:
        train(env, **topology)
    assert any(entry.name == "fail" for entry in caught.traceback), "its own traceback is there"
    assert all(host.closed for host in env.built)


@pytest.mark.long
def test_an_environment_that_hangs_is_named():
    free = threading.Event()
    env = Spoiled(ENV, then=lambda host: free.wait(PATIENCE))
    began = time.monotonic()
    try:
        with pytest.raises(EnvironmentFailedError, match="spoiled .*step_timeout is 1 s"):
            train(env, step_timeout=1.0)
        assert time.monotonic() - began < 60
    finally:
        free.set()


class Asynchronous(Spoiled):
    """The first half of those that are at work is ready first, `then` happens before receipt number `at`."""

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        host = self.build(num_envs, seed, first_env)
        host.__class__, host.batch_size = AsynchronousEnvironment, batch_size
        return host


class AsynchronousEnvironment(SpoiledEnvironment):
    at_work = ()
    doing = property(lambda self: f"environments {list(self.at_work)}")

    def async_reset(self):
        self.moment, self.at_work = self.reset(), list(range(self.num_envs))

    def send(self, actions, env_ids):
        self.at_work += env_ids.tolist()

    def recv(self):
        self.steps += 1
        if self.steps == self.at:
            self.then(self)
        env_ids = np.asarray(self.at_work[: self.batch_size])
        self.at_work = self.at_work[self.batch_size :]
        return env_ids, jax.tree.map(lambda x: x[env_ids], self.moment)


@pytest.mark.long
def test_an_asynchronous_environment_that_raises():
    def fail(host):
        raise ZeroDivisionError("in receipt 20")

    env = Asynchronous(ENV, then=fail)
    with pytest.raises(ZeroDivisionError, match="in receipt 20"):
        train(env, ready=2, actors=2)
    assert all(host.closed for host in env.built)


@pytest.mark.long
def test_an_asynchronous_environment_that_hangs_is_named():
    free = threading.Event()
    env = Asynchronous(ENV, then=lambda host: free.wait(PATIENCE))
    try:
        with pytest.raises(EnvironmentFailedError, match=".[0-7, ]*. for 1 s"):
            train(env, ready=2, step_timeout=1.0)
    finally:
        free.set()


@pytest.mark.long
def test_a_learner_that_raises_while_actors_wait():
    program = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, actors=2).bind(PPO, ServedFromHost(ENV))
    state = program.start(PPO, ServedFromHost(ENV), 0)
    state, _ = program.chunk(PPO, ServedFromHost(ENV), state, 1, 100)
    until = time.monotonic() + PATIENCE / 2
    while program.host._threads.metrics()["queue_depth"] < 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert program.host._threads.metrics()["queue_depth"] >= 1, "every slot is taken"
    began = time.monotonic()
    program.close()
    program.close()
    assert time.monotonic() - began < PATIENCE / 2
    with pytest.raises(RuntimeError, match="start"):
        program.chunk(PPO, ServedFromHost(ENV), state, 1, 100)


@pytest.mark.long
def test_a_learner_that_raises_in_a_run_while_actors_wait(monkeypatch):
    made, learn, numbers = [], HostLearning.learn, itertools.count(1)

    class Threads(ActorThreads):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            made.append(self)

    def learn_or_raise(self, *arguments):
        if next(numbers) < 3:
            return learn(self, *arguments)
        until = time.monotonic() + PATIENCE / 2
        while made[0].metrics()["queue_depth"] < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert made[0].metrics()["queue_depth"] >= 1, "every slot is taken"
        raise FloatingPointError("in the third update")

    monkeypatch.setattr(sebulba, "ActorThreads", Threads)
    monkeypatch.setattr(HostLearning, "learn", learn_or_raise)
    env = Spoiled(ENV, at=-1)
    with pytest.raises(FloatingPointError, match="in the third update"):
        train(env, actors=2)
    assert [host.closed for host in env.built] == [1, 1]


@pytest.mark.long
def test_an_actor_elsewhere_that_has_the_policy_has_a_limit_on_each_step(monkeypatch):
    """Which ends its process; the clock is a stand-in here. `test_ends.py` has the real one."""
    armed = []

    class Clock:
        def dump_traceback_later(self, seconds, *, exit, file):
            armed.append((seconds, exit))

        def cancel_dump_traceback_later(self):
            armed.clear()

    monkeypatch.setattr(ray_actors, "faulthandler", Clock())
    seen = []
    env = Spoiled(ENV, at=3, then=lambda host: seen.append(list(armed)))
    spec, algo = env_spec(env), resolve_schedules(PPO, np.float32(0.0))
    steps = HostSteps(spec, NUM_ENVS, NUM_ENVS, 8)
    actor = ray_actors.RolloutActor(NUM_ENVS, 0, 0, env, steps, 0, 7.0)
    actor.rollout(Published(algo, algo.actor(algo.init(jax.random.key(0), spec)), np.int32(0)), 0)
    assert seen == [[(7.0, True)]] and armed == []


def test_closed_before_anything_began():
    program = jaxrl.Sebulba(num_envs=NUM_ENVS).bind(PPO, ServedFromHost(ENV))
    program.close()
    env = Spoiled(ENV)
    program.start(PPO, env, 0)
    program.close()
    assert [host.closed for host in env.built] == [1]


@pytest.mark.long
def test_rows_where_an_environment_was_built_again_do_not_count():
    """Its next moment is a first one, though the one before was not a last one."""

    def rebuilt(host):
        host.broken = True

    class Rebuilt(SpoiledEnvironment):
        broken = False

        def step(self, actions):
            timestep = super().step(actions)
            if not self.broken:
                return timestep
            self.broken = False
            fresh = jax.tree.map(np.array, timestep)
            fresh.first[2], fresh.terminated[2], fresh.truncated[2] = True, False, False
            fresh.reward[2], fresh.episode.returns[2], fresh.episode.length[2] = 0.0, 0.0, 0
            return fresh

    class Rebuilding(Spoiled):
        def build(self, num_envs, seed, first_env=0):
            host = super().build(num_envs, seed, first_env)
            host.__class__ = Rebuilt
            return host

    seen = []
    program = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True).bind(PPO, ServedFromHost(ENV))
    gathered = program.host._learning.gathered
    object.__setattr__(program.host._learning, "gathered", lambda rollouts: seen.append(gathered(rollouts)) or seen[-1])
    env = Rebuilding(ENV, at=4, then=rebuilt)
    try:
        state = program.start(PPO, env, 0)
        _, report = program.chunk(PPO, env, state, 1, 100)
    finally:
        program.close()
    assert report.metrics()["actors/lost_transitions"] == 1
    (collected,) = seen[0]
    rows = collected.rollout.rows
    broken = (~np.asarray(rows.weight)) & ~np.asarray(collected.rollout.timesteps[:-1].last)
    assert np.argwhere(broken).tolist() == [[3, 2]]
    assert not rows.weight[3, 2] and rows.reward[3, 2] == 0 and not rows.terminated[3, 2] and rows.first[4, 2]
