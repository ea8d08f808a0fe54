"""Actor threads: the same run however environments are grouped, exact lags, and what is told of them."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from algorithms import ALGORITHMS
from gymnasium.envs.classic_control import CartPoleEnv
from helpers.patience import PATIENCE, within
from helpers.programs import (
    ENV,
    NUM_ENVS,
    ROWS,
    all_finite,
    anakin,
    assert_equal,
    plain,
    ran,
    started,
)
from helpers.served import ServedFromHost
from helpers.strict_json import read_json

import jaxrl
from jaxrl.algos.on_policy import WholeEpisodes
from jaxrl.core.types import env_spec
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.sebulba import host_loop
from jaxrl.parallel.sebulba.actors import ActorThreads, Progress
from jaxrl.parallel.sebulba.collector import Stepping
from jaxrl.parallel.sebulba.learning import HostLearning
from jaxrl.parallel.sebulba.selection import Selection
from jaxrl.run.loop.run_loop import Loop

HOST = ServedFromHost(ENV)
HOST_SPEC = env_spec(HOST)


def run(name, iterations=6, seed=3, **topology):
    return ran(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology), ALGORITHMS[name], HOST, iterations, seed)


@pytest.fixture(scope="module")
def compiled():
    """The same run as one program."""
    return ran(anakin(), ALGORITHMS["recurrent_ppo"], ENV, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param({"actors": 2, "groups": 2}, id="two threads of two"),
        pytest.param({"groups": 2, "actor_devices": 2, "devices": 2, "actor_platform": "cpu"}, id="two devices"),
    ],
)
def test_grouping_and_devices_change_nothing(topology, compiled):
    state, report = run("recurrent_ppo", lockstep=True, **topology)
    assert_equal(compiled[0].replace(env_state=()), state, 1e-5)
    assert_equal(compiled[1], report.replace(actors={}), 1e-5)
    assert report.actors["policy_lag"] == 0 and report.actors["failures"] == 0


@pytest.mark.long
def test_workers_step_while_one_call_acts_for_all_their_environments(monkeypatch):
    """The run with two workers is the one with none, bit for bit, and no environment is stepped in this process."""
    act, step, acted, stepped = HostSteps.act, CartPoleEnv.step, [], []

    def counted(self, algo, actor, storage, shown, *others):
        acted.append(len(shown.reward))
        return act(self, algo, actor, storage, shown, *others)

    monkeypatch.setattr(HostSteps, "act", counted)
    monkeypatch.setattr(CartPoleEnv, "step", lambda self, action: stepped.append(1) or step(self, action))
    found = []
    for workers in (0, 2):
        acted.clear(), stepped.clear()
        env = jaxrl.make("gymnasium:CartPole-v1", workers=workers, max_episode_steps=5)
        topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True)
        state, report = ran(topology, ALGORITHMS["ppo"], env, 3)
        found.append((state, report.replace(actors={})))
        assert acted == [NUM_ENVS] * 3 * 8 and report.actors["inference_batch"] == NUM_ENVS
        assert report.episodes.count == 4 * NUM_ENVS
        assert len(stepped) == (0 if workers else 5 * 4 * NUM_ENVS), "the step after an end only resets"
    assert_equal(*found)


@pytest.mark.long
def test_a_lag_of_one_is_exact_and_the_same_on_every_run(compiled):
    one, report = run("recurrent_ppo", lockstep=True, lag=1, actors=2)
    other, _ = run("recurrent_ppo", lockstep=True, lag=1, actors=2)
    assert_equal(one, other)
    assert report.actors["policy_lag"] == pytest.approx(5 / 6), "the first rollout cannot be late"
    with pytest.raises(AssertionError):
        assert_equal(compiled[0].learner, one.learner, 1e-5)


@pytest.mark.long
def test_overlapping_runs_learn_from_every_row_and_tell_how_it_went():
    state, report = run("r2d2", actors=2, queue=2)
    assert int(np.asarray(state.steps_per_env.low)) == 6 * 8 and report.failed_at == -1 and report.iterations == 5
    assert state.learner.updates == 5 and all_finite(state.learner)
    network = state.learner.network
    moved = jax.tree.map(lambda x, target: (x != target).any(), network.params, network.target_params)
    assert all(jax.tree.leaves(moved)), "the target is two updates old"
    figures = report.actors
    assert 0 <= figures["policy_lag"] <= 3, "as many rollouts as wait, and the one that is collected"
    assert figures["inference_batch"] == NUM_ENVS / 2 and 0 <= figures["queue_depth"] <= 2
    assert figures["seconds"] > 0 and figures["stepping_seconds"] > 0 and 0 <= figures["batches_at_hand"] <= 3
    assert figures["actor_blocked_seconds"] >= 0 and figures["learner_blocked_seconds"] >= 0
    assert {f"actors/{name}" for name in figures} <= set(report.metrics())


@pytest.mark.long
def test_impala_learns_from_every_rollout_once_while_others_wait(monkeypatch):
    """With a learner so slow that both queues are full whenever it learns, and policies two or three updates old."""
    algo, learn, batches, iterations = ALGORITHMS["impala"].resolve(HOST_SPEC, NUM_ENVS), HostLearning.learn, [], 8

    def learn_when_full(self, algo, state, buffers, rollouts, dataset):
        while program.host._threads.metrics()["queue_depth"] < 2:
            program.host._threads.is_round_ready(0)  # which raises what an actor raised
            time.sleep(1e-3)
        batches.append([jax.tree.map(np.array, (x.rollout.timesteps.observation, x.rollout.version)) for x in rollouts])
        return learn(self, algo, state, buffers, rollouts, dataset)

    monkeypatch.setattr(HostLearning, "learn", learn_when_full)
    with within(PATIENCE), started(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, actors=2, queue=2), algo, HOST) as begun:
        program, state = begun
        assert program.host.selection.lag is None
        state, report = program.chunk(algo, HOST, state, iterations, 100)
        standing, learner, report = plain((state.timestep.observation, state.learner, report))
    assert int(learner.updates) == iterations and all_finite(learner) and report.failed_at == -1
    # What an environment showed last in a rollout it shows first in the next one, and no two rows are the same.
    observations = np.stack([np.concatenate([seen for seen, _ in batch], axis=1) for batch in batches])
    np.testing.assert_array_equal(observations[1:, 0], observations[:-1, -1])
    np.testing.assert_array_equal(observations[-1, -1], standing)
    rows = observations[:, :-1].reshape(-1, *observations.shape[3:])
    assert len(np.unique(rows, axis=0)) == len(rows) == iterations * ROWS
    versions = np.array([[version for _, version in batch] for batch in batches])
    assert (versions[:, :1] == versions).all(), "one version a batch"
    age = np.arange(iterations) - versions[:, 0]
    assert age[:3].tolist() == [0, 1, 2] and set(age[3:]) <= {2, 3} and (np.diff(versions[:, 0]) >= 0).all()
    assert report.actors["policy_lag"] == pytest.approx(age.mean())
    assert report.metrics()["update/importance_weight"] < 1.0


@pytest.mark.long
def test_who_waits_for_whom(monkeypatch):
    """In lockstep one side always waits: actors while a slow learner learns, but no learner that is learning."""
    learn, pause = HostLearning.learn, 0.05

    def slowly(*arguments):
        time.sleep(pause)
        return learn(*arguments)

    monkeypatch.setattr(HostLearning, "learn", slowly)
    monkeypatch.setattr(host_loop, "_under_way", lambda state: lambda: True)
    figures = run("dqn", iterations=4, lockstep=True, groups=2)[1].actors
    assert figures["actor_blocked_seconds"] >= 2 * 3 * pause, "two groups, all rollouts but the first"
    assert figures["learner_blocked_seconds"] == 0
    monkeypatch.setattr(host_loop, "_under_way", lambda state: lambda: False)
    assert run("dqn", iterations=4, lockstep=True, groups=2)[1].actors["learner_blocked_seconds"] > 0


@pytest.mark.long
def test_failures_between_two_chunks_are_told(monkeypatch):
    """Actors go on there. Before, each chunk told of what failed since its own beginning."""
    algo, failures = ALGORITHMS["ppo"], [0]
    monkeypatch.setattr(ActorThreads, "failures", property(lambda self: failures[0]))
    with started(jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4), algo, HOST) as (program, state):
        told = []
        for so_far in (0, 2, 2, 3):
            failures[0] = so_far
            state, report = program.chunk(algo, HOST, state, 1, 100)
            told.append(float(report.actors["failures"]))
        assert told == [0.0, 2.0, 0.0, 1.0]


@pytest.mark.long
def test_training_goes_on_where_it_stopped_with_new_episodes(tmp_path, monkeypatch):
    settings = {"topology": jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True), "progress": False}
    settings |= {"evaluate_every": 0, "evaluation_episodes": 8, "run_dir": tmp_path / "run"}
    algo = ALGORITHMS["dqn"]
    first = jaxrl.train(algo, HOST, total_steps=4 * ROWS, **settings)
    resume, resumed = Loop._resume, []

    def resuming(self):
        resume(self)
        resumed.append(jax.tree.map(np.array, plain(self.state)))  # its buffers are donated later

    monkeypatch.setattr(Loop, "_resume", resuming)
    told = rf"resumed at step {4 * ROWS}; {NUM_ENVS} host environments start new episodes; everything else is restored"
    with pytest.warns(RuntimeWarning, match=told):
        again = jaxrl.train(algo, HOST, total_steps=6 * ROWS, **settings)
    [state] = resumed
    for part in ("learner", "buffers", "key", "steps_per_env", "empty_at"):
        assert jax.tree.leaves(getattr(state, part))
        assert_equal(getattr(first.state, part), getattr(state, part))
    assert state.timestep.first.all() and not np.asarray(first.state.timestep.first).all()
    assert first.state.learner.updates == 6 and again.state.learner.updates == 10
    assert int(again.state.steps_per_env) == 6 * 8
    assert {"actors/policy_lag", "actors/queue_depth"} <= set(again.metrics[-2])


@pytest.mark.long
def test_whole_episodes_go_on_after_a_resume(tmp_path):
    """A Gymnasium environment forgets, so that the episodes that were going on are left out."""
    env = jaxrl.make("gymnasium:host_probes:Parts-v0", workers=1)
    algo = ALGORITHMS["ppo"].replace(
        whole_episodes=WholeEpisodes(episodes=NUM_ENVS, max_length=6), rollout_length=6, learning_rate=1e-2
    )
    settings = {"topology": jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lag=0), "progress": False}
    settings |= {"evaluate_every": 0, "evaluation_episodes": 4}
    rows = NUM_ENVS * 6
    jaxrl.train(algo, env, total_steps=2 * rows, run_dir=tmp_path / "run", **settings)
    with pytest.warns(RuntimeWarning, match=f"resumed at step {2 * rows}"):
        again = jaxrl.train(algo, env, total_steps=6 * rows, run_dir=tmp_path / "run", **settings)
    learned = [row["update/learned_transitions"] for row in again.metrics if "update/learned_transitions" in row]
    assert len(learned) >= 3 and set(learned) == {4.0 * NUM_ENVS}, "four transitions each"
    # The age of the data is what a batch of another shape would have: PPO acts while it learns.
    assert jaxrl.Sebulba().resolve(algo).lag == jaxrl.Sebulba().resolve(ALGORITHMS["ppo"]).lag == 1


# --- versions --------------------------------------------------------------------------------------------------------


class Instant:
    """A collector whose rollouts are full at once, but for the first one if it waits for `gate`."""

    def __init__(self, gate=None):
        self.host, self.stepping, self._gate = SimpleNamespace(close=lambda: None), Stepping(), gate

    def collect(self, published, stepper):
        if self._gate is not None:
            self._gate.wait(PATIENCE)
        yield


@pytest.mark.parametrize(
    ("max_lag", "versions"), [(None, [[0, 0], [0, 0], [1, 1]]), (9, [[0, 0], [0, 1], [1, 1]])], ids=["rounds", "pool"]
)
def test_every_group_acts_with_the_version_that_the_first_one_took(max_lag, versions):
    """In a pool each acts with whatever is newest. The second group begins its second rollout with version 1 there."""
    gate, until = threading.Event(), time.monotonic() + PATIENCE
    selection = Selection(2, 2, 1, max_lag=max_lag)
    threads = ActorThreads([[Instant()], [Instant(gate)]], jax.devices()[:1] * 2, selection, 0, PATIENCE)
    try:
        for version, full in enumerate(threads._full):
            threads.publish(version, np.int32(version), Progress(version, version))
            if version == 1:
                gate.set()
            while (len(full) < 2 or not (version or 1 in threads._collecting)) and time.monotonic() < until:
                time.sleep(1e-3)
        assert [[taken.version for taken in threads.rollouts(1)] for _ in versions] == versions
    finally:
        gate.set()
        threads.close()


def test_an_exact_lag_waits_for_its_version():
    assert Selection(1, 1, 1, lag=1).version_for(2, 0, [0]) is None, "it is waited for"
    assert Selection(1, 1, 1, lag=1).version_for(2, 0, [0, 1]) == 1
    third = Selection(1, 1, 1, lag=1, period=3)  # of a run that goes on at 5
    assert [third.version_for(number, 5, range(5, number)) for number in range(6, 13)] == [5, 6, 6, 6, 9, 9, 9]


@pytest.mark.parametrize(
    ("algo", "wanted"),
    [
        (jaxrl.PPO(), (True, 1)),
        (jaxrl.PQN(), (True, 1)),
        (jaxrl.A2C(), (True, 0)),
        (jaxrl.IMPALA(), (False, 0)),
        (jaxrl.DQN(), (False, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_age_of_data_is_what_the_algorithm_can_learn_from(algo, wanted):
    """Before, all ran freely: A2C, which has no ratio, learned from data one or two updates old."""
    free = jaxrl.Sebulba(num_envs=8)
    found = free.resolve(algo)
    assert (found.lockstep, found.lag) == wanted
    bound = free.bind(algo.resolve(HOST_SPEC, 8), HOST).host.selection
    assert bound.lag == (found.lag if found.lockstep else None)
    for given, expected in (
        ({"lockstep": False}, (False, 0)),
        ({"lockstep": True}, (True, 0)),
        ({"lag": 1}, (True, 1)),
        ({"lockstep": True, "lag": 1}, (True, 1)),
        ({"ready": 4}, (False, 0)),
    ):
        found = jaxrl.Sebulba(num_envs=8, **given).resolve(algo)
        assert (found.lockstep, found.lag) == expected, given


@pytest.mark.long
def test_a_run_keeps_what_was_resolved(tmp_path):
    settings = {"total_steps": 2 * 8 * NUM_ENVS, "evaluate_every": 0, "progress": False}
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4)
    jaxrl.train(ALGORITHMS["ppo"], HOST, topology=topology, run_dir=tmp_path / "run", **settings)
    saved = read_json(tmp_path / "run" / "config.json")["topology"]
    assert saved["lockstep"] is True and saved["lag"] == 1


@pytest.mark.long
@pytest.mark.parametrize(("layout", "mean", "most"), [({"lag": 0}, 1.0, 2), ({"lag": 1}, 2.0, 3)])
def test_parameters_that_are_pushed_every_third_update(layout, mean, most):
    algo, topology = ALGORITHMS["ppo"], jaxrl.Sebulba(num_envs=NUM_ENVS, actors=2, lockstep=True, **layout)
    with started(dataclasses.replace(topology, parameter_period=3), algo, HOST) as (program, state):
        state, _ = program.chunk(algo, HOST, state, 3, 100)
        for _ in range(2):
            state, report = program.chunk(algo, HOST, state, 3, 100)
            assert report.actors["policy_lag"] == pytest.approx(mean) and report.actors["policy_lag_max"] == most
        assert all_finite(plain(state.learner))
