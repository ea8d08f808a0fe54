"""Actors that hold environments: the rows are those of this process, and what is lost is masked."""

import threading

import numpy as np
import pytest
from helpers import clusters
from helpers.pools import check_ends_while_groups_wait
from helpers.processes import environment, python
from helpers.programs import NUM_ENVS, PPO, assert_equal, plain, ran

import jaxrl
from jaxrl.cli import fields, values
from jaxrl.core.errors import EnvironmentFailedError
from jaxrl.envs.host.time_steps import environment_seeds
from jaxrl.parallel.remote.actors import ActorPool, EnvironmentActor, Remote
from jaxrl.parallel.remote.backend import LostActorError
from jaxrl.parallel.remote.processes import LocalProcesses

COUNTING = "gymnasium:host_probes:Counting-v0"
BACKENDS = ("processes", "ray")

started, cluster = clusters.fixtures()


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The settings of a backend that is ready."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return {"backend": request.param, "cpus": 0.25}


def played(env, steps):
    """The moments from the first reset on."""
    try:
        return [env.reset()] + [env.step(np.full(env.num_envs, step % 2)) for step in range(steps)]
    finally:
        env.close()
        env.close()


def pool(remote, seed, first_env=0, **options):
    """Four environments over the actors of `remote`."""
    env = ActorPool(EnvironmentActor, jaxrl.make(COUNTING, **options), remote, remote.actors, 4, seed, first_env)
    env.wait()
    return env


def lethal(fault, seed=7):
    """Environments of which the last two, which are of one actor, meet `fault` in the third step."""
    return {"fault": fault, "at": (0, 2), "seeds": environment_seeds(seed, 4)[2:]}


@pytest.mark.long
def test_the_rows_are_those_of_this_process(backend):
    here, there = jaxrl.make(COUNTING).build(4, 7, 2), pool(Remote(**backend), 7, 2)
    for one, other in zip(played(here, 8), played(there, 8), strict=True):
        assert_equal(one, other)


def assert_replaced(remote, fault, words):
    """That the actor of the last two environments is, and that these begin an episode then."""
    env = pool(remote, 7, **lethal(fault))
    with pytest.warns(RuntimeWarning, match=f"2 to 3 {words}.*restarts=3"):
        rows = played(env, 6)
    assert env.failures == 1
    first, last = (np.stack([getattr(row, name) for row in rows]) for name in ("first", "last"))
    assert not last[2].any() and first[3].tolist() == [False, False, True, True]
    # Episodes of 3 steps: the first two go on undisturbed, the others begin anew.
    assert last.argmax(axis=0).tolist() == [3, 3, 6, 6]
    assert rows[3].reward.tolist() == [3.0, 3.0, 0.0, 0.0]


@pytest.mark.long
@pytest.mark.faults
def test_an_actor_that_dies_is_replaced_and_its_row_begins_an_episode(backend):
    assert_replaced(Remote(**backend), "kill", "died ")


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "timeout", "words"), [("stop", 5.0, "did not answer within 5 s"), ("cut", 60.0, "could not be reached ")]
)
def test_an_actor_behind_a_cut_link_is_replaced_as_one_that_died(cluster, fault, timeout, words):
    """One that says nothing any more, its process stopped and its connections open; and one that they are closed to."""
    assert_replaced(Remote(backend="ray", cpus=0.25, step_timeout=timeout), fault, words)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("policy", [False, True])
def test_a_slow_actor_is_waited_for_and_changes_nothing(backend, policy):
    """Each of its 16 steps takes 0.4 s, which is well below what a step may take; all together take longer."""
    slow = jaxrl.make(COUNTING, pause=0.2, seeds=environment_seeds(7, 4)[2:])  # two, both of one actor
    remote, found = Remote(policy=policy, step_timeout=6.0, **backend), []
    here, there = ({"actors": 2}, {}) if policy else ({"groups": 2}, {"groups": 2})
    for env, layout in (jaxrl.make(COUNTING), here), (slow, {**there, "remote": remote}):
        program = jaxrl.Sebulba(num_envs=4, shards=4, lockstep=True, lag=int(policy), **layout).bind(PPO, env)
        try:
            state, report = program.chunk(PPO, env, program.start(PPO, env, 7), 2, 100)
        finally:
            program.close()
        found.append(plain((state, report.replace(actors={}))))
        assert report.actors["failures"] == 0
    assert_equal(*found, 1e-5 if policy else 0.0)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "settings", "words"),
    [
        ("kill", {"restarts": 0}, "environments 2 to 3 died .*restarts=0 is exhausted"),
        ("hang", {"restarts": 0, "step_timeout": 1.0}, "did not answer within 1 s"),
        ("stop", {"restarts": 0, "step_timeout": 1.0}, "environments 2 to 3 did not answer within 1 s"),
        ("raise", {}, "the simulator is out of cheese"),
    ],
)
def test_what_cannot_be_replaced_is_a_clear_stop(backend, fault, settings, words):
    env = pool(Remote(**settings, **backend), 7, **lethal(fault))
    with pytest.raises(EnvironmentFailedError, match=f"(?s){words}") as caught:
        played(env, 6)
    if fault == "raise":
        assert caught.value.index == 2 and caught.value.seed == environment_seeds(7, 4)[2] and caught.value.action == 1


