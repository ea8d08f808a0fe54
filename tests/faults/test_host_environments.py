"""Gymnasium environments that raise, hang and are killed, and who ends with whom; all of it bounded in time."""

import contextlib
import dataclasses
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import types

import gymnasium
import host_probes
import numpy as np
import pytest
from helpers.patience import PATIENCE, wait_for, within
from helpers.processes import environment
from helpers.programs import DQN, PPO, actor_threads
from helpers.refused import raises
from helpers.tiers import one_quick

import jaxrl
from jaxrl.cli import main
from jaxrl.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from jaxrl.envs.host import watchdog, workers
from jaxrl.envs.host.time_steps import environment_seeds

pytestmark = pytest.mark.faults

NAME = "gymnasium:host_probes:Counting-v0"
SEEDS = environment_seeds(0, 4)
ACTIONS = np.asarray([0, 1, 0, 1], np.int32)


@pytest.fixture(autouse=True)
def bounded():
    """End a test that waits in vain, with its name rather than with the run's own limit."""
    with within(120, AssertionError):
        yield


def build(count, first_env=0, **parameters):
    return jaxrl.make(NAME, workers=count, **parameters).build(4, 0, first_env)


def processes(host):
    return [worker._process.pid for worker in host._stepper._workers]


def ended(pid):
    """Return whether a process, which may be another's child, has ended."""
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def gone(pid):
    """Wait for the end of a process; return True."""
    wait_for(lambda: ended(pid))
    return True


# --- what raises -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("count", "call"), [(0, "step"), (2, "reset"), (2, "step")])
def test_an_exception_reaches_the_user_with_its_traceback(count, call):
    at = (1, 0) if call == "reset" else (0, 1)
    host = build(count, length=2, fault="raise", call=call, at=at, seeds=[SEEDS[2]])
    pids = processes(host) if count else []
    host.reset()
    with pytest.raises(EnvironmentFailedError) as caught:
        for _ in range(4):
            host.step(ACTIONS)
    error = caught.value
    assert (error.index, error.seed) == (2, SEEDS[2])
    assert error.action is None if call == "reset" else error.action == 1
    text = "".join(traceback.format_exception(error))
    assert f"environment 2 (seed {SEEDS[2]}) in {call}" in text
    assert "out of cheese" in text and "in _strike" in text and "host_probes.py" in text
    assert host.failures == 0 and all(map(gone, pids))
    raises(RuntimeError, "was closed", host.step, ACTIONS)
    host.close()


def test_an_exception_in_the_first_reset():
    host = build(1, fault="raise", call="reset", seeds=[SEEDS[1]])
    raises(EnvironmentFailedError, f"1 .seed {SEEDS[1]}. in reset", host.reset)


def test_an_environment_that_only_a_worker_cannot_make(monkeypatch):
    """The module is found here, and not where the worker looks."""
    recipe = jaxrl.make(NAME, workers=2)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("tests")])
    raises(EnvironmentFailedError, "(?s)0, 2 .*ModuleNotFound", recipe.build, 4, 0)


@pytest.mark.long
def test_a_worker_that_does_not_start_in_time():
    """No process is there, with Gymnasium imported, in a thousandth of a second."""
    raises(ConfigError, "start_timeout=0.001", jaxrl.make, NAME, workers=2, start_timeout=0.001)
    recipe = dataclasses.replace(jaxrl.make(NAME, workers=2), start_timeout=0.001)
    raises(EnvironmentFailedError, "(?s)0, 2 .*start_timeout=0.001", recipe.build, 4, 0)


@pytest.mark.parametrize("count", [0, 2], ids=["in process", "workers"])
def test_environments_of_a_later_group_are_named_by_their_own_index(count):
    """The third of those that begin with the fifth."""
    seed = environment_seeds(0, 4, first_env=4)[2]
    host = build(count, first_env=4, fault="raise", seeds=[seed])
    host.reset()
    with pytest.raises(EnvironmentFailedError) as caught:
        host.step(ACTIONS)
    assert (caught.value.index, caught.value.seed) == (6, seed)


