"""Updates are as many as the replay ratio says, exactly, whatever the environments, rollouts and topology."""

import dataclasses
from fractions import Fraction
from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.programs import ENV, started
from helpers.served import ServedFromHost
from helpers.tiers import one_quick
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
from jaxrl.algos.fields import Sampling
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import ActorOutput, ActorState, Counter, Replay, UpdateInfo, env_spec
from jaxrl.parallel import replay_ratio

RATIOS = st.fractions(min_value=Fraction(1, 40), max_value=4, max_denominator=40)


@struct.dataclass
class Counting:
    """Acts alike everywhere; its state is how often it was updated."""

    source: Replay = struct.field(pytree_node=False)

    @property
    def experience(self):
        return {"replay": self.source}

    def validate(self, spec, num_envs, shards):
        return []

    def init(self, key, spec):
        return jnp.int32(0)

    def actor(self, state):
        return ActorState(params=state)

    def initial_carry(self, spec, env_index, num_envs):
        return ()

    def act(self, actor, timestep, carry, key, *, spec, explore):
        return ActorOutput(jnp.zeros(timestep.first.shape, jnp.int32), carry)

    def update(self, state, batch, *, spec, key, replicas):
        return state + 1, UpdateInfo({"weight": jnp.mean(batch["replay"].weight.astype(jnp.float32))})


def counting(ratio, length, min_size=1):
    source = Replay(4096, batch_size=8, min_size=min_size, rollout_length=length, replay_ratio=float(ratio))
    return Counting(source)


def after(algo, topology, iterations, env=ENV):
    """Updates that the learner counts after so many iterations, in two chunks, and those that the reports count."""
    with started(topology, algo, env, 0) as (program, state):
        made = 0.0
        for length in (iterations // 3, iterations - iterations // 3):
            if length:
                state, report = program.chunk(algo, env, state, length, 10**6)
                metrics = report.metrics()
                made += float(metrics["train/updates"])
                assert not float(report.iterations) or metrics["update/weight"] == 1.0, "a mean over updates"
        return int(state.learner), made


@pytest.mark.long
@given(ratio=RATIOS, num_envs=st.integers(1, 64), length=st.integers(1, 40), start=st.integers(0, 2**50))
def test_iterations_add_up_to_the_ratio(ratio, num_envs, length, start):
    average = replay_ratio.updates_per_iteration(float(ratio), num_envs, length)
    assert average == ratio * num_envs * length
    iterations = start // length + np.arange(1, 2 * average.denominator + 1)
    steps = iterations * length
    counter = Counter(jnp.asarray(steps >> 32, jnp.uint32), jnp.asarray(steps & 0xFFFFFFFF, jnp.uint32))
    updates = np.broadcast_to(replay_ratio.updates_now(average, counter, length), steps.shape)
    expected = [floor(int(k) * average) - floor((int(k) - 1) * average) for k in iterations]
    np.testing.assert_array_equal(updates, expected)
    assert updates.sum() == ratio * num_envs * length * 2 * average.denominator


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(ratio=RATIOS, num_envs=st.sampled_from([1, 3, 8]), length=st.integers(2, 5))
def test_anakin_makes_exactly_as_many(ratio, num_envs, length):
    average = ratio * num_envs * length
    iterations = 2 * average.denominator
    expected = average * iterations
    assert after(counting(ratio, length), jaxrl.Anakin(num_envs, devices=1), iterations) == (expected, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "ratio, num_envs, iterations, expected", one_quick([(0.25, 1, 4, 2), (2.5, 1, 3, 15), (1, 8, 3, 48)])
)
def test_anakin_with_the_usual_ratios(ratio, num_envs, iterations, expected):
    assert after(counting(ratio, 2), jaxrl.Anakin(num_envs, devices=1), iterations) == (expected, expected)


@pytest.mark.long
def test_lockstep_sebulba_makes_exactly_as_many():
    topology = jaxrl.Sebulba(num_envs=2, lockstep=True)
    assert after(counting(0.625, 2), topology, 4, ServedFromHost(ENV)) == (10, 10)


ASKED = [{"replay_ratio": ratio} for ratio in (0.25, 1, 2.5)]
ASKED += [{"replay_ratio": None, "sampling": Sampling(samples_per_insert=samples)} for samples in (8, 64, 160)]


@pytest.mark.long
@pytest.mark.parametrize("host", [False, True], ids=["anakin", "sebulba"])
@pytest.mark.parametrize("num_envs", one_quick([1, 8, 64], 8))
@pytest.mark.parametrize(
    "asked",
    one_quick([pytest.param(x, id="-".join(f"{k}={v}" for k, v in x.items() if v)) for x in ASKED], ASKED[3]),
)
def test_ratios_and_samples_per_insert_are_exact(asked, num_envs, host):
    """Of batches of 64 transitions: 8, 64 and 160 samples an insert are an eighth, 1 and 2.5 updates a step."""
    batch, iterations = 64, 8
    fields = jaxrl.DQN(batch_size=batch, capacity=8192, min_size=1, rollout_length=1, n_step=1, **asked)
    assert fields.validate(env_spec(ENV), num_envs, 1) == []
    topology = jaxrl.Anakin(num_envs, devices=1)
    if host:
        topology = jaxrl.Sebulba(num_envs=num_envs, lockstep=True)
    ratio = asked["replay_ratio"] or asked["sampling"].samples_per_insert / batch
    # The first iteration has no transition that is complete.
    steps = num_envs * iterations
    expected = floor(Fraction(ratio) * steps) - floor(Fraction(ratio) * num_envs)
    made = after(Counting(fields.experience["replay"]), topology, iterations, ServedFromHost(ENV) if host else ENV)
    assert made == (expected, expected)


def test_sequences_count_the_transitions_that_they_have():
    source = jaxrl.R2D2(replay_ratio=None, sampling=Sampling(samples_per_insert=16), batch_size=64).experience["replay"]
    assert source.transitions == 80 and source.replay_ratio == jaxrl.R2D2().replay_ratio


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replay_ratio": 0.5, "sampling": Sampling(samples_per_insert=8)}, "set the same ratio; set one of them"),
        ({"replay_ratio": None}, "replay_ratio=None and sampling.samples_per_insert=None; set one of them"),
        ({"sampling": Sampling(samples_per_insert=0.0)}, "samples_per_insert=0.0 must be more than 0"),
    ],
)
def test_one_of_the_two_is_given(fields, said):
    with pytest.raises(ConfigError, match=said):
        jaxrl.Anakin(1, devices=1).bind(jaxrl.DQN(**fields), ENV)


