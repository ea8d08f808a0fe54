"""Environments of this process that hang, wherever somebody waits for them: named, in bounded time."""

import signal
import threading
import time
import warnings

import jax
import numpy as np
import pytest
from helpers.patience import PATIENCE
from helpers.programs import ENV, NUM_ENVS, PPO, ROWS, actor_threads
from helpers.spoiled import Spoiled, SpoiledEnvironment
from helpers.tiers import one_quick

import jaxrl
from jaxrl.cli import environment as cli_environment
from jaxrl.cli import main
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.core.types import env_spec
from jaxrl.envs.host import watchdog
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.parallel.sebulba import actors
from jaxrl.run import recording
from jaxrl.run.evaluation import evaluate
from jaxrl.run.policy import Policy

pytestmark = pytest.mark.faults

HOST = ServedFromHost(ENV)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """What every run compiles: a limit of a second on steps would count it."""
    train(HOST)


@pytest.fixture
def hang(monkeypatch):
    """Blocks, until the test is over; and no thread is left then."""
    for module in (watchdog, actors):
        monkeypatch.setattr(module, "GOODBYE", 0.5)
    free = threading.Event()
    yield lambda host: free.wait(PATIENCE)
    free.set()
    until = time.monotonic() + PATIENCE / 2
    while actor_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not actor_threads()


def train(env, **settings):
    settings = {"evaluate_every": 0, "evaluation_episodes": 8, "total_steps": 2 * ROWS} | settings
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **settings.pop("topology", {}))
    return jaxrl.train(PPO, env, topology=topology, progress=False, **settings)


def named(what="their step", limit="step_timeout is 1 s"):
    return pytest.raises(EnvironmentFailedError, match=f"spoiled .*{what} .*{limit}")


def actor():
    return PPO.actor(PPO.init(jax.random.key(0), env_spec(HOST)))


@pytest.mark.long
@pytest.mark.parametrize("how", one_quick(["raises", "hangs"]))
def test_a_close_that_goes_wrong_after_training_is_told_and_the_result_there(hang, how, monkeypatch):
    def close(host):
        if how == "raises":
            raise ValueError("it cannot be closed")
        hang(host)

    monkeypatch.setattr(SpoiledEnvironment, "close", close)
    said = {"hangs": "has not returned", "raises": "raised ValueError: it cannot be closed"}[how]
    with pytest.warns(RuntimeWarning, match=f"spoiled: close.. {said}"):
        assert train(Spoiled(ENV, at=-1), evaluation_episodes=1).total_steps == 2 * ROWS


# --- outside a rollout -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_reset(hang):
    env, began = Spoiled(ENV, at=0, then=hang), time.monotonic()
    with named():
        train(env, topology={"step_timeout": 1.0})
    assert time.monotonic() - began < PATIENCE / 2


def test_environments_whose_reset_raises_are_closed():
    def fail(host):
        raise ZeroDivisionError("in the reset")

    env = Spoiled(ENV, at=0, then=fail)
    with pytest.raises(ZeroDivisionError, match="in the reset"):
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
    with pytest.raises(ZeroDivisionError, match="in step 3"):
        train(env, topology={"groups": 2})
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
    monkeypatch.setattr(recording, "STEP_TIMEOUT", 1.0)
    policy = Policy(PPO, actor(), env_spec(HOST))
    env = Spoiled(ENV, at=3, then=hang)
    stream = recording.play(policy, env, env_index=np.arange(NUM_ENVS), all_envs=NUM_ENVS, seed=0, explore=False)
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
    until = time.monotonic() + PATIENCE / 2
    while not host.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert host.closed == 1


# --- when an end was asked for ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_ctrl_c_does_not_wait_for_a_step_that_hangs(hang, where, monkeypatch):
    monkeypatch.setattr(watchdog, "_LAST_STEP", 0.5)

    def ctrl_c(host):
        signal.raise_signal(signal.SIGINT)
        hang(host)

    # In training after the first iteration has ended: until then nothing is there to save, and a run is left at once.
    at = 3 if where == "evaluation" else 3 * ROWS // NUM_ENVS + 3
    spoiled, began = Spoiled(ENV, at=at, then=ctrl_c), time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    try:
        if where == "evaluation":
            with named(limit="and the run was asked to end"):
                train(HOST, eval_env=spoiled)
        else:
            try:  # the learner may or may not be waiting for this rollout
                assert train(spoiled, eval_env=HOST, total_steps=6 * ROWS).stopped == "interrupted"
            except EnvironmentFailedError as error:
                assert "and the run was asked to end" in str(error)
    finally:
        signal.signal(signal.SIGINT, before)
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
    with pytest.raises(EnvironmentFailedError, match="environment 4 for 11 s"):
        watch.look(since)
    watch.look(None)
    watch.look(clock.now)


def test_what_has_not_moved_for_long_is_told_once_before_its_time_is_up(clock):
    """With the default `step_timeout`, within 30 seconds."""
    assert watchdog.WARN_AFTER + watchdog.TURN < 30 < watchdog.STEP_TIMEOUT
    host = Moving()
    watch = watchdog.Watch(host, watchdog.STEP_TIMEOUT)

    def told():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.look(100.0)
        return [str(one.message) for one in caught]

    assert told() == []
    clock.now += 19.0
    assert told() == []
    clock.now += 2.0
    assert told() == ["environments of moving have been at environment 0 for 21 s; step_timeout is 60 s"]
    clock.now += 20.0
    assert told() == []
    host.doing = "environment 1"
    assert told() == []
    clock.now += 25.0
    assert told() == ["environments of moving have been at environment 1 for 25 s; step_timeout is 60 s"]
    clock.now += 40.0
    with pytest.raises(EnvironmentFailedError, match="environment 1 for 65 s"):
        watch.look(100.0)


def test_what_replaces_lost_environments_has_the_time_for_it(clock):
    host = Moving()
    host.patience = 20.0
    watch = watchdog.Watch(host, 10.0)
    watch.look(100.0)
    clock.now += 29.0
    watch.look(100.0)
    clock.now += 2.0
    with pytest.raises(EnvironmentFailedError, match="step_timeout is 10 s, .* 20 s"):
        watch.look(100.0)


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
        with pytest.raises(EnvironmentFailedError, match="for 1004 s, .* end 4 s ago"):
            watch.look(100.0)
    finally:
        watchdog.ask_to_end(False)
    watch.look(100.0)
