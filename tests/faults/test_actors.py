"""Environments and actors of this process that raise or hang, wherever somebody waits for them: named, in bounded time.

Nothing of them is left behind.
"""

import itertools
import signal
import threading
import time
import warnings

import jax
import numpy as np
import pytest
from helpers import programs
from helpers.patience import PATIENCE, wait_for
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, actor_threads
from helpers.refused import raises
from helpers.served import ServedFromHost
from helpers.spoiled import Spoiled, SpoiledEnvironment
from helpers.tiers import one_quick

import jaxrl
from jaxrl.cli import environment as cli_environment
from jaxrl.cli import main
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.types import env_spec
from jaxrl.envs.host import watchdog
from jaxrl.parallel.sebulba import actors
from jaxrl.parallel.sebulba import host_loop as sebulba
from jaxrl.parallel.sebulba.actors import ActorThreads
from jaxrl.parallel.sebulba.learning import HostLearning
from jaxrl.run.policies.evaluation import evaluate
from jaxrl.run.policies.policy import Policy
from jaxrl.run.recording import policy_rows

pytestmark = pytest.mark.faults

HOST = ServedFromHost(ENV)
STEPS = 6 * ROWS


def train(env, *, topology=None, **settings):
    settings = {"evaluate_every": 0, "evaluation_episodes": 8} | settings
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology or {})
    return programs.train(env=env, total_steps=STEPS, topology=topology, **settings)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile what every run needs, which a limit of a second on steps would count."""
    train(HOST)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    wait_for(lambda: not actor_threads())


@pytest.fixture
def hang(monkeypatch):
    """Blocks, until the test is over."""
    for module in (watchdog, actors):
        monkeypatch.setattr(module, "GOODBYE", 0.5)
    free = threading.Event()
    yield lambda host: free.wait(PATIENCE)
    free.set()


def fail(host):
    raise ZeroDivisionError("in step 20")


def named(what="their step", limit="step_timeout is 1 s"):
    return pytest.raises(EnvironmentFailedError, match=f"spoiled .*{what} .*{limit}")


def actor():
    return PPO.actor(PPO.init(jax.random.key(0), env_spec(HOST)))


# --- in a rollout ----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize(
    ("kind", "topology"),
    [(Spoiled, {"actors": 2}), (Spoiled, {"lockstep": True}), (Asynchronous, {"ready": 2, "actors": 2})],
    ids=["two actors", "lockstep", "asynchronous"],
)
def test_an_environment_that_raises(kind, topology):
    env = kind(ENV, then=fail)
    with pytest.raises(ZeroDivisionError, match="in step 20") as caught:
        train(env, topology=topology)
    assert any(entry.name == "fail" for entry in caught.traceback), "its own traceback is there"
    assert all(host.closed for host in env.built)


@pytest.mark.long
@pytest.mark.parametrize("at", [0, 20], ids=["the first reset", "a step"])
def test_an_environment_that_hangs_is_named(at, hang):
    began = time.monotonic()
    with named():
        train(Spoiled(ENV, at=at, then=hang), topology={"step_timeout": 1.0})
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_an_asynchronous_environment_that_hangs_is_named(hang):
    raises(
        EnvironmentFailedError,
        ".[0-7, ]*. for 1 s",
        train,
        Asynchronous(ENV, then=hang),
        topology={"ready": 2, "step_timeout": 1.0},
    )


@pytest.mark.long
def test_a_learner_that_raises_while_actors_wait(monkeypatch):
    made, learn, numbers = [], HostLearning.learn, itertools.count(1)

    class Threads(ActorThreads):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            made.append(self)

    def learn_or_raise(self, *arguments):
        if next(numbers) < 3:
            return learn(self, *arguments)
        wait_for(lambda: made[0].metrics()["queue_depth"] >= 1)  # every slot is taken
        raise FloatingPointError("in the third update")

    monkeypatch.setattr(sebulba, "ActorThreads", Threads)
    monkeypatch.setattr(HostLearning, "learn", learn_or_raise)
    env = Spoiled(ENV, at=-1)
    raises(FloatingPointError, "in the third update", train, env, topology={"actors": 2})
    assert [host.closed for host in env.built] == [1, 1]


def test_closed_before_anything_began():
    program = jaxrl.Sebulba(num_envs=NUM_ENVS).bind(PPO, HOST)
    program.close()
    env = Spoiled(ENV)
    state = program.start(PPO, env, 0)
    program.close()
    program.close()
    assert [host.closed for host in env.built] == [1]
    raises(RuntimeError, "start", program.chunk, PPO, env, state, 1, 100)


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
    program = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True).bind(PPO, HOST)
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


@pytest.mark.long
@pytest.mark.parametrize("how", one_quick(["raises", "hangs"]))
def test_a_close_that_goes_wrong_after_training_is_told_and_the_result_there(hang, how, monkeypatch):
    def close(host):
        if how == "raises":
            raise ValueError("it cannot be closed")
        hang(host)

    monkeypatch.setattr(SpoiledEnvironment, "close", close)
    said = {"hangs": "has not returned", "raises": "raised ValueError..it cannot be closed"}[how]
    with pytest.warns(RuntimeWarning, match=f"spoiled: close.. {said}"):
        assert train(Spoiled(ENV, at=-1), evaluation_episodes=1).total_steps == STEPS


# --- outside a rollout -----------------------------------------------------------------------------------------------


def test_environments_whose_reset_raises_are_closed():
    env = Spoiled(ENV, at=0, then=fail)
    with pytest.raises(ZeroDivisionError):
        train(env)
    assert [host.closed for host in env.built] == [1]


def test_of_two_groups_one_raises_while_the_other_hangs(hang):
    """Neither waits for the other, and nothing is closed under a step."""
    began = threading.Event()

    def first(host):
        if host is env.built[0]:
            began.wait(PATIENCE)
            raise ZeroDivisionError("in step 3")
        began.set()
        hang(host)

    env = Spoiled(ENV, at=3, then=first)
    raises(ZeroDivisionError, "in step 3", train, env, topology={"groups": 2})
    assert env.built[0].closed == 1 and env.built[1].closed == 0


@pytest.mark.long
@pytest.mark.parametrize(("beside", "at"), [(False, 0), (True, 3)], ids=["its reset", "a step, beside the run"])
def test_an_evaluation(hang, beside, at):
    env = Spoiled(ENV, at=at, then=hang)
    with named():
        train(HOST, eval_env=env, async_evaluation=beside, topology={"step_timeout": 1.0})
    assert [host.closed for host in env.built] == [0], "it is not closed under a step"


@pytest.mark.long
def test_the_command_line_says_how_long_a_step_of_an_evaluation_may_take(hang, tmp_path, monkeypatch, capsys):
    train(HOST, run_dir=tmp_path / "run")
    env = Spoiled(ENV, at=3, then=hang)
    monkeypatch.setattr(cli_environment, "make_environment", lambda *_: env)
    words = ["--env", "gymnasium:CartPole-v1", "--episodes", "8", "--step-timeout", "0.5"]
    for more in ([], ["--follow"]):
        env.built.clear()
        assert main.main(["eval", str(tmp_path / "run"), *words, *more]) == 1
        assert "step_timeout is 0.5 s" in capsys.readouterr().err and env.built


@pytest.mark.long
def test_what_is_exported(hang, monkeypatch):
    monkeypatch.setattr(policy_rows, "STEP_TIMEOUT", 1.0)
    policy = Policy(PPO, actor(), env_spec(HOST))
    env = Spoiled(ENV, at=3, then=hang)
    stream = policy_rows.play(policy, env, env_index=np.arange(NUM_ENVS), all_envs=NUM_ENVS, seed=0, explore=False)
    with named():
        next(stream)


@pytest.mark.long
def test_one_that_comes_back_is_closed_then(hang):
    free = threading.Event()
    env = Spoiled(ENV, at=2, then=lambda host: free.wait(PATIENCE))
    with named():
        evaluate(PPO, actor(), env, env_spec(HOST), episodes=8, step_timeout=1.0)
    (host,) = env.built
    assert not host.closed
    free.set()
    wait_for(lambda: host.closed)
    assert host.closed == 1


# --- when an end was asked for ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_ctrl_c_does_not_wait_for_a_step_that_hangs(hang, where, monkeypatch, hears_ctrl_c):
    monkeypatch.setattr(watchdog, "_LAST_STEP", 0.5)

    def ctrl_c(host):
        signal.raise_signal(signal.SIGINT)
        hang(host)

    # In training after the first iteration has ended: until then nothing is there to save, and a run is left at once.
    at = 3 if where == "evaluation" else 3 * ROWS // NUM_ENVS + 3
    spoiled, began = Spoiled(ENV, at=at, then=ctrl_c), time.monotonic()
    if where == "evaluation":
        with named(limit="and the run was asked to end"):
            train(HOST, eval_env=spoiled)
    else:
        try:  # the learner may or may not be waiting for this rollout
            assert train(spoiled, eval_env=HOST).stopped == "interrupted"
        except EnvironmentFailedError as error:
            assert "and the run was asked to end" in str(error)
    assert time.monotonic() - began < PATIENCE / 2


# --- the watch -------------------------------------------------------------------------------------------------------


class Moving:
    """Environments that are stepped one after another."""

    name, doing = "moving", "environment 0"


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def test_environments_that_are_stepped_in_turn_have_the_time_each(clock):
    host, since = Moving(), 100.0
    watch = watchdog.Watch(host, 10.0)
    for number in range(5):
        host.doing = f"environment {number}"
        watch.look(since)
        clock.now += 9.0
        watch.look(since)
    clock.now += 2.0
    raises(EnvironmentFailedError, "environment 4 for 11 s", watch.look, since)
    watch.look(None)
    watch.look(clock.now)


def test_what_has_not_moved_for_long_is_told_once_before_its_time_is_up(clock):
    """With the default `step_timeout`, within 30 seconds."""
    assert watchdog.WARN_AFTER + watchdog.TURN < 30 < watchdog.STEP_TIMEOUT
    host = Moving()
    watch = watchdog.Watch(host, watchdog.STEP_TIMEOUT)

    def told():
        with warnings.catch_warnings(record=True, action="always") as caught:
            watch.look(100.0)
        return [str(one.message) for one in caught]

    assert told() == []
    clock.now += 19.0
    assert told() == []
    clock.now += 2.0
    assert told() == ["environments of moving have been busy with environment 0 for 21 s; step_timeout is 60 s"]
    clock.now += 20.0
    assert told() == []
    host.doing = "environment 1"
    assert told() == []
    clock.now += 25.0
    assert told() == ["environments of moving have been busy with environment 1 for 25 s; step_timeout is 60 s"]
    clock.now += 40.0
    raises(EnvironmentFailedError, "environment 1 for 65 s", watch.look, 100.0)


def test_what_replaces_lost_environments_has_the_time_for_it(clock):
    host = Moving()
    host.patience = 20.0
    watch = watchdog.Watch(host, 10.0)
    watch.look(100.0)
    clock.now += 29.0
    watch.look(100.0)
    clock.now += 2.0
    raises(EnvironmentFailedError, "step_timeout is 10 s, .* 20 s", watch.look, 100.0)


def test_once_an_end_was_asked_for_a_step_has_seconds(clock):
    watch = watchdog.Watch(Moving(), 1e6)
    try:
        clock.now += 1000.0
        watchdog.ask_to_end(True)
        watch.look(100.0)
        clock.now += 2.0
        watchdog.ask_to_end(True)
        watch.look(100.0)
        clock.now += 1.5
        raises(EnvironmentFailedError, "for 1004 s, .* end 4 s ago", watch.look, 100.0)
    finally:
        watchdog.ask_to_end(False)
    watch.look(100.0)
