"""Dynamic batching: the same rows whoever is batched with whom, sizes and patience kept, and nobody waits forever."""

import dataclasses
import itertools
import math
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.patience import PATIENCE
from helpers.programs import ALGORITHMS, ENV, NUM_ENVS, actor_threads, assert_equal, plain
from hypothesis import given
from hypothesis import strategies as st

import jaxrl
from jaxrl.cli import fields, values
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import env_spec
from jaxrl.envs.host.jax_host import ServedFromHost
from jaxrl.parallel.host_rollout import HostSteps, complete
from jaxrl.parallel.sebulba.collector import Group, Published, StepCollector
from jaxrl.parallel.sebulba.inference import (
    Batches,
    ClosedError,
    DynamicBatching,
    Inference,
    InferenceCollector,
)
from jaxrl.parallel.sebulba.ready_collector import ReadyCollector

HOST = ServedFromHost(ENV)

# --- which requests make a batch ---------------------------------------------------------------------------------


@given(
    groups=st.integers(1, 6),
    at_once=st.integers(1, 3),
    length=st.integers(1, 6),
    smallest=st.integers(1, 18),
    largest=st.one_of(st.none(), st.integers(1, 18)),
    patience=st.sampled_from([0.0, 0.5, 3.0, math.inf]),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_keep_their_sizes_and_patience_and_nobody_waits_forever(
    groups, at_once, length, smallest, largest, patience, seed
):
    """A simulation: groups play two rollouts of two versions, each at its own speed, on a clock that events move."""
    envs, rng = groups * at_once, np.random.default_rng(seed)
    batching = DynamicBatching(smallest, largest, patience)
    if batching.problems(envs, at_once):
        return
    batches, now, acted, number = Batches(batching, envs, at_once), 0.0, np.zeros(groups, int), itertools.count()
    since, version = {}, np.zeros(groups, int)  # of those that wait; of all
    events = [(rng.exponential(), next(number), group, "enter") for group in range(groups)]
    while events or since:
        while True:
            batch, waited = batches.take(now)
            if not batch:
                break
            assert len({version[group] for group in batch}) == 1, "one version"
            assert len(batch) * at_once <= (envs if largest is None else largest)
            assert batch == sorted(batch, key=lambda group: since[group]), "the oldest first"
            others = [g for g in range(groups) if version[g] == version[batch[0]] and g in inside(events, since)]
            if len(batch) * at_once < smallest and now < since[batch[0]] + patience:
                assert set(others) <= set(batch), "somebody could have come"
            assert waited == pytest.approx(sum(now - since.pop(group) for group in batch))
            for group in batch:
                events.append((now + rng.exponential(2.0), next(number), group, "back"))
        left = batches.seconds_left(now)
        assert (left is None) == (not since or patience == math.inf)
        if left is not None and (not events or now + left < min(events)[0]):
            now += left
            assert batches.take(now - 1e-6)[0] == [] or left == 0, "not before patience is over"
            now = np.nextafter(now, np.inf)
            continue
        assert events, "all that is left would wait forever"
        event = min(events)
        events.remove(event)
        now, _, group, what = event
        if what == "back":
            acted[group] += 1
            if acted[group] % length == 0:
                batches.leave(version[group])
                version[group] += 1
                if version[group] < 2:
                    events.append((now + rng.exponential(), next(number), group, "enter"))
                continue
        else:
            batches.enter(version[group])
        since[group] = now
        batches.ask(version[group], group, now)
    assert (acted == 2 * length).all() and batches.requests == []


def inside(events, since):
    """The groups that are at a rollout: they wait, or their environments are at work."""
    return set(since) | {group for _, _, group, what in events if what == "back"}


def test_patience_counts_from_the_oldest_request():
    batches = Batches(DynamicBatching(smallest=3, patience=2.0), 4, 1)
    for group in range(4):
        batches.enter(0)
        if group < 2:
            batches.ask(0, group, now=10.0 + group)
    assert batches.take(11.5) == ([], 0.0) and batches.seconds_left(11.5) == 0.5
    assert batches.take(12.0) == ([0, 1], 3.0), "they waited for 2 and 1 seconds"
    assert batches.seconds_left(12.0) is None


def test_fewer_than_the_smallest_size_go_once_no_others_can_come():
    batches = Batches(DynamicBatching(smallest=3, patience=math.inf), 4, 1)
    for _ in range(4):
        batches.enter(0)
    for group in range(2):
        batches.ask(0, group, now=0.0)
    batches.leave(0)  # the end of its rollout; it may be blocked by a full queue then
    assert batches.take(1e9) == ([], 0.0), "the fourth may come"
    batches.enter(1)  # or begin the next rollout, with other parameters
    batches.ask(1, 2, now=1.0)
    assert batches.take(1e9)[0] == [2], "nobody else is at that one"
    batches.leave(0)
    assert batches.take(1e9)[0] == [0, 1]


@pytest.mark.parametrize(
    ("batching", "envs", "at_once", "sizes"),
    [
        (DynamicBatching(), 64, 1, [8, 16, 32, 64]),
        (DynamicBatching(smallest=4, largest=16), 64, 1, [4, 8, 16]),
        (DynamicBatching(largest=10), 16, 4, [4, 8]),
        (DynamicBatching(smallest=6), 6, 2, [6]),
        (DynamicBatching(), 3, 1, [1, 2, 3]),
    ],
    ids=str,
)
def test_few_sizes_are_compiled(batching, envs, at_once, sizes):
    assert batching.sizes(envs, at_once) == sizes


# --- what is collected -------------------------------------------------------------------------------------------

GROUPS = 4
STEPS = HostSteps(env_spec(ENV), 2 * NUM_ENVS, NUM_ENVS // GROUPS, 8)
FIRST = [NUM_ENVS + number * STEPS.group for number in range(GROUPS)]


@pytest.fixture(scope="module")
def published():
    """A recurrent policy with normalized observations, in three versions."""
    algo = jaxrl.schedules.resolve_schedules(ALGORITHMS["recurrent_ppo"], jnp.float32(0.0))
    actor = jax.jit(lambda version: algo.actor(algo.init(jax.random.key(version), env_spec(ENV))))
    return [Published(algo, actor(version), np.int32(version)) for version in range(3)]


def inference(batching, at_once=STEPS.group, steps=STEPS, **settings):
    return Inference(steps, batching, at_once, jax.random.key(3), FIRST, jax.devices()[0], **settings)


def together(collectors, published):
    """Their rollouts, each collected in a thread of its own."""
    collected = [[] for _ in collectors]

    def collect(number):
        for what in published:
            collected[number].append(plain(complete(collectors[number].collect(what, None))))

    threads = [threading.Thread(target=collect, args=(number,)) for number in range(len(collectors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for collector in collectors:
        collector.host.close()
    return collected


def begun(collector):
    collector.begin_at(2**32 - 10)  # ticks wrap
    return collector


@pytest.fixture(scope="module")
def alone(published):
    groups = [Group(STEPS, jax.random.key(3), first, jax.devices()[0]) for first in FIRST]
    hosts = [HOST.build(STEPS.group, 3, first) for first in FIRST]
    return together([begun(StepCollector(group, host)) for group, host in zip(groups, hosts, strict=True)], published)


@pytest.mark.long
@pytest.mark.parametrize(
    "batching",
    [
        DynamicBatching(patience=0.0),
        DynamicBatching(smallest=NUM_ENVS, patience=math.inf),
        DynamicBatching(smallest=3, largest=5, patience=math.inf),
        DynamicBatching(largest=STEPS.group),
    ],
    ids=str,
)
def test_who_is_batched_with_whom_changes_nothing(batching, published, alone):
    made = inference(batching)
    hosts = [HOST.build(STEPS.group, 3, first) for first in FIRST]
    collected = together(
        [begun(InferenceCollector(group, host)) for group, host in zip(made.groups, hosts, strict=True)], published
    )
    for one, other in zip(itertools.chain(*alone), itertools.chain(*collected), strict=True):
        assert_equal(one, other, 1e-5)  # products are rounded differently in batches of another size
        assert_equal(lived(one), lived(other))  # whatever is not the network's: bit by bit
    calls, rows, _ = made.metrics()
    assert rows == 3 * NUM_ENVS * STEPS.length and rows / NUM_ENVS <= calls <= rows / STEPS.group
    if batching.smallest == NUM_ENVS:
        assert calls <= 3 * (STEPS.length + 2 * GROUPS), "all, but where some begin a rollout or end it before others"
    if batching.largest == STEPS.group:
        assert calls == rows / STEPS.group, "each by itself"


@dataclasses.dataclass(frozen=True, eq=False)
class HalfFirst(ServedFromHost):
    """Environments of which one half is ready, then the other: each is stepped when it is received."""

    def build_async(self, num_envs, batch_size, seed, first_env=0):
        return Halves([self.build(batch_size, seed, first_env + at) for at in range(0, num_envs, batch_size)])


class Halves:
    name = "halves"

    def __init__(self, hosts):
        self.hosts, self.batch_size = hosts, hosts[0].num_envs
        self.num_envs = len(hosts) * self.batch_size

    def async_reset(self):
        self.begun = [(number, host.reset) for number, host in enumerate(self.hosts)]

    def send(self, actions, env_ids):
        [number] = set((env_ids // self.batch_size).tolist())  # what is received together is sent together
        self.begun.append((number, partial(self.hosts[number].step, actions[np.argsort(env_ids)])))

    def recv(self):
        number, call = self.begun.pop()
        return np.arange(self.batch_size, dtype=np.int32) + number * self.batch_size, call()

    def close(self):
        pass


@pytest.mark.long
def test_environments_that_are_ready_first_are_batched_over_groups(published, alone):
    made = inference(DynamicBatching(smallest=3, patience=math.inf), at_once=1)
    hosts = [HalfFirst(ENV).build_async(STEPS.group, 1, 3, first) for first in FIRST]
    collected = together(
        [begun(ReadyCollector(group, host)) for group, host in zip(made.groups, hosts, strict=True)], published
    )
    for one, other in zip(itertools.chain(*alone), itertools.chain(*collected), strict=True):
        assert_equal(one, other, 1e-5)
    calls, rows, _ = made.metrics()
    assert rows == 3 * NUM_ENVS * STEPS.length and calls < rows


def lived(collected):
    rollout = collected.rollout
    return rollout.rows.replace(extras={}), rollout.timesteps, collected.episodes


# --- what goes wrong ---------------------------------------------------------------------------------------------


def asking(made, published, numbers, found):
    """A thread for each of these groups, which asks for actions once; what comes or is raised is put into `found`."""
    host = HOST.build(STEPS.group, 3)
    shown = host.reset()
    host.close()

    def ask(number):
        try:
            with made.groups[number].rollout(published, shown) as rollout:
                entered.wait(PATIENCE)
                action = rollout.act(shown, np.zeros(STEPS.group, np.int32), np.arange(STEPS.group, dtype=np.int32))
            found[number] = action
        except Exception as error:
            found[number] = error

    entered = threading.Barrier(len(numbers))
    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    return threads


def joined(threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.long
def test_closing_lets_everybody_go_who_waits(published):
    made, found = inference(DynamicBatching(smallest=NUM_ENVS, patience=math.inf)), {}
    host = HOST.build(STEPS.group, 3)
    with made.groups[0].rollout(published[0], host.reset()):  # whose environments are at work, forever
        threads = asking(made, published[0], (1, 2, 3), found)
        wait_until(lambda: len(made._batches.requests) == 3)
        assert not found
        made.close()
        made.close()
        joined(threads)
    assert all(isinstance(found[number], ClosedError) for number in (1, 2, 3))
    host.close()


@pytest.mark.long
def test_a_group_that_fails_is_not_waited_for(published):
    made, found = inference(DynamicBatching(smallest=NUM_ENVS, patience=math.inf)), {}
    host = HOST.build(STEPS.group, 3)
    with pytest.raises(ZeroDivisionError), made.groups[0].rollout(published[0], host.reset()):
        threads = asking(made, published[0], (1, 2, 3), found)
        wait_until(lambda: len(made._batches.requests) == 3)
        assert not found
        raise ZeroDivisionError
    joined(threads)
    assert [np.shape(found[number]) for number in (1, 2, 3)] == [(STEPS.group,)] * 3
    host.close()


@pytest.mark.long
def test_what_the_policy_raises_all_raise_who_are_in_its_batch(published):
    made, found = inference(DynamicBatching(smallest=NUM_ENVS, patience=math.inf)), {}
    made._act = lambda *arguments: 1 / 0
    joined(asking(made, published[0], range(GROUPS), found))
    assert [type(found[number]) for number in range(GROUPS)] == [ZeroDivisionError] * GROUPS


@pytest.mark.long
def test_patience_is_that_of_the_clock_that_is_given(published):
    """The clock stands still until all who come have come; then it is two seconds later."""
    now, found = [0.0], {}
    made = inference(DynamicBatching(smallest=NUM_ENVS, patience=0.01), clock=lambda: now[0])
    host = HOST.build(STEPS.group, 3)
    with made.groups[0].rollout(published[0], host.reset()):  # which could come
        threads = asking(made, published[0], (1, 2, 3), found)
        wait_until(lambda: len(made._batches.requests) == 3)
        assert not found and made.metrics() == (0, 0, 0)
        now[0] = 2.0
        joined(threads)
    assert made.metrics() == (1, 3 * STEPS.group, 6.0) and len(found) == 3
    host.close()


def wait_until(condition):
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never was")


# --- whole runs --------------------------------------------------------------------------------------------------


def run(name, iterations, env=HOST, **topology):
    """The state and the report after some iterations, as numpy; and no thread is left."""
    algo = ALGORITHMS[name]
    program = jaxrl.Sebulba(num_envs=NUM_ENVS, shards=4, **topology).bind(algo, env)
    try:
        return plain(program.chunk(algo, env, program.start(algo, env, 3), iterations, 100))
    finally:
        program.close()
        assert not actor_threads()


@pytest.mark.long
@pytest.mark.parametrize("actor_devices", [1, 2])
def test_the_first_update_is_that_of_a_batch_a_group(actor_devices):
    one = run("ppo", 1, lockstep=False)
    batching = DynamicBatching(smallest=3, patience=math.inf)
    state, report = run("ppo", 1, actors=4, actor_devices=actor_devices, batching=batching)
    assert_equal(one[0], state, 1e-5)
    assert_equal(one[1].replace(actors={}), report.replace(actors={}), 1e-5)
    assert 2 <= report.actors["inference_batch"] <= 8 / actor_devices and report.actors["batching_seconds"] >= 0
    assert "batching_seconds" not in one[1].actors


@pytest.mark.long
def test_runs_go_on_and_learn_from_every_row():
    state, report = run("dqn", 6, actors=8, queue=2, batching=DynamicBatching(smallest=2, largest=4))
    assert int(np.asarray(state.steps_per_env.low)) == 6 * 8 and report.failed_at == -1
    assert 1 <= report.actors["inference_batch"] <= 4 and 0 <= report.actors["policy_lag"] <= 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups": 2}, "batching with groups=2: .* use groups=1, more actors"),
        ({"lockstep": True}, "batching with lockstep=True: .* use lockstep=None"),
        ({"batching": DynamicBatching(smallest=0)}, "batching.smallest=0 must be at least 1"),
        ({"batching": DynamicBatching(patience=-1.0)}, "batching.patience=-1.0 must be at least 0 seconds"),
        ({"batching": DynamicBatching(patience=math.nan)}, "batching.patience=nan must be at least 0 seconds"),
        ({"batching": DynamicBatching(4, 2)}, "batching.largest=2 must be at least smallest=4"),
        ({"batching": DynamicBatching(1, 2)}, "batching.largest=2 is less than the 4 environments that step together"),
        ({"batching": DynamicBatching(9)}, "smallest=9 is more than a batch can have: .* use at most 8"),
        ({"batching": DynamicBatching(5, 7)}, "smallest=5 is more than a batch can have: .* use at most 4"),
        ({"batching": DynamicBatching(5), "actor_devices": 2}, "a device has 4; use at most 4"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_told_at_once(settings, words):
    settings = {"actors": 2, "batching": DynamicBatching()} | settings
    with pytest.raises(ConfigError, match=words):
        jaxrl.Sebulba(num_envs=NUM_ENVS, **settings).bind(ALGORITHMS["ppo"], HOST)


def test_ray_actors_that_act_themselves_are_refused(monkeypatch):
    monkeypatch.setattr(jaxrl.Remote, "problems", lambda *_: [])  # Ray need not be here
    remote = jaxrl.Remote(policy=True)
    with pytest.raises(ConfigError, match="batching with remote.policy=True: Ray actors act themselves"):
        jaxrl.Sebulba(num_envs=NUM_ENVS, batching=DynamicBatching(), remote=remote).bind(ALGORITHMS["ppo"], HOST)


def test_a_run_with_it_is_free_of_lockstep():
    topology = jaxrl.Sebulba(num_envs=NUM_ENVS, actors=2)
    assert topology.resolve(ALGORITHMS["ppo"]).lockstep
    assert not dataclasses.replace(topology, batching=DynamicBatching()).resolve(ALGORITHMS["ppo"]).lockstep


def test_the_flag():
    kind = fields.kind_of(DynamicBatching | None)
    asked = values.build(values.read(kind, "dynamicbatching:smallest=4:patience=0.5"))
    assert asked == DynamicBatching(4, None, 0.5)
    assert values.build(values.read(kind, fields.written(asked).replace("None", "none"))) == asked
