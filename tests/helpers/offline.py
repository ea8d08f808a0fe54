"""The algorithms that learn from data, small, and their updates on two devices at once, for the tests of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from helpers.continuous import BATCH, BOX, DETERMINISTIC, NETWORKS, SMALL, SPEC, initial, transitions
from helpers.oracle import close
from jaxrl.algos.histories import Observations
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.networks import Critic
from jaxrl.parallel.replicas import MeshReplicas

ONE = Critic(widths=(8,), ensemble=1)
BC = jaxrl.BC(policy=NETWORKS["policy"], batch_size=BATCH)
TD3BC = jaxrl.TD3BC(**DETERMINISTIC, **SMALL)
CQL = jaxrl.CQL(**NETWORKS, **SMALL, samples=3)
IQL = jaxrl.IQL(**NETWORKS, **SMALL, value=ONE)
CRR = jaxrl.CRR(**(NETWORKS | {"critic": ONE}), **SMALL)
ALGORITHMS = {"bc": BC, "td3bc": TD3BC, "cql": CQL, "iql": IQL, "crr": CRR}
CHOICE = EnvSpec("choice", SPEC.observation_space, spaces.Discrete(3))


@functools.partial(jax.jit, static_argnames="spec")
def updated(algo, state, batch, key, spec=SPEC):
    """Make an update, of which two devices hold half of the batch each; compiled once for all numbers of an algorithm.

    The result is the same on both devices, for else `vmap` objects to `out_axes=None`.
    """
    algo = resolve_schedules(algo, jnp.float32(0))

    def update(half):
        return algo.update(state, {"replay": half}, spec=spec, key=key, replicas=MeshReplicas("device"))

    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    return jax.vmap(update, axis_name="device", out_axes=None)(halves)


def choices(seed=3):
    """Return transitions with three actions, some of which are forbidden, but none of those that were taken."""
    rng = np.random.default_rng(seed)
    action, mask = rng.integers(0, 3, BATCH), rng.random((2, BATCH, 3)) < 0.6
    mask[0, np.arange(BATCH), action] = mask[1, :, 0] = True
    return transitions().replace(
        action=jnp.asarray(action, jnp.int32), action_mask=jnp.asarray(mask[0]), next_action_mask=jnp.asarray(mask[1])
    )


def policy_output(algo, params, observation, spec=SPEC, mask=None):
    return Observations(observation, mask).policy_output(algo.policy, Variables(params), spec)[0]


same = functools.partial(close, tolerance=1e-6)


# --- the better of bad data ------------------------------------------------------------------------------------------
#
# What was done most was bad, what was done seldom better, and all is worth less than nothing: to a critic that is not
# told otherwise, what was never done looks best. Cloning does what was done most.

MOST, BEST = np.float32([-0.6, 0.4]), np.float32([0.5, -0.3])  # in units of half the box's range
QUICK = {"learning_rate": 1e-2, "policy_learning_rate": 1e-2, "gamma": 0.9}


def bad_data(space):
    """Return last steps that are worth -2 for three quarters of the transitions, -1 for others; of one observation."""
    good = np.arange(BATCH) % 4 == 0
    if space is BOX:
        unit = np.where(good[:, None], BEST, MOST) + np.random.default_rng(0).normal(scale=0.02, size=(BATCH, 2))
        action = jnp.asarray(BOX.low + (BOX.high - BOX.low) * (unit + 1) / 2, jnp.float32)
    else:
        action = jnp.asarray(np.where(good, 1, 0), jnp.int32)
    return transitions().replace(
        observation=jnp.ones((BATCH, 3)),
        action=action,
        rewards=jnp.asarray(np.where(good, -1.0, -2.0), jnp.float32)[:, None],
        bootstrap=jnp.zeros(BATCH, bool),
    )


def learned(algo, spec=SPEC, updates=250):
    """Return the policy's best actions after some updates; of a box in units of half its range."""
    state, batch = initial(algo, spec), bad_data(spec.action_space)
    for key in jax.random.split(jax.random.key(0), updates):
        state, _ = updated(algo, state, batch, key, spec)
    output = policy_output(algo, state.policy.params, batch.observation, spec)
    action = np.asarray(output.mode() if algo.policy.stochastic else output)
    return action if spec is CHOICE else 2 * (action - BOX.low) / (BOX.high - BOX.low) - 1


def from_best(algo):
    """Return the distance of the policy's best action from the data's, in units of half the box's range."""
    action = learned(algo)
    assert np.ptp(action, axis=0).max() < 1e-6, "there is one observation"
    return float(np.linalg.norm(action[0] - BEST))