@pytest.mark.long
def test_a_run_is_the_same_wherever_its_environments_are(backend):
    env, found = jaxrl.make("gymnasium:CartPole-v1"), []
    for remote in (None, Remote(**backend)):
        topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, groups=2, lockstep=True, remote=remote)
        state, report = ran(topology, PPO, env, 4)
        found.append((state, report.replace(actors={})))
    assert_equal(*found)


@pytest.mark.long
def test_a_run_is_the_same_where_actors_have_the_policy(backend):
    env, found = jaxrl.make("gymnasium:CartPole-v1"), []
    there = Remote(policy=True, **backend)
    for layout in ({"actors": 2}, {"remote": there}):
        topology = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, lockstep=True, lag=1, **layout)
        state, report = ran(topology, PPO, env, 4)
        found.append((state, report.replace(actors={})))
        assert report.actors["policy_lag"] == pytest.approx(3 / 4) and report.actors["inference_batch"] == 4
    assert_equal(*found, 1e-5)


@pytest.mark.long
@pytest.mark.faults
def test_an_actor_with_the_policy_that_dies_is_replaced(backend):
    env = jaxrl.make(COUNTING, fault="kill", at=(1, 1), seeds=environment_seeds(7, 4)[2:])
    there = Remote(policy=True, **backend)
    program = jaxrl.Sebulba(num_envs=4, shards=4, remote=there).bind(PPO, env)
    try:
        with pytest.warns(RuntimeWarning, match="environments 2 to 3 died"):
            state, report = program.chunk(PPO, env, program.start(PPO, env, 7), 3, 100)
    finally:
        program.close()
    assert report.actors["failures"] == 1 and report.failed_at == -1
    assert int(np.asarray(state.steps_per_env.low)) == 3 * 8


@pytest.mark.long
@pytest.mark.parametrize(("policy", "interrupted"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_pool_of_rollouts_ends_while_groups_wait_for_room(policy, interrupted, backend, monkeypatch):
    layout = {"remote": Remote(actors=4, policy=policy, **backend)} | ({} if policy else {"actors": 4})
    env = jaxrl.make("gymnasium:CartPole-v1")
    check_ends_while_groups_wait(env, monkeypatch, interrupted=interrupted, **layout)


# --- without actors --------------------------------------------------------------------------------------------------

# The process of an actor with the policy: two rollouts of 8 steps, of which the eleventh step hangs.
ACTOR = """
import threading, time
import jax, numpy as np
from helpers.programs import ENV, NUM_ENVS, PPO
from helpers.spoiled import Spoiled
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.parallel.host_rollout import HostSteps
from jaxrl.parallel.remote.actors import RolloutActor
from jaxrl.parallel.sebulba.collector import Published

env = Spoiled(ENV, at=11, then=lambda host: threading.Event().wait(600))
spec, algo = env_spec(env), resolve_schedules(PPO, np.float32(0.0))
actor = RolloutActor(NUM_ENVS, 0, 0, env, HostSteps(spec, NUM_ENVS, NUM_ENVS, 8), 0, 3.0)
published = Published(algo, algo.actor(algo.init(jax.random.key(0), spec)), np.int32(0))
actor.rollout(published, 0)
time.sleep(4.0)
print("no step, no limit", flush=True)
actor.rollout(published, 8)
"""


@pytest.mark.long
@pytest.mark.faults
def test_a_step_that_hangs_ends_the_process_of_its_actor_with_the_stacks_shown():
    ended = python("-c", ACTOR, env=environment(), code=1)
    assert ended.stdout == "no step, no limit\n"
    for words in ("Timeout (0:00:03)!", "most recent call first", "spoiled.py", "in collect"):
        assert words in ended.stderr


def test_an_actor_that_another_thread_ends_is_lost():
    actors = LocalProcesses()
    actor = actors.start(threading.Event, ())
    reference, timer = actors.call(actor, "wait", ()), threading.Timer(0.1, actors.kill, [actor])
    timer.start()
    with pytest.raises(LostActorError, match="killed by signal 9"):
        actors.answer(reference, 60.0)
    timer.join()
    actors.kill(actor)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(jaxrl.JaxrlError, match=r"pip install 'jaxrl\[ray\]'"):
        jaxrl.Sebulba(remote=Remote(backend="ray")).bind(PPO, jaxrl.make("gymnasium:CartPole-v1"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"backend": "spark"}, "must be 'processes' or 'ray'"), ({"address": "a:1"}, "backend='ray'")],
)
def test_a_backend_that_is_unknown_or_has_no_address_is_refused(settings, said):
    with pytest.raises(jaxrl.JaxrlError, match=said):
        jaxrl.Sebulba(remote=Remote(**settings)).bind(PPO, jaxrl.make("gymnasium:CartPole-v1"))


def test_the_flag():
    kind = fields.kind_of(Remote | None)
    asked = values.build(values.read(kind, "remote:actors=4:backend=ray"))
    assert asked == Remote(actors=4, backend="ray")
    assert values.build(values.read(kind, fields.written(asked).replace("address=None", "address=none"))) == asked
