"""Returns against sums written out from their definitions, and by their properties. `test_returns_golden.py`: rlax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algos import returns

T, B, ACTIONS = 14, 3, 3
SEEDS = st.integers(0, 2**32 - 1)
DISCOUNTS = st.floats(0.0, 1.0, width=32)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
quick = settings(max_examples=30)

FUNCTIONS = {name: jax.jit(getattr(returns, name)) for name in ("gae", "lambda_returns", "vtrace")}


def rows(seed, time=T, masked=True, discounted=False):
    """Random rows that keep the row convention, with both endings and, if asked, masked stretches without an ending.

    `discounted`: with discounts of the environment's own, which mean nothing at the terminated ones.
    """
    rng = np.random.default_rng(seed)
    terminated = rng.random((time, B)) < 0.15
    truncated = (rng.random((time, B)) < 0.15) & ~terminated
    weight = np.ones((time, B), bool)
    for t in range(1, time):
        weight[t] = ~((terminated | truncated)[t - 1] & weight[t - 1])
    if masked:
        weight &= rng.random((time, B)) > 0.1
    terminated, truncated = terminated & weight, truncated & weight

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "rewards": normal(time, B) * weight,
        "values": normal(time, B),
        "bootstrap_value": normal(B),
        "terminated": terminated,
        "truncated": truncated,
        "weight": weight,
        "discount": rng.uniform(0.2, 1.0, (time, B)).astype(np.float32) if discounted else None,
        "q_values": normal(time, B, ACTIONS),
        "bootstrap_q_values": normal(B, ACTIONS),
        "rhos": np.exp(normal(time, B)),
    }


def segment(data):
    return returns.Segment(*(jax.tree.map(jnp.asarray, data[x.name]) for x in dataclasses.fields(returns.Segment)))


def call(name, data, *arguments, **keywords):
    """One of the functions on `data`."""
    others = [jnp.asarray(data["rhos"])] if name == "vtrace" else []
    return FUNCTIONS[name](segment(data), *others, *arguments, **keywords)


# --- the definitions, written out ----------------------------------------------------------------------------------


class Definition:
    """Every return as the sum that its paper writes, in float64, one row and environment at a time."""

    def __init__(self, data, gamma):
        self.data, self.gamma = data, gamma
        self.time = data["rewards"].shape[0]

    def discount(self, steps, b):
        """The product of the discounts of these rows."""
        own = [1.0 if self.data["discount"] is None else float(self.data["discount"][t, b]) for t in steps]
        return self.gamma ** len(steps) * np.prod(own)

    def following(self, t, b, values="values", bootstrap="bootstrap_value"):
        """The value of the observation after row t, 0 where the task ended."""
        if self.data["terminated"][t, b]:
            return 0.0
        return float(self.data[bootstrap][b] if t + 1 == self.time else self.data[values][t + 1, b])

    def steps(self, t, b):
        """The rows of the same episode from t on, as far as they were seen."""
        found = []
        while t < self.time and self.data["weight"][t, b]:
            found.append(t)
            if self.data["terminated"][t, b] or self.data["truncated"][t, b]:
                break
            t += 1
        return found

    def td_error(self, t, b, predictions="values"):
        prediction = float(self.data[predictions][t, b])
        return float(self.data["rewards"][t, b]) + self.discount([t], b) * self.following(t, b) - prediction

    def n_step(self, t, b, n):
        steps = self.steps(t, b)[:n]
        rewards = sum(self.discount(steps[:k], b) * float(self.data["rewards"][s, b]) for k, s in enumerate(steps))
        return rewards + self.discount(steps, b) * self.following(steps[-1], b)

    def lambda_return(self, t, b, lam):
        longest = len(self.steps(t, b))
        mixed = sum((1 - lam) * lam ** (n - 1) * self.n_step(t, b, n) for n in range(1, longest))
        return mixed + lam ** (longest - 1) * self.n_step(t, b, longest)

    def gae(self, t, b, lam):
        steps = self.steps(t, b)
        return sum(self.discount(steps[:k], b) * lam**k * self.td_error(s, b) for k, s in enumerate(steps))

    def vtrace_value(self, s, b, lam, clip_rho, clip_c):
        rhos = self.data["rhos"].astype(np.float64)
        total, steps = float(self.data["values"][s, b]), self.steps(s, b)
        for k, t in enumerate(steps):
            traces = np.prod([lam * min(clip_c, rhos[i, b]) for i in steps[:k]])
            total += self.discount(steps[:k], b) * traces * min(clip_rho, rhos[t, b]) * self.td_error(t, b)
        return total

    def vtrace_advantage(self, s, b, lam, clip_rho, clip_c, clip_pg):
        if len(self.steps(s, b)) > 1:
            after = self.vtrace_value(s + 1, b, lam, clip_rho, clip_c)
        else:
            after = self.following(s, b)
        target = float(self.data["rewards"][s, b]) + self.discount([s], b) * after
        return min(clip_pg, float(self.data["rhos"][s, b])) * (target - float(self.data["values"][s, b]))

    def everywhere(self, function, elsewhere):
        """`function(t, b)` where weight is True, `elsewhere` where it is False."""
        result = np.array(np.broadcast_to(elsewhere, self.data["rewards"].shape), np.float64)
        for t, b in np.argwhere(self.data["weight"]):
            result[t, b] = function(t, b)
        return result


@quick
@given(SEEDS, DISCOUNTS, DISCOUNTS, st.booleans())
def test_gae_and_lambda_returns_are_their_sums(seed, gamma, lam, discounted):
    data = rows(seed, discounted=discounted)
    truth = Definition(data, gamma)
    close(call("gae", data, gamma, lam), truth.everywhere(lambda t, b: truth.gae(t, b, lam), 0.0))
    close(
        call("lambda_returns", data, gamma, lam),
        truth.everywhere(lambda t, b: truth.lambda_return(t, b, lam), data["values"]),
    )


@quick
@given(SEEDS, DISCOUNTS, DISCOUNTS, st.sampled_from([0.7, 1.0, 1.5]), st.sampled_from([0.5, 1.0, 1.2]), st.booleans())
def test_vtrace_is_its_sum(seed, gamma, lam, clip_rho, clip_c, discounted):
    data = rows(seed, discounted=discounted)
    truth = Definition(data, gamma)
    result = call("vtrace", data, gamma, trace_lambda=lam, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=1.1)
    close(
        result.values,
        truth.everywhere(lambda t, b: truth.vtrace_value(t, b, lam, clip_rho, clip_c), data["values"]),
        rtol=1e-4,
    )
    close(
        result.advantages,
        truth.everywhere(lambda t, b: truth.vtrace_advantage(t, b, lam, clip_rho, clip_c, 1.1), 0.0),
        rtol=1e-4,
    )


@quick
@given(SEEDS, DISCOUNTS, DISCOUNTS)
def test_the_lambda_return_of_the_greedy_value_may_have_forbidden_actions(seed, gamma, lam):
    data = rows(seed)
    data["q_values"][..., 1] = -np.inf  # an action that is never allowed
    data["bootstrap_q_values"][..., 1] = -np.inf
    greedy = data | {"values": data["q_values"].max(-1), "bootstrap_value": data["bootstrap_q_values"].max(-1)}
    truth = Definition(greedy, gamma)
    close(
        call("lambda_returns", greedy, gamma, lam),
        truth.everywhere(lambda t, b: truth.lambda_return(t, b, lam), greedy["values"]),
    )


# --- properties ----------------------------------------------------------------------------------------------------


@quick
@given(SEEDS, DISCOUNTS)
def test_ends_of_lambda(seed, gamma):
    data = rows(seed)
    truth = Definition(data, gamma)
    for lam, steps in ((1.0, T), (0.0, 1)):
        wanted = truth.everywhere(lambda t, b, steps=steps: truth.n_step(t, b, steps), data["values"])
        close(call("lambda_returns", data, gamma, lam), wanted)
        close(call("gae", data, gamma, lam) + data["values"], wanted)


@quick
@given(SEEDS, DISCOUNTS, DISCOUNTS)
def test_on_policy_corrections_are_the_lambda_return(seed, gamma, lam):
    data = rows(seed) | {"rhos": np.ones((T, B), np.float32)}
    target = call("lambda_returns", data, gamma, lam)
    corrected = call("vtrace", data, gamma, trace_lambda=lam)
    close(corrected.values, target)
    close(call("vtrace", data, gamma).advantages, call("gae", data, gamma, 1.0))


@quick
@given(SEEDS, DISCOUNTS, DISCOUNTS, st.floats(-3.0, 3.0, width=32))
def test_linear_in_rewards_and_values(seed, gamma, lam, factor):
    first, other = rows(seed), rows(seed + 1)
    factor = np.float32(factor)
    linear = ("rewards", "values", "bootstrap_value")
    second = first | {name: other[name] for name in linear}
    mixed = first | {name: first[name] + factor * second[name] for name in linear}
    for name, arguments in {
        "gae": (gamma, lam),
        "lambda_returns": (gamma, lam),
        "vtrace": (gamma,),
    }.items():
        parts = [call(name, data, *arguments) for data in (first, second, mixed)]
        jax.tree.map(lambda a, b, c: close(c, a + factor * b, atol=2e-4, rtol=1e-4), *parts)


@quick
@given(SEEDS, st.integers(1, T - 2), st.booleans())
def test_nothing_leaks_over_an_end(seed, end, by_time):
    """Everything after an episode changes; not one bit before does. A cut at a time limit sees the next value alone."""
    data = rows(seed, masked=False)
    for name in ("terminated", "truncated"):
        data[name][end : end + 2] = False
    data["truncated" if by_time else "terminated"][end] = True
    data["weight"][end], data["weight"][end + 1] = True, False
    data["terminated"] &= data["weight"]
    data["truncated"] &= data["weight"]
    last = end + 1 if by_time else end  # the last row whose value counts
    other = {name: None if x is None else np.array(x) for name, x in data.items()}
    for name in ("rewards", "values", "rhos"):
        other[name][last + 1 :] = np.nan
    other["rewards"][end + 1], other["rhos"][end + 1] = np.nan, np.nan
    other["weight"][end + 2 :] = False
    other["bootstrap_value"][:] = np.inf
    for name, arguments in {
        "gae": (0.9, 0.8),
        "lambda_returns": (0.9, 0.8),
        "vtrace": (0.9,),
    }.items():
        ours, changed = call(name, data, *arguments), call(name, other, *arguments)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[: end + 1], b[: end + 1]), ours, changed)


@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_rows_of_weight_zero_have_no_advantage_whatever_they_hold(name):
    data = rows(5)
    for field in ("rewards", "rhos"):
        data[field] = np.where(data["weight"], data[field], np.nan).astype(np.float32)
    result = call(name, data, 0.9, 0.8) if name == "gae" else call(name, data, 0.9).advantages
    assert np.isfinite(result).all()
    assert (np.asarray(result)[~data["weight"]] == 0.0).all()
    assert (~data["weight"]).sum() > 5


@quick
@given(st.floats(0.0, 0.984375, width=32), st.floats(-2.0, 2.0, width=32), DISCOUNTS, st.integers(1, T))
def test_a_constant_reward_truncated_for_ever_is_worth_r_over_one_minus_gamma(gamma, reward, lam, length):
    """r / (1 - gamma) is the fixed point, however short the time limit; taken as ends, it would be much less."""
    ends = (np.arange(T) % (length + 1)) == length - 1
    weight = (np.arange(T) % (length + 1)) != length
    worth = np.float32(reward) / (1 - np.float32(gamma))
    data = rows(0) | {
        "rewards": np.where(weight, np.float32(reward), np.float32(0))[:, None] * np.ones((1, B), np.float32),
        "values": np.full((T, B), worth, np.float32),
        "bootstrap_value": np.full(B, worth, np.float32),
        "terminated": np.zeros((T, B), bool),
        "truncated": np.repeat(ends[:, None], B, 1),
        "weight": np.repeat(weight[:, None], B, 1),
    }
    near = functools.partial(close, atol=2e-5 * max(1.0, abs(worth)))
    near(call("gae", data, gamma, lam), np.zeros((T, B)))
    near(call("lambda_returns", data, gamma, lam), data["values"])
    near(call("lambda_returns", data, gamma, 1.0), data["values"])
    near(call("vtrace", data, gamma).values, data["values"])


def test_gamma_and_lambda_may_be_traced_and_mapped():
    data = rows(7)
    gammas = jnp.float32([0.0, 0.5, 0.99])
    common = segment(data)
    mapped = jax.jit(jax.vmap(lambda gamma: returns.gae(common, gamma, gamma)))(gammas)
    for i, gamma in enumerate(gammas):
        close(mapped[i], returns.gae(common, gamma, gamma))
    slope = jax.grad(lambda gamma: jnp.sum(returns.lambda_returns(common, gamma, 1.0)))(jnp.float32(0.9))
    change = [np.sum(np.float64(call("lambda_returns", data, g, 1.0)), dtype=np.float64) for g in (0.901, 0.899)]
    close(slope, (change[0] - change[1]) / 0.002, rtol=1e-2)


def test_the_result_has_the_type_of_the_values():
    data = rows(8)
    assert call("gae", data, 0.9, 0.8).dtype == jnp.float32
    assert call("vtrace", data, jnp.float32(0.9)).values.dtype == jnp.float32


def test_wrong_shapes_and_types_are_told_at_once():
    good = segment(rows(9))
    for wrong in (
        {"rewards": good.rewards[:-1]},  # one reward too few
        {"values": jnp.concatenate([good.values, good.bootstrap_value[None]])},  # the bootstrap value at their end
        {"bootstrap_value": good.bootstrap_value[None]},  # a time axis
        {"terminated": good.terminated.astype(jnp.float32)},  # a float for a flag
        {"rewards": good.rewards.astype(jnp.int32)},  # whole rewards
        {"weight": good.weight[:, :1]},  # would broadcast
    ):
        with pytest.raises(AssertionError):
            returns.gae(good.replace(**wrong), 0.9, 0.8)
