"""A batch of transitions with continuous actions, and small networks over them, for the tests of several algorithms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.algos import q_learning
from jaxrl.algos.histories import Observations
from jaxrl.algos.train_state import Variables
from jaxrl.core import spaces
from jaxrl.core.keys import root_key
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, SampleInfo, TransitionBatch
from jaxrl.networks import Actor, CategoricalValues, Critic
from jaxrl.parallel.replicas import SingleReplica

BATCH = 16
BOX = spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), (2,))
SPEC = EnvSpec("box", spaces.Box(-1, 1, (3,)), BOX)
NETWORKS = {
    # Larger outputs than usual, so that nothing that is tested is too small to see.
    "policy": Actor(widths=(8,), gain=0.3),
    "critic": Critic(widths=(8,)),
}
NORMED = {"normalization": "batch_renorm", "normalize_inputs": True}
DETERMINISTIC = NETWORKS | {"policy": Actor(widths=(8,), gain=0.3, stochastic=False)}
SMALL = {"capacity": 256, "min_size": 32, "batch_size": BATCH}
# Of runs that learn in a few thousand steps.
QUICK = {"capacity": 10_000, "min_size": 256, "batch_size": 64, "rollout_length": 1, "replay_ratio": 0.25}
SAC = jaxrl.SAC(**NETWORKS, **SMALL)
CROSSQ = jaxrl.CrossQ(
    policy=Actor(widths=(8,), gain=0.3, **NORMED), critic=Critic(widths=(8,), **NORMED), **SMALL, policy_delay=2
)
MPO = jaxrl.MPO(**(NETWORKS | {"critic": Critic(widths=(8,), ensemble=1)}), **SMALL, samples=6)
GAIL = jaxrl.GAIL(**NETWORKS, **SMALL, discriminator=Critic(widths=(8,), ensemble=1))
TD3 = jaxrl.TD3(**DETERMINISTIC, **SMALL)
DDPG = jaxrl.DDPG(**(DETERMINISTIC | {"critic": Critic(widths=(8,), ensemble=1)}), **SMALL)
_DISTRIBUTION = Critic(widths=(8,), ensemble=1, head=CategoricalValues(11))
D4PG = jaxrl.D4PG(**(DETERMINISTIC | {"critic": _DISTRIBUTION}), **SMALL, v_min=-5.0, v_max=5.0)
ALGORITHMS = {"sac": SAC, "crossq": CROSSQ, "mpo": MPO, "td3": TD3, "ddpg": DDPG, "d4pg": D4PG}
STOCHASTIC = ("sac", "crossq", "mpo")


def transitions(n_step=1, seed=0):
    """Return random transitions; every fourth has terminated, and the last one does not count."""
    rng = np.random.default_rng(seed)
    return TransitionBatch(
        observation=jnp.asarray(rng.normal(size=(BATCH, 3)), jnp.float32),
        action=jnp.asarray(rng.uniform(BOX.low, BOX.high, (BATCH, 2)), jnp.float32),
        rewards=jnp.asarray(rng.normal(size=(BATCH, n_step)), jnp.float32),
        steps=jnp.full(BATCH, n_step, jnp.int32),
        bootstrap=jnp.arange(BATCH) % 4 != 0,
        next_observation=jnp.asarray(rng.normal(size=(BATCH, 3)), jnp.float32),
        weight=jnp.arange(BATCH) < BATCH - 1,
        sample_info=SampleInfo(*(jnp.ones(BATCH) for _ in dataclasses.fields(SampleInfo))),
    )


def critic_values(algo, params, observation, action, spec):
    """Return the expected values [ensemble, batch] of actions of a box."""
    output = Observations(observation).critic_output(algo.critic, Variables(params), action, spec)[0]
    return q_learning.action_values(output, *support(algo))[..., 0]


def support(algo):
    """Return the ends of the support of a categorical head, or zeros."""
    return getattr(algo, "v_min", 0.0), getattr(algo, "v_max", 0.0)


def counted(x):
    """Return the mean over the transitions that count."""
    return np.asarray(x)[..., : BATCH - 1].mean(axis=-1)


def initial(algo, spec=SPEC):
    """Return the state of the learner before any update."""
    return resolve_schedules(algo, jnp.float32(0)).init(root_key(0), spec)


@functools.partial(jax.jit, static_argnames="spec")
def updated(algo, state, batch, key, spec=SPEC):
    """Make an update; it is compiled once for all numbers of an algorithm."""
    return resolve_schedules(algo, jnp.float32(0)).update(
        state, {"replay": batch}, spec=spec, key=key, replicas=SingleReplica()
    )