@pytest.mark.long
def test_the_command_line_shows_the_traceback(tmp_path, capsys):
    words = ["train", "ppo", "--env", NAME, "--env-params", "fault=raise", "--total-steps", "512", "--num-envs", "4"]
    assert main.main([*words, "--rollout-length", "8", "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "in _strike" in said and "host_probes.py" in said
    assert f"error: {NAME}: environment 0" in said and said.rstrip().endswith("the simulator is out of cheese")


# --- what is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "parameters"), one_quick([("kill", {}), ("hang", {"step_timeout": 0.7})]))
def test_a_lost_worker_is_replaced_and_its_environments_begin_new_episodes(fault, parameters):
    host = build(2, fault=fault, at=(0, 1), seeds=[SEEDS[2]], **parameters)
    pids = processes(host)
    shown = [host.reset(), host.step(ACTIONS)]
    with pytest.warns(RuntimeWarning, match=f"2 .seed {SEEDS[2]}. in step"):
        shown.append(host.step(ACTIONS))
    shown += [host.step(ACTIONS) for _ in range(2)]
    assert host.failures == 1
    # Environments 0 and 2 share the worker that was lost, 1 and 3 the other, which nothing happens to.
    for index in (0, 2):
        assert [timestep.observation[index, 1] for timestep in shown] == [0, 1, 0, 1, 2]
        assert [timestep.first[index] for timestep in shown] == [True, False, True, False, False]
        assert [timestep.reward[index] for timestep in shown] == [0, 1, 0, 1, 2]
        assert [timestep.episode.returns[index] for timestep in shown] == [0, 1, 0, 1, 3]
        assert [timestep.episode.length[index] for timestep in shown] == [0, 1, 0, 1, 2]
    for index in (1, 3):
        assert [timestep.observation[index, 1] for timestep in shown] == [0, 1, 2, 3, 0]
        assert [timestep.first[index] for timestep in shown] == [True, False, False, False, True]
    assert not np.any([timestep.last[[0, 2]] for timestep in shown])
    now, seeds = processes(host), host._stepper.seeds
    assert pids[1] == now[1] and pids[0] != now[0] and gone(pids[0])
    # With the same seeds, new environments could meet the same fault.
    assert seeds[1::2] == SEEDS[1::2] and not set(seeds[::2]) & set(SEEDS)
    host.close()
    assert all(map(gone, now))


@pytest.mark.long
@pytest.mark.parametrize("fault", one_quick(["kill", "hang"]))
def test_training_goes_on_where_a_worker_is_lost(fault):
    """Though the topology's own limit for a step is less than what it takes to find that out and start another one."""
    env = jaxrl.make(NAME, workers=2, step_timeout=1.5, fault=fault, at=(3, 1), seeds=[SEEDS[2]])
    settings = {"topology": jaxrl.Sebulba(num_envs=4, step_timeout=0.1), "progress": False}
    settings |= {"eval_env": jaxrl.make(NAME, workers=1), "evaluation_episodes": 2, "evaluate_every": 0}
    with pytest.warns(RuntimeWarning, match=f"2 .seed {SEEDS[2]}."):
        result = jaxrl.train(DQN, env, total_steps=256, **settings)
    assert result.stopped == "finished" and result.total_steps == 256
    total = {
        name: sum(row.get(f"actors/{name}", 0.0) for row in result.metrics) for name in ("failures", "lost_transitions")
    }
    assert total == {"failures": 1, "lost_transitions": 2}, "one worker, and a row of each of its environments"


def test_a_worker_that_is_killed_between_steps_is_replaced():
    host = build(2)
    host.reset()
    os.kill(processes(host)[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="died .killed by signal 9."):
        timestep = host.step(ACTIONS)
    assert timestep.first.tolist() == [False, True, False, True] and host.failures == 1
    host.close()


@pytest.mark.long
def test_restarts_are_counted_and_then_it_stops():
    host = build(1, fault="kill", at=(0, 1), restarts=2)  # in every environment, hence again and again
    host.reset()
    with pytest.warns(RuntimeWarning) as warned, pytest.raises(EnvironmentFailedError) as caught:
        for _ in range(20):
            host.step(ACTIONS)
    assert len(warned) == host.failures == 2
    assert "died (killed by signal 9), after all restarts=2 were used" in str(caught.value) and caught.value.index == 0
    assert host._stepper._workers == []


@pytest.mark.long
def test_a_reset_that_hangs_every_time_stops_too():
    host = build(1, fault="hang", call="reset", step_timeout=0.5, restarts=1)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(EnvironmentFailedError, match="in reset .*step_timeout=0.5"),
    ):
        host.reset()
    assert host.failures == 1 and host._stepper._workers == []


# --- who ends with whom ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_closing_does_not_wait_for_what_hangs(monkeypatch):
    monkeypatch.setattr(workers, "CLOSE_TIMEOUT", 0.5)
    host = build(2, fault="hang", at=(0, 0), seeds=[SEEDS[2]])
    host.reset()

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        host.step(ACTIONS)
    assert host.doing.startswith(f"{NAME}: environment 2 (seed {SEEDS[2]}) in step with the action")
    raises(RuntimeError, "earlier step was interrupted", host.step, ACTIONS)
    pids = processes(host)
    begun = time.monotonic()
    host.close()
    assert time.monotonic() - begun < PATIENCE and all(map(gone, pids))


def test_workers_leave_signals_to_the_parent_and_end_when_it_drops_them():
    """Schedulers send signals to all processes of a run; the parent ends it in order, and its workers with it."""
    host = build(2)
    host.reset()
    pids = processes(host)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    host.step(ACTIONS)
    assert host.failures == 0
    del host
    gc.collect()
    assert all(map(gone, pids))


def test_environments_end_what_they_started(tmp_path):
    """Processes that an environment forked or executed do not ignore SIGTERM, as its worker does."""
    host = build(1, fault="terminate", at=(0, 0), seeds=[SEEDS[2]], children=os.fspath(tmp_path), step_timeout=20.0)
    host.reset()
    host.step(ACTIONS)
    assert host.failures == 0
    host.close()


def test_where_one_worker_cannot_start_the_others_end(monkeypatch):
    started, popen = [], subprocess.Popen

    def limited(*arguments, **options):
        if len(started) == 2:
            raise BlockingIOError("no more processes")
        started.append(popen(*arguments, **options))
        return started[-1]

    recipe = jaxrl.make(NAME, workers=3)
    monkeypatch.setattr(subprocess, "Popen", limited)
    with pytest.raises(BlockingIOError):
        recipe.build(4, 0)
    assert [process.returncode is None for process in started] == [False, False], "killed, and waited for"


def test_workers_of_a_process_with_many_open_files():
    """`select.select` takes descriptors below 1024 only."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    many = []
    try:
        while not many or many[-1] < 1024:
            many.append(os.open(os.devnull, os.O_RDONLY))
        host = build(1)
        host.reset()
        host.close()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# What a shell runs in the background ignores SIGINT, and so would this parent.
PARENT = f"""
import signal, sys, numpy as np, jaxrl
signal.signal(signal.SIGINT, signal.default_int_handler)
def build(**parameters):
    host = jaxrl.make({NAME!r}, workers=1, **parameters).build(4, 0)
    host.reset()
    print(*(worker._process.pid for worker in host._stepper._workers), flush=True)
    return host
idle, stuck = build(children=sys.argv[1]), build(fault="hang", at=(0, 0), children=sys.argv[1])
stuck.step(np.zeros(4, np.int32))
"""


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_workers_end_with_their_parent(end, tmp_path):
    """Idle workers and hanging ones end, with the processes that their environments started."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, os.fspath(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
    pids += numbers(tmp_path)
    assert len(pids) == 2 + 2 * 5  # of each one environment was looked at
    if end == signal.SIGINT:
        time.sleep(0.5)  # into the step
        os.killpg(parent.pid, end)  # as a terminal does; the workers have groups of their own
    else:
        parent.send_signal(end)
    _, said = parent.communicate(timeout=PATIENCE)
    assert all(map(gone, pids))
    # The workers say nothing of it: the only traceback is the parent's.
    assert said.count("Traceback") == (end == signal.SIGINT), said


# --- what is closed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closing, said", [("hang", "has not returned"), ("raise", "raised ValueError..it cannot be")])
def test_a_close_that_goes_wrong_is_told_and_not_waited_for(monkeypatch, closing, said):
    monkeypatch.setattr(watchdog, "GOODBYE", 0.5)
    free = threading.Event()
    monkeypatch.setattr(host_probes, "time", types.SimpleNamespace(sleep=lambda seconds: free.wait(PATIENCE)))
    try:
        with pytest.warns(RuntimeWarning, match=f"{NAME}: close.. {said}"):
            jaxrl.make(NAME, closing=closing)
    finally:
        free.set()  # no thread is left for other tests to find
    wait_for(lambda: not actor_threads())


@pytest.mark.long
@pytest.mark.parametrize("closing", ["hang", "raise", "exit"])
def test_a_close_that_goes_wrong_in_a_worker_is_nobodys(monkeypatch, closing):
    monkeypatch.setattr(workers, "CLOSE_TIMEOUT", 0.5)
    host = build(1, closing=closing)
    host.reset()
    pids = processes(host)
    host.close()
    assert all(map(gone, pids))


@pytest.mark.long
@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_environments_start_ends_with_their_worker(tmp_path, end):
    recipe = jaxrl.make(NAME, workers=2, children=os.fspath(tmp_path))
    looked_at = numbers(tmp_path)
    host = recipe.build(4, 0)
    host.reset()
    children = numbers(tmp_path) - looked_at
    assert len(looked_at) == 1 and len(children) == 4 and all(map(gone, looked_at))
    assert not any(map(ended, children))
    if end == "close":
        host.close()
    else:
        for pid in processes(host):
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="died .killed by signal 9"):
            host.step(ACTIONS)
    assert all(map(gone, children))
    host.close()
    assert all(map(gone, numbers(tmp_path)))


def numbers(folder):
    """Return the numbers of the processes that environments started."""
    return {int(path.name) for path in folder.iterdir()}


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"given": "complex128"},
        {"given": "object"},
        {"given": "<U4"},
        {"value": 1e300},
        {"value": 300, "dtype": "uint8"},
        {"value": 0.5, "dtype": "int32"},
        {"value": 2**40, "given": "int64", "dtype": "int32"},
        {"value": -1, "given": "int64", "discrete": True},
        {"value": "nan", "discrete": True},
    ],
    ids=str,
)
def test_observations_that_are_none_of_their_space(options):
    host = jaxrl.make("gymnasium:host_probes:Showing-v0", **options).build(2, 0)
    with contextlib.closing(host), pytest.raises(EnvironmentContractError, match=f"0 .seed {SEEDS[0]}. .*observation"):
        host.reset()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"value": "nan"}, np.nan),  # the run tells of what is not finite
        ({"value": "inf"}, np.inf),
        ({"value": 12.5}, 12.5),  # bounds of real numbers are seldom kept
        ({"value": 3, "given": "int16"}, 3.0),
        ({"value": 9, "given": "int64", "dtype": "uint8"}, 9),
        ({"value": 7.0, "dtype": "int32"}, 7),
    ],
    ids=str,
)
def test_observations_of_another_type_that_lose_nothing(options, shown):
    host = jaxrl.make("gymnasium:host_probes:Showing-v0", **options).build(2, 0)
    np.testing.assert_array_equal(host.reset().observation, np.full((2, 2), shown))
    host.close()


