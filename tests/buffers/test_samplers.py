"""Samplers: `choose` is tested with the replays that draw by it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers.samplers import usual_or


def test_what_is_rare_costs_only_the_runs_that_need_it():
    def drawn(weight):
        total = jnp.sum(weight)
        return usual_or(total > 0.0, lambda: (weight[0], total), lambda: (jnp.cumsum(weight + 1.0)[-1], total))

    weights = jnp.asarray([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
    for found in (jax.vmap(drawn)(weights), jax.tree.map(lambda *x: jnp.stack(x), *map(drawn, weights))):
        np.testing.assert_array_equal(found, ([1.0, 2.0, 3.0], [3.0, 0.0, 3.0]))
    # A branch would be a choice between both, computed for all runs.
    outside = {equation.primitive.name for equation in jax.make_jaxpr(jax.vmap(drawn))(weights).eqns}
    assert "while" in outside and "cumsum" not in outside
