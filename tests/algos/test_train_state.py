"""Steps down a gradient, targets, and means that count only what they should."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algos import train_state
from jaxrl.algos.train_state import weighted_mean, weighted_means
from jaxrl.parallel.replicas import SingleReplica

ONE = SingleReplica(1)


def test_a_step_is_what_the_transformation_gives():
    params, gradients = {"w": jnp.asarray([1.0, 2.0])}, {"w": jnp.asarray([3.0, -4.0])}
    state = train_state.create(params, (), optax.sgd(0.5, momentum=0.9))
    for velocity in ([3.0, -4.0], [0.9 * 3.0 + 3.0, 0.9 * -4.0 - 4.0]):
        before = np.asarray(state.params["w"])
        state, norm = train_state.apply_gradients(state, gradients, optax.sgd(0.5, momentum=0.9), ONE)
        assert norm == pytest.approx(5.0)
        np.testing.assert_allclose(state.params["w"], before - 0.5 * np.asarray(velocity), rtol=1e-6)
    assert state.target_params == ()


def test_a_target_has_arrays_of_its_own_and_moves_by_a_share():
    params = {"w": jnp.asarray([1.0, 2.0])}
    state = train_state.create(params, (), optax.sgd(0.1), target=True)
    assert state.target_params["w"].unsafe_buffer_pointer() != state.params["w"].unsafe_buffer_pointer()
    state = state.replace(params=jax.tree.map(lambda x: x + 1.0, params))
    for tau, expected in ((0.0, [1.0, 2.0]), (0.25, [1.25, 2.25]), (1.0, [2.0, 3.0])):
        moved = train_state.polyak_update(state, jnp.float32(tau)).target_params["w"]
        np.testing.assert_allclose(moved, expected, rtol=1e-6)


class Two(SingleReplica):
    """Two devices; the other one's numbers are larger by 2."""

    def mean(self, tree):
        return jax.tree.map(lambda x: x + 1.0, tree)


def test_model_state_is_averaged_over_replicas_and_followed_by_the_target():
    statistics = {"mean": jnp.asarray([1.0, 2.0]), "count": jnp.int32(3)}
    state = train_state.create({"w": jnp.zeros(1)}, statistics, optax.sgd(0.1), target=True)
    gradients = {"w": jnp.zeros(1)}
    same, _ = train_state.apply_gradients(state, gradients, optax.sgd(0.1), Two())
    assert same.model_state is state.model_state
    trained = {"mean": jnp.asarray([3.0, 4.0]), "count": jnp.int32(4)}
    new, _ = train_state.apply_gradients(state, gradients, optax.sgd(0.1), Two(), trained)
    np.testing.assert_array_equal(new.model_state["mean"], [4.0, 5.0])
    assert new.model_state["count"] == 4
    np.testing.assert_array_equal(new.target_variables.model_state["mean"], [1.0, 2.0])
    moved = train_state.polyak_update(new, jnp.float32(0.5)).target_variables.model_state
    np.testing.assert_array_equal(moved["mean"], [2.5, 3.5])


def test_weighted_mean_leaves_out_what_does_not_count():
    x = jnp.asarray([1.0, 2.0, jnp.float32(1e9), 3.0])
    assert weighted_mean(x, jnp.asarray([True, True, False, True]), ONE) == pytest.approx(2.0)
    assert weighted_mean(x, jnp.zeros(4, bool), ONE) == 0.0


def test_weighted_means_are_each_the_weighted_mean_and_so_are_their_gradients():
    random = np.random.default_rng(0)
    values = {name: jnp.asarray(random.normal(size=(4, 3)), jnp.float32) for name in "abc"}
    values["b"] = values["b"].at[0, 0].set(jnp.inf)
    weight = jnp.asarray(random.integers(0, 2, (4, 3)), bool).at[0, 0].set(False)
    replicas = Two(1)

    def alone(values):
        return {name: weighted_mean(x, weight, replicas) for name, x in values.items()}

    def together(values):
        return weighted_means(values, weight, replicas)

    for one, other in ((together, alone), (jax.jacobian(together), jax.jacobian(alone))):
        found, expected = one(values), other(values)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