# --- what is given otherwise than asked for --------------------------------------------------------------------------

# What is named.
NAMED = dict.fromkeys(host_probes.Misbehaving.STEPS, "step") | dict.fromkeys(host_probes.Misbehaving.RESETS, "reset")
NAMED |= dict.fromkeys(("no reward", "a text as reward", "a complex reward", "rewards", "a huge reward"), "reward")
NAMED |= {"no ending": "terminated", "a text as ending": "truncated", "endings": "terminated"}
NAMED |= {"another shape": "observation", "sys.exit": "SystemExit: 3", "sys.exit in reset": "SystemExit: 3"}


@pytest.mark.parametrize("what", NAMED)
def test_what_is_given_otherwise_is_told_with_the_name(what):
    host = jaxrl.make("gymnasium:host_probes:Misbehaving-v0", what=what).build(2, 0)
    with contextlib.closing(host), misbehaves(what, "gymnasium:host_probes:Misbehaving-v0: environment 0"):
        host.reset()
        host.step(np.zeros(2, np.int32))
    with misbehaves(what, "gymnasium:host_probes.Misbehaving: (environment 0|its first)"):
        jaxrl.make(host_probes.Misbehaving, what=what)  # a class that is passed is tried at once


def misbehaves(what, where):
    errors = (EnvironmentFailedError, EnvironmentContractError)
    return pytest.raises(errors, match=rf"(?s)^{where} .*\b{NAMED[what]}\b")


