"""SQIL: a demonstration's step has reward 1 and another 0, and an update is SAC's on both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.continuous import BATCH, SAC, SPEC, initial, transitions

from jaxrl.algos.sac import rewarded
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.sources import Dataset
from jaxrl.parallel.replicas import SingleReplica

ALGO = SAC.replace(imitate=True, n_step=3)


def parts():
    own, shown = transitions(3, seed=0), transitions(3, seed=1)
    steps = jnp.arange(BATCH, dtype=jnp.int32) % 3 + 1
    return {"replay": own, "demonstrations": shown.replace(steps=steps)}


def by_hand(batch, shards):
    """Each shard's own transitions and then its demonstrations, with the rewards of algorithm 1."""
    size = BATCH // shards
    rows = [
        (part, row)
        for shard in range(shards)
        for part in ("replay", "demonstrations")
        for row in range(shard * size, (shard + 1) * size)
    ]

    def taken(name):
        return np.stack([np.asarray(getattr(batch[part], name))[row] for part, row in rows])

    fields = {
        name: taken(name) for name in ("observation", "action", "steps", "bootstrap", "next_observation", "weight")
    }
    rewards = np.zeros((2 * BATCH, 3), np.float32)
    for place, (part, row) in enumerate(rows):
        if part == "demonstrations":
            rewards[place, : int(batch[part].steps[row])] = 1.0
    return fields | {"rewards": rewards}


def test_both_parts_lie_side_by_side_in_each_shard():
    for shards in (1, 4):
        found = rewarded(parts(), SingleReplica(shards))
        for name, wanted in by_hand(parts(), shards).items():
            np.testing.assert_array_equal(getattr(found, name), wanted, err_msg=name)


@pytest.mark.long
def test_an_update_is_sacs_on_both():
    algo, key = resolve_schedules(ALGO, jnp.float32(0)), jax.random.key(5)
    joined = transitions(3).replace(
        **{name: jnp.asarray(x) for name, x in by_hand(parts(), 1).items()}, sample_info=None
    )
    arguments = {"spec": SPEC, "key": key, "replicas": SingleReplica()}
    found = jax.jit(lambda state: algo.update(state, parts(), **arguments))(initial(ALGO))
    plain = algo.replace(imitate=False)
    wanted = jax.jit(lambda state: plain.update(state, {"replay": joined}, **arguments))(initial(ALGO))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_half_of_a_batch_is_the_demonstrations():
    assert set(SAC.experience) == {"replay"}
    sources = SAC.replace(imitate=True, batch_size=9).experience
    assert sources["replay"].batch_size == 5 and sources["demonstrations"] == Dataset(4)
