"""The mesh of devices of a run, and functions that place arrays on it."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core.types import PyTree
from jaxrl.parallel.targets import Target


def device_count(requested: int | None) -> int:
    """Return the number of devices of a run: by default 1 for a single process on CPUs, otherwise all devices."""
    if requested is not None:
        return requested
    alone_on_cpu = jax.default_backend() == "cpu" and jax.process_count() == 1
    return 1 if alone_on_cpu else jax.device_count()


def local_devices(target: Target | None = None) -> list[jax.Device]:
    """Return this process's devices; with a target, the devices that describe the target."""
    return jax.local_devices() if target is None else list(target.devices)


@lru_cache
def data_mesh(devices: int, processes: int | None = None, target: Target | None = None) -> jax.sharding.Mesh:
    """Return a mesh with one axis, "data", over the first devices of this process or of all processes.

    Every process contributes the same number of devices. The devices of a process are adjacent, in process order.

    Args:
      devices: total number of devices of these processes.
      processes: 1: only this process, as for a run of a sweep; None: all processes.
      target: accelerators to compile for, without running on them; they count as devices of this process.
    """
    auto, processes = (jax.sharding.AxisType.Auto,), processes or jax.process_count()
    if target is not None:
        return jax.sharding.Mesh(np.array(target.devices[:devices]), ("data",), axis_types=auto)
    if processes == 1:
        return jax.make_mesh((devices,), ("data",), axis_types=auto, devices=jax.local_devices()[:devices])
    by_process = [jax.local_devices(process_index=number)[: devices // processes] for number in range(processes)]
    return jax.sharding.Mesh(np.array(by_process).ravel(), ("data",), axis_types=auto)


def described(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Replace arrays and numbers by their shapes, to compile programs without running them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _arrays(tree))


def _arrays(tree):
    """Convert the numbers of a tree to arrays of JAX's default types, which differ from numpy's."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x, jnp.result_type(x)), tree)


def from_processes(tree: PyTree, mesh: jax.sharding.Mesh, specs: Any) -> PyTree:
    """Assemble global arrays from each process's part, without communication and without comparing values.

    Args:
      tree: arrays and numbers: for a sharded array, this process's part; for a replicated array, the same array in all
        processes.
      mesh: a mesh from `data_mesh`.
      specs: prefix tree of partition specs of the global arrays.
    """
    if jax.process_count() > 1:
        return multihost_utils.host_local_array_to_global_array(_arrays(tree), mesh, specs)
    return jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=_is_spec))


def sharded(tree: PyTree, mesh: jax.sharding.Mesh, specs: Any) -> PyTree:
    """Shard host arrays, which every process has in full, over the mesh by a prefix tree of partition specs."""

    def place(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), part)

    return jax.tree.map(place, specs, tree, is_leaf=_is_spec)


def local(tree: PyTree) -> PyTree:
    """Return this process's copy of replicated arrays; with one process, return the tree unchanged."""

    def copy(x):
        return x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x

    return jax.tree.map(copy, tree)


def on_one_device(tree: PyTree) -> PyTree:
    """Return the tree with all arrays on one device of this process, and without a mesh in their types."""

    def moved(x):
        if not getattr(x, "committed", False):  # tracers and NumPy arrays lack the attribute
            return x
        return x.addressable_data(0) if x.is_fully_replicated else jnp.asarray(np.asarray(x))

    return jax.tree.map(moved, tree)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cpu_devices(count: int) -> bool:
    """Split the CPU into `count` devices if JAX has not started; return whether there are at least `count` devices."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return jax.default_backend() == "cpu" and jax.local_device_count() >= count
    return True


def device_problems(devices: int, processes: int | None = None, target: Target | None = None) -> list[str]:
    """Return the reason why a run cannot have `devices` devices; empty if it can. See `data_mesh` for the arguments."""
    processes = 1 if target is not None else processes or jax.process_count()
    most = len(local_devices(target)) * processes
    if 1 <= devices <= most and devices % processes == 0:
        return []
    owner = "available" if target is None else f"of {target.name}"
    multiple = f" and a multiple of the {processes} processes" if processes > 1 else ""
    return [f"devices={devices} must be between 1 and {most}, the number of devices {owner}{multiple}"]


def over_devices(function: Callable, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Apply `jax.shard_map` to `function` with `check_vma=False`, because `MeshReplicas` averages gradients explicitly.

    Two kinds of inputs crash XLA's Shardy partitioner (jaxlib 0.11.2: a null operand in
    ManualComputationUnusedInputsPattern), so they are kept out of the map. An inner `jax.jit` keeps out arrays that the
    function closes over (brax's environments have over a hundred). Arrays without elements (MJX's states have dozens)
    are removed and restored. GSPMD, the older partitioner, aborts on a sort in these programs.

    Args:
      function: a function of one device's share of the arguments; may use collectives over the mesh's axes.
      mesh: the mesh; all of its axes are manual within `function`.
      in_specs: a tuple of partition specs, or prefix trees of them, one per argument.
      out_specs: partition specs of the result.
    """

    def call(*arguments):
        inputs = _Empty(in_specs, arguments, mesh)
        outputs = None

        @jax.jit
        def one(*shares):
            nonlocal outputs
            result = function(*inputs.restored(shares, whole=False))
            outputs = _Empty(out_specs, result, mesh)
            return outputs.without

        found = jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*inputs.without)
        assert outputs is not None
        return outputs.restored(found, whole=True)

    return call


class _Empty:
    """A tree, divided into its empty arrays (without elements) and all other arrays.

    Args:
      specs: a prefix tree of partition specs.
      tree: arrays.
      mesh: the mesh whose axes the specs name.
    """

    def __init__(self, specs: Any, tree: Any, mesh: jax.sharding.Mesh):
        def of_leaf(spec):
            return lambda x: partial(_make, NamedSharding(mesh, spec), x.shape, x.dtype) if x.size == 0 else False

        found = jax.tree.map(lambda spec, part: jax.tree.map(of_leaf(spec), part), specs, tree, is_leaf=_is_spec)
        self._empty = jax.tree.leaves(found)  # False for arrays with elements
        self._structure = jax.tree.structure(tree)
        self.without = jax.tree.map(lambda x: None if x.size == 0 else x, tree)

    def restored(self, rest: Any, *, whole: bool) -> Any:
        """Return the full tree, given all arrays except the empty ones.

        Args:
          rest: the arrays with elements.
          whole: True if the tree was one device's share and the result is global, False for the opposite.
        """
        others = iter(jax.tree.leaves(rest))
        return self._structure.unflatten(empty(whole) if empty else next(others) for empty in self._empty)


def _make(sharding, shape, dtype, whole):
    """Return an empty array: if `whole`, the global array whose share has `shape`; otherwise a share of that array."""
    if not whole:
        return jnp.zeros(sharding.shard_shape(shape), dtype)
    one = partial(jnp.zeros, shape, dtype)
    every = jax.shard_map(one, mesh=sharding.mesh, in_specs=(), out_specs=sharding.spec, check_vma=False)
    of_all = jax.eval_shape(every)
    return jax.lax.with_sharding_constraint(jnp.zeros(of_all.shape, dtype), sharding)


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)