@pytest.mark.long
@pytest.mark.parametrize("what", NAMED)
def test_so_it_is_in_training_by_sebulba_and_no_worker_is_left(what, monkeypatch):
    built, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **named: built.append(popen(*a, **named)) or built[-1])
    env = jaxrl.make("gymnasium:host_probes:Misbehaving-v0", what=what, workers=2)
    with misbehaves(what, "gymnasium:host_probes:Misbehaving-v0: environment [0-7]"):
        jaxrl.train(PPO, env, total_steps=512, num_envs=8, progress=False, evaluate_every=0)
    assert len(built) == 3 and all(gone(process.pid) for process in built), "one was looked at"


# --- what takes long -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in process", "in a worker"])
def test_what_is_being_made_for_long_is_named_meanwhile(where, monkeypatch):
    told, free = [], threading.Event()

    def warn(text, *_, **__):
        told.append(text)
        free.set()

    monkeypatch.setattr(watchdog, "WARN_AFTER", 0.01)
    monkeypatch.setattr(watchdog.warnings, "warn", warn)
    if where == "in process":
        make = gymnasium.make
        monkeypatch.setattr(gymnasium, "make", lambda *a, **named: free.wait(PATIENCE) and make(*a, **named))
        jaxrl.make(NAME)
        assert told == [f"{NAME}: making an environment has taken 0.01 s so far; still waiting"]
    else:
        jaxrl.make(NAME, workers=1)  # no process is there in a hundredth of a second
        assert told[0].startswith(f"{NAME}: making environments in a worker (start_timeout=120) has taken 0.01 s")
