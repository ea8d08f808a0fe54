"""Replays that take rollouts as they are full: no group waits, and each environment's rows stay in order."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from algorithms import ALGORITHMS
from helpers.patience import PATIENCE, within
from helpers.programs import ENV, NUM_ENVS, REPLAY, all_finite, assert_equal, ran, started
from helpers.refused import refused
from helpers.served import ServedFromHost
from helpers.tiers import one_quick

import jaxrl
from jaxrl.algos.fields import Sampling
from jaxrl.core import keys, spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Fifo
from jaxrl.core.types import Episode, TimeStep, env_spec

HOST = ServedFromHost(ENV)
POOL = jaxrl.Sebulba(num_envs=NUM_ENVS, actors=NUM_ENVS, learner_batch=2, step_timeout=PATIENCE)
BATCH = 2 * REPLAY["rollout_length"]  # rows of an iteration
CHOICES = {
    "dqn": (ALGORITHMS["dqn"], spaces.Discrete(2)),
    "r2d2": (ALGORITHMS["r2d2"], spaces.Discrete(2)),
    "sac": (ALGORITHMS["sac"], spaces.Box(-1.0, 1.0, (1,))),
}
LATER = 10_000  # the first number of environments that are built for a resumed run


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered:
    """Environments that observe their index and the number of their moment; the first one waits for `free` to step."""

    action_space: object
    free: threading.Event
    begin: int = 0

    name, observation_space = "numbered", spaces.Box(0.0, 1e6, (2,))

    def build(self, num_envs, seed, first_env=0):
        assert num_envs == 1
        return NumberedEnvironment(self, first_env)


class NumberedEnvironment:
    """One of them: its episodes have a length of their own, and are terminated and truncated in turn."""

    num_envs = 1

    def __init__(self, recipe, env):
        self.recipe, self.env, self.number = recipe, env, recipe.begin

    def reset(self):
        return self.moment()

    def step(self, actions):
        if self.env == 0:
            self.recipe.free.wait(PATIENCE)
        self.number += 1
        return self.moment()

    def moment(self):
        first, last, terminated = moment(self.env, self.number - self.recipe.begin)
        one = lambda x, dtype: np.array([x], dtype)  # noqa: E731
        reward = one(0.0 if first else self.number, np.float32)
        return TimeStep(
            one([self.env, self.number], np.float32),
            reward,
            *(one(x, np.bool_) for x in (last and terminated, last and not terminated, first)),
            episode=Episode(reward, one(1, np.int32)),
        )

    def close(self):
        pass


def moment(env, number):
    """Whether a moment is the first or the last of its episode, and whether that episode is terminated."""
    length = 5 + env
    return number % length == 0, number % length == length - 1, number // length % 2 == 0


def check_items(program, algo, state):
    """Draw many items: of each, the rows are of one environment, in the order in which it made them."""
    experience = program.layout.experience(resolve_schedules(algo, 0.0))
    draw = jax.jit(lambda key, number: experience.sample(state.buffers, key, number)[1]["replay"])
    envs = set()
    for number in range(40):
        batch = jax.device_get(draw(keys.root_key(1), np.int32(number)))
        sequences = hasattr(batch, "mask")
        fine = batch.sample_info.probability > 0 if sequences else batch.weight
        for i in np.flatnonzero(fine):
            if sequences:
                env, numbers = batch.rows.observation[batch.mask[:, i], i].T
                again = np.diff(numbers) != 1
                assert (env == env[0]).all() and (numbers[1:][again] == LATER).all()
                envs.add(int(env[0]))
                continue
            (env, number), (to_env, to_number), steps = batch.observation[i], batch.next_observation[i], batch.steps[i]
            begin = LATER if number >= LATER else 0
            _, last, terminated = moment(int(env), int(to_number) - begin)
            assert env == to_env == batch.sample_info.position[i] % NUM_ENVS and to_number == number + steps
            np.testing.assert_array_equal(batch.rewards[i][:steps], number + 1 + np.arange(steps))
            assert bool(batch.bootstrap[i]) == (not (last and terminated))
            newest = int(state.buffers["replay"].ring.written[int(env)]) - 1
            assert steps == batch.rewards.shape[1] or last or (begin == 0 and newest > to_number)
            envs.add(int(env))
    return envs


@pytest.mark.parametrize("name", one_quick(CHOICES, "dqn"))
def test_a_group_that_hangs_holds_up_no_replay(name):
    """Seven of eight environments make all the steps while one waits; a resumed run leaves no item over the gap."""
    algo, action_space = CHOICES[name]
    free, count = threading.Event(), 60
    env = Numbered(action_space, free)
    algo = algo.resolve(env_spec(env), NUM_ENVS)
    try:
        with within(PATIENCE), started(POOL, algo, env) as (program, state):
            state, report = program.chunk(algo, env, state, count, 10**6)
            written = np.asarray(state.buffers["replay"].ring.written)
            assert written[0] == 0 and written.sum() == count * BATCH
            assert int(state.buffers["replay"].index.inserted) == count * BATCH
            asked = algo.replay_ratio * (count * BATCH - REPLAY["min_size"])
            assert asked <= int(state.learner.updates) <= asked + 1 and all_finite(state.learner)
            assert 0 not in check_items(program, algo, state)
            free.set()
            while not np.asarray(state.buffers["replay"].ring.written)[0]:
                state, _ = program.chunk(algo, env, state, 4, 10**6)
        env = dataclasses.replace(env, begin=LATER)
        with within(PATIENCE), started(POOL, algo, env) as (program, fresh):
            state = state.replace(timestep=fresh.timestep, carry=fresh.carry)
            state, _ = program.chunk(algo, env, state, 12, 10**6)
            assert 0 in check_items(program, algo, state)
    finally:
        free.set()


@pytest.mark.long
@pytest.mark.parametrize("error_buffer", [None, 160.0])
def test_samples_per_insert_are_those_of_the_settings(error_buffer):
    algo, action_space = CHOICES["dqn"]
    env, steps = Numbered(action_space, free := threading.Event()), 20_000
    free.set()
    topology = dataclasses.replace(POOL, error_buffer=error_buffer)
    algo = algo.resolve(env_spec(env), NUM_ENVS)
    with within(PATIENCE), started(topology, algo, env) as (program, state):
        state, _ = program.chunk(algo, env, state, steps // BATCH, 10**6)
    index = state.buffers["replay"].index
    asked, found = algo.replay_ratio * algo.batch_size, int(index.sampled) / (int(index.inserted) - algo.min_size)
    assert int(index.inserted) == steps and found == pytest.approx(asked, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_pool_of_one_group_learns_what_a_round_teaches(name):
    algo, found = ALGORITHMS[name].resolve(env_spec(HOST), 1), []
    for topology in ({"shards": 1, "queue": 1, "lockstep": True}, {"learner_batch": NUM_ENVS}):
        state, report = ran(jaxrl.Sebulba(num_envs=NUM_ENVS, **topology), algo, HOST, 1)
        found.append((state.learner, state.buffers["replay"].ring.rows, report.replace(actors={})))
    assert_equal(*found)


@pytest.mark.parametrize(
    ("algo", "fields", "said"),
    [
        ("dqn", {"devices": 2}, "devices=2"),
        ("dqn", {"shards": 2}, "shards=2"),
        ("dqn", {"max_lag": 900}, "max_lag=900"),
        ("fifo", {}, "Fifo"),
    ],
)
def test_what_a_pool_cannot_do_with_a_replay_is_refused(algo, fields, said):
    chosen = ALGORITHMS["dqn"]
    if algo == "fifo":
        chosen = chosen.replace(prioritized=None, sampling=Sampling(sampler=Fifo()))
    topology = dataclasses.replace(POOL, **fields)
    refused(lambda: topology.bind(chosen.resolve(env_spec(HOST), NUM_ENVS), HOST), said)
