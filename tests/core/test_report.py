"""Sums over episodes: added and merged in any order they are those of all episodes at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl.core.report import EpisodeSums, make_report
from jaxrl.core.types import env_spec
from jaxrl.parallel.layout import Layout


@jax.jit
def sums(returns):
    """Of episodes [n], or of several parts [parts, n]."""
    count = jnp.full(returns.shape[:-1], jnp.float32(returns.shape[-1]))
    mean = jnp.mean(returns, axis=-1)
    squares = jnp.sum(jnp.square(returns - mean[..., None]), axis=-1)
    zero = jnp.zeros_like(count)
    return EpisodeSums(count, mean * count, squares, count, count, zero)


@pytest.mark.long
@pytest.mark.parametrize("mean, std", [(10_000.0, 5.0), (-3.0, 100.0), (1e6, 0.0)])
def test_the_deviation_of_large_returns_does_not_cancel(mean, std):
    """In float32, over 100,000 episodes; as sums of squares 10,000 +- 5 came out as 18."""
    returns = (mean + std * np.random.default_rng(0).normal(size=(1_000, 4, 25))).astype(np.float32)
    total = EpisodeSums.zero()
    devices = EpisodeSums(*(jnp.zeros(4) for _ in range(6)))
    for chunk in returns:
        total = total + sums(chunk.reshape(-1))
        devices = devices + sums(chunk)
    merged = devices.merged(partial(jax.tree.map, jnp.sum))
    for found in (total.metrics(), merged.metrics()):
        np.testing.assert_allclose(found["return_mean"], returns.astype(np.float64).mean(), rtol=1e-5)
        np.testing.assert_allclose(
            found["return_std"], returns.astype(np.float64).std(), rtol=0.01, atol=1e-5 * abs(mean)
        )
        assert found["episodes"] == 100_000


def test_parts_without_episodes_change_nothing():
    some, none = sums(jnp.asarray([1.0, 5.0])), EpisodeSums.zero()
    for found in (none + some, some + none, none + none + some):
        assert found.metrics()["return_mean"] == 3.0 and found.metrics()["return_std"] == 2.0
    assert np.isnan((none + none).metrics()["return_std"])


def test_lives_are_added_as_games_are():
    one, other = (sums(jnp.asarray(x)).replace(lives=sums(jnp.asarray(y))) for x, y in (([1.0], [1.0]), ([3.0], [9.0])))
    found = (one + other).metrics()
    assert found["return_std"] == 1.0 and found["life_return_std"] == 4.0


def of_an_iteration(name, fine, made=1.0):
    broken = {name: jnp.int32(not fine)}
    return make_report(EpisodeSums.zero(), {"entropy": jnp.float32(2.0)}, jnp.float32(made), broken)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rewards", "losses", "failed_at"),
    [
        # By iteration of the chunk, whether all was finite: of the rewards stored, of the updates made.
        ({0: True, 1: True, 2: True}, {}, -1),
        ({0: True, 1: True, 2: True}, {2: False}, 2),  # the first update of the chunk
        ({0: True, 1: True, 2: True}, {1: True, 2: False}, 2),
        ({0: True, 1: True, 2: True}, {3: False}, 2),  # after the last rollout
        ({0: True, 1: False, 2: True}, {2: False}, 1),
        ({0: True, 1: True, 2: False}, {1: False}, 1),
    ],
)
def test_where_updates_and_rollouts_come_apart_the_first_failure_has_its_iteration(rewards, losses, failed_at):
    layout = Layout(env_spec(jaxrl.make("gymnax:CartPole-v1")), num_envs=1, devices=1, shards=1)
    stored = updated = None
    for number, fine in rewards.items():
        stored = layout.accumulated(stored, of_an_iteration("reward", fine, made=0.0), number)
    for number, fine in losses.items():
        updated = layout.accumulated(updated, of_an_iteration("loss", fine), number)
    found = stored if updated is None else stored.with_updates(updated, 2)
    assert found.failed_at == failed_at
    assert found.made == len(losses)
