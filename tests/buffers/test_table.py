"""The table against a plain Python one: every sampler and remover, move by move."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tables import RULES, Model
from hypothesis import stateful
from hypothesis import strategies as st
from scipy import stats

from jaxrl.buffers import item_table
from jaxrl.core.sources import Fifo, Prioritized, Uniform

COUNT = 2  # of every call, so that each is compiled once


@functools.cache
def compiled(rules):
    return {name: jax.jit(getattr(rules, name)) for name in ("insert", "update_priorities")} | {
        "sample": jax.jit(rules.sample, static_argnums=2)
    }


class Machine(stateful.RuleBasedStateMachine):
    """Moves made on both; what the table draws by chance is followed by the model, and must be possible."""

    @stateful.initialize(rules=st.sampled_from(RULES))
    def begin(self, rules):
        self.rules = item_table.Table(4, *rules)
        self.do = compiled(self.rules)
        self.state = self.rules.init(jnp.int32(0))
        self.model, self.keys, self.values = Model(self.rules), {}, 0

    @stateful.rule(priorities=st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=COUNT, max_size=COUNT))
    def insert(self, priorities):
        values = [self.values + 1 + i for i in range(COUNT)]
        self.values += COUNT
        self.state, keys = self.do["insert"](self.state, np.array(values, np.int32), np.array(priorities, np.float32))
        for i, (value, priority) in enumerate(zip(values, priorities, strict=True)):
            self.model.insert(value, priority)
            self.keys[value] = (int(keys.position[i]), int(keys.generation[i]))

    @stateful.rule(seed=st.integers(0, 2**16))
    def sample(self, seed):
        self.state, drawn = self.do["sample"](self.state, jax.random.key(seed), COUNT)
        drawn = jax.device_get(drawn)
        for i in range(COUNT):
            assert bool(drawn.held[i]) == bool(self.model.items) and int(drawn.size[i]) == len(self.model.items)
            if not self.model.items:
                continue
            value = int(drawn.items[i])
            possible = self.model.pick(self.rules.sampler)
            assert value in possible
            item = self.model.draw(value)
            np.testing.assert_allclose(drawn.probability[i], possible[value], rtol=1e-5)
            assert (drawn.times_sampled[i], drawn.priority[i]) == (item["times"], item["priority"])
            assert (int(drawn.key.position[i]), int(drawn.key.generation[i])) == self.keys[value]

    def named(self, picks):
        values = [sorted(self.keys)[pick % len(self.keys)] for pick in picks]
        place, generation = zip(*(self.keys[v] for v in values), strict=True)
        return values, item_table.Key(np.array(place, np.int32), np.array(generation, np.int32))

    @stateful.precondition(lambda self: self.keys)
    @stateful.rule(
        picks=st.lists(st.integers(0, 50), min_size=COUNT, max_size=COUNT),
        priorities=st.lists(st.sampled_from([0.0, 1.0, 3.0, float("nan"), -1.0]), min_size=COUNT, max_size=COUNT),
    )
    def update(self, picks, priorities):
        values, keys = self.named(picks)
        self.state = self.do["update_priorities"](self.state, keys, np.array(priorities, np.float32))
        for value, priority in zip(values, priorities, strict=True):
            if priority >= 0:
                self.model.update(value, priority)

    @stateful.invariant()
    def same(self):
        if not hasattr(self, "state"):
            return
        state = jax.device_get(self.state)
        held = np.flatnonzero(state.priority >= 0)
        assert sorted((int(state.items[p]), float(state.priority[p]), int(state.times_sampled[p])) for p in held) == [
            (i["value"], i["priority"], i["times"]) for i in sorted(self.model.items, key=lambda i: i["value"])
        ]
        assert int(state.size) == len(held) and int(state.clock) == self.model.clock


Machine.TestCase.settings = hypothesis.settings(max_examples=25, stateful_step_count=12, deadline=None)
test_the_table_is_the_plain_one = Machine.TestCase


@pytest.mark.long
@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(exponent=0.5)])
def test_frequencies(sampler):
    rules = item_table.Table(40, sampler)
    priority = np.arange(40, dtype=np.float32) ** 2
    state, _ = rules.insert(rules.init(jnp.int32(0)), np.arange(40, dtype=np.int32), priority)
    _, drawn = jax.jit(rules.sample, static_argnums=2)(state, jax.random.key(0), 20_000)
    expected = np.ones(40) if isinstance(sampler, Uniform) else np.sqrt(priority)
    counts = np.bincount(drawn.items, minlength=40)
    assert counts[expected == 0].sum() == 0
    keep = expected > 0
    assert stats.chisquare(counts[keep], 20_000 * expected[keep] / expected.sum()).pvalue > 1e-3


def test_a_queue_gives_each_item_once_in_order():
    rules = item_table.Table(8, Fifo(), Fifo(), 1)
    state, _ = rules.insert(rules.init(jnp.int32(0)), np.arange(6, dtype=np.int32), np.ones(6, np.float32))
    state, drawn = rules.sample(state, jax.random.key(0), 4)
    np.testing.assert_array_equal(drawn.items, [0, 1, 2, 3])
    state, drawn = rules.sample(state, jax.random.key(0), 4)
    np.testing.assert_array_equal(drawn.held, [True, True, False, False])
    np.testing.assert_array_equal(drawn.items[:2], [4, 5])
    assert int(state.size) == 0
