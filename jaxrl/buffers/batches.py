"""Operations on replay batches: exchange between devices, concatenation, importance weights, and statistics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core.sources import Prioritized, Replay
from jaxrl.core.types import Metrics, PyTree, Replicas, SampleInfo, SequenceBatch, TransitionBatch

Batch = TransitionBatch | SequenceBatch

_ITEM_AXES = {"rows": 1, "timesteps": 1, "mask": 1, "carry": 0, "sample_info": 0}  # in a batch of sequences


def map_items(along: Callable[[int], Callable], *batches: Batch) -> Batch:
    """Map the function `along(axis)` over the leaves of batches, where `axis` is the leaves' item axis."""
    first = batches[0]
    if isinstance(first, TransitionBatch):
        return jax.tree.map(along(0), *batches)
    fields = {name: [getattr(batch, name) for batch in batches] for name in _ITEM_AXES}
    return first.replace(**{name: jax.tree.map(along(_ITEM_AXES[name]), *found) for name, found in fields.items()})


# --- between devices -------------------------------------------------------------------------------------------------


def everywhere(x: jax.Array, replicas: Replicas) -> jax.Array:
    """Return the arrays [k] of all devices, concatenated in device order."""
    whole = jnp.zeros(x.shape[0] * replicas.devices, x.dtype)
    start = jnp.asarray(replicas.first_shard, jnp.int32) * (x.shape[0] // replicas.shards)
    return _summed(replicas, jax.lax.dynamic_update_slice(whole, x, (start,)))


def deliver(batch: Batch, mine: jax.Array, replicas: Replicas) -> Batch:
    """Return this device's part of a batch that was sampled from all devices.

    Args:
      batch: batch with one entry per draw; entries for items on other devices are ignored.
      mine: bool [draws], True for items that are on this device.
      replicas: the devices.
    """
    if replicas.devices == 1:
        return batch
    size = mine.shape[0] // replicas.devices
    start = jnp.asarray(replicas.first_shard, jnp.int32) * (size // replicas.shards)

    def along(axis):
        def part(x):
            own = mine.reshape((1,) * axis + mine.shape + (1,) * (x.ndim - axis - 1))
            whole = _summed(replicas, jnp.where(own, x, jnp.zeros_like(x)))
            return jax.lax.dynamic_slice_in_dim(whole, start, size, axis)

        return part

    return map_items(along, batch)


def _summed(replicas: Replicas, x: jax.Array) -> jax.Array:
    """Return the sum over devices of entries that are zero on all devices but one, exact even for -0.0 and NaN."""
    if x.dtype == jnp.bool_:
        return replicas.sum(x.astype(jnp.uint8)).astype(bool)
    words = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return replicas.sum(x)
    bits = jax.lax.bitcast_convert_type(x, words[x.dtype.itemsize])
    total = replicas.sum(bits.astype(jnp.uint32) if bits.dtype == jnp.uint16 else bits)
    return jax.lax.bitcast_convert_type(total.astype(bits.dtype), x.dtype)


# --- statistics ------------------------------------------------------------------------------------------------------


def drawn_statistics(idx: PyTree, info: SampleInfo, source: Replay, replicas: Replicas) -> Metrics:
    """Return the numbers of inserts and draws, and means over the last batch, as float32 scalars over all devices.

    Args:
      idx: the index, with the counts `inserted` and `sampled`.
      info: the batch's `sample_info`.
      source: the source of the batch.
      replicas: the devices.
    """
    inserted, sampled = idx.inserted.as_float(), idx.sampled.as_float()
    drawn = (info.probability > 0.0).astype(jnp.float32)
    found = replicas.sum(jnp.sum(drawn))

    def mean(x):
        return replicas.sum(jnp.sum(x.astype(jnp.float32) * drawn)) / jnp.maximum(found, 1.0)

    return {
        "inserted": inserted,
        "sampled": sampled,
        "found": found,
        "samples_per_insert": sampled * source.transitions / jnp.maximum(inserted, 1.0),
        "age_steps": mean(info.age_steps),
        "age_updates": mean(info.age_updates),
        "times_sampled": mean(info.times_sampled),
    }


def importance(sampler: Prioritized, items: jax.Array, chance: jax.Array, replicas: Replicas) -> jax.Array:
    """Return the importance weights (N P)^-beta of draws (Schaul et al., 2016, section 3.4).

    Args:
      sampler: the sampler, which has `beta` and `normalize`; "batch" divides the weights by the largest weight.
      items: N, the number of items on all devices, float32.
      chance: P, the probability of each draw, float32 [...]; draws that found no item have probability and weight 0.
      replicas: the devices over which the largest weight is computed.
    """
    beta = jnp.asarray(sampler.beta, jnp.float32)
    raised = jnp.power(items * jnp.where(chance > 0.0, chance, 1.0), -beta)
    weight = jnp.where(chance > 0.0, raised, 0.0)
    if sampler.normalize == "none":
        return weight
    return weight / jnp.maximum(replicas.max(jnp.max(weight)), jnp.finfo(jnp.float32).tiny)


# --- parts -----------------------------------------------------------------------------------------------------------


def join(batches: list[Batch], shards: int) -> Batch:
    """Concatenate the parts of a batch over `shards` local shards, so that each shard's items are contiguous."""
    if len(batches) == 1:
        return batches[0]
    if any(map(_discounted, batches)):
        batches = [batch.with_discounts() for batch in batches]

    def along(axis):
        def joined(*parts):
            split = [x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :]) for x in parts]
            whole = jnp.concatenate(split, axis=axis + 1)
            return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])

        return joined

    return map_items(along, *batches)


def _discounted(batch: Batch) -> bool:
    """Return whether a batch contains discounts from the environment."""
    return batch.bootstrap.dtype != bool if isinstance(batch, TransitionBatch) else batch.rows.discount is not None


def split(values: PyTree, sizes: list[int], shards: int) -> list[PyTree]:
    """Split the leaves [batch] of a joined batch into its parts, which have `sizes` items over all local shards."""
    ends = [sum(sizes[: number + 1]) // shards for number in range(len(sizes))]

    def parts(x):
        return [part.reshape(-1) for part in jnp.split(x.reshape(shards, -1), ends[:-1], axis=1)]

    leaves, structure = jax.tree.flatten(values)
    return [jax.tree.unflatten(structure, part) for part in zip(*map(parts, leaves), strict=True)]