@pytest.mark.long
def test_before_there_is_enough_there_are_none():
    # 16 environment steps an iteration and 1.6 updates; the first two iterations have too few steps.
    algo = counting(0.1, 2, min_size=48)
    assert after(algo, jaxrl.Anakin(8, devices=1), 2) == (0, 0)
    assert after(algo, jaxrl.Anakin(8, devices=1), 10) == (16 - 3, 16 - 3)


@pytest.mark.long
def test_before_every_environment_has_the_steps_of_one_item_there_are_none():
    """A batch of padding would count as an update, and end the random actions of the warm-up."""
    algo = counting(1, 2)
    algo = algo.replace(source=dataclasses.replace(algo.source, n_step=5))  # reads 6 steps: 3 iterations
    assert after(algo, jaxrl.Anakin(8, devices=1), 2) == (0, 0)
    assert after(algo, jaxrl.Anakin(8, devices=1), 4) == (32, 32)


@pytest.mark.long
def test_runs_that_are_mapped_make_as_many_each():
    algo = counting(0.3, 1)
    program = jaxrl.Anakin(1, devices=1).bind(algo, ENV)
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    state, _ = jax.vmap(lambda key: program.run(algo, ENV, key, 20, jnp.float32(20.0)))(keys)
    np.testing.assert_array_equal(state.learner, [6, 6, 6])


@pytest.mark.parametrize(
    "ratio, said",
    [
        (np.pi, "use 3.14"),
        (1e-7, r"use 1.5\d*e-05 \(1 updates every 65536"),
        (0.0, "more than 0"),
        (np.inf, "more than 0"),
    ],
)
def test_a_ratio_that_cannot_be_kept_is_refused_and_one_that_can_be_is_named(ratio, said):
    algo = counting(1, 1)
    algo = algo.replace(source=dataclasses.replace(algo.source, replay_ratio=ratio))
    with pytest.raises(ConfigError, match=said) as error:
        jaxrl.Anakin(1, devices=1).bind(algo, ENV)
    if "use " in str(error.value):
        named = float(str(error.value).split("; use ")[1].split()[0])
        assert replay_ratio.problems(named, 1, 1) == []
