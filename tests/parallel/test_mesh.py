"""A function over devices: arrays without elements, which XLA's partitioner cannot take, go around it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxrl.parallel.mesh import data_mesh, over_devices


def test_arrays_without_elements_come_and_go_with_the_others():
    """Closed over, as inputs that are used or not, and as outputs, in whatever place; with None beside them."""
    mesh = data_mesh(4)
    closed = jnp.asarray(np.zeros((0, 3), np.float32))

    def one(state, step):
        state, inner, nothing = state["x"], state["empty"], state["none"]
        assert nothing is None and inner[0].shape == (2, 0, 3) and inner[1].shape == (0,)
        grown = jnp.concatenate([inner[0], jnp.zeros((2, 1, 3))], axis=1)
        new = {"x": state + step + grown.sum(), "empty": (inner[0] * 2, inner[1]), "none": None}
        return new, (closed, jax.lax.psum(state.sum(), "data"))

    specs = {"x": P("data"), "empty": (P("data"), P()), "none": P()}
    call = jax.jit(over_devices(one, mesh, (specs, P()), (specs, P())))
    state = {"x": jnp.arange(8.0), "empty": (jnp.zeros((8, 0, 3)), jnp.zeros(0, jnp.int32)), "none": None}
    for step in range(3):
        expected = state["x"] + step
        total = float(state["x"].sum())
        state, (empty, summed) = call(state, jnp.float32(step))
        np.testing.assert_array_equal(state["x"], expected)
        assert state["empty"][0].shape == (8, 0, 3)
        assert state["empty"][1].shape == (0,) and state["empty"][1].dtype == jnp.int32
        assert empty.shape == (0, 3) and float(summed) == total and state["none"] is None
