"""Reductions over devices, and the one right way to average gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxrl.parallel.replicas import MeshReplicas, SingleReplica

MESH = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


EVERYWHERE, SPLIT = P(), P("devices")


def on_four(function, out_specs=EVERYWHERE, check_vma=False):
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=(EVERYWHERE, SPLIT), out_specs=out_specs, check_vma=check_vma)
    )


X = jnp.asarray([1.0, 2.0, 4.0, 7.0])


def test_averaged_gradients_are_the_gradient_of_the_mean_loss():
    """d/dw mean(w x) = mean(x) = 3.5."""
    replicas = MeshReplicas("devices")

    def gradient(w, x):
        return replicas.mean(jax.grad(lambda w: jnp.mean(w * x))(w))

    assert float(on_four(gradient)(jnp.float32(2.0), X)) == 3.5
    alone = jax.grad(lambda w: jnp.mean(w * X))(jnp.float32(2.0))
    assert float(SingleReplica(4).mean(alone)) == 3.5


def test_why_topologies_switch_the_vma_check_off():
    """With it, the same lines give 4 times the gradient on 4 devices, and no error."""

    def gradient(w, x):
        return jax.lax.pmean(jax.grad(lambda w: jnp.mean(w * x))(w), "devices")

    assert float(on_four(gradient, check_vma=True)(jnp.float32(2.0), X)) == 14.0
    assert float(on_four(gradient, check_vma=False)(jnp.float32(2.0), X)) == 3.5


def test_reductions_over_four_devices():
    replicas = MeshReplicas("devices", shards=2)

    def reduce(_, x):
        tree = {"a": x[0], "b": (x[0].astype(jnp.int32),)}
        flags = [replicas.any(x[0] > limit) for limit in (6.0, 7.0)]
        return replicas.mean({"a": x[0]}), replicas.sum(tree), replicas.max(tree), flags, replicas.first_shard[None]

    reduced = on_four(reduce, out_specs=(*[EVERYWHERE] * 4, SPLIT))
    mean, total, largest, flags, first = reduced(jnp.float32(0), X)
    assert float(mean["a"]) == 3.5
    assert (float(total["a"]), int(total["b"][0])) == (14.0, 14)
    assert (float(largest["a"]), int(largest["b"][0])) == (7.0, 7)
    assert total["b"][0].dtype == jnp.int32
    assert [bool(flag) for flag in flags] == [True, False]
    np.testing.assert_array_equal(first, [0, 2, 4, 6])


def test_one_device_is_the_identity():
    replicas = SingleReplica(shards=3)
    tree = {"a": X, "b": jnp.int32(3)}
    assert replicas.mean(tree) is replicas.sum(tree) is replicas.max(tree) is tree
    assert bool(replicas.any(jnp.bool_(True)))
    assert (replicas.shards, replicas.first_shard) == (3, 0)


def test_several_axes_count_shards_along_both():
    mesh = jax.make_mesh((2, 2), ("hosts", "devices"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    replicas = MeshReplicas(("hosts", "devices"))
    both = P(("hosts", "devices"))
    first = jax.shard_map(
        lambda x: replicas.first_shard[None] + 0 * x, mesh=mesh, in_specs=both, out_specs=both, check_vma=False
    )(jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(first, [0, 1, 2, 3])
