"""Policies to export: of every algorithm, on vectors and images, with parameters and statistics that matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from helpers.registered import OWN_ALGORITHMS
from jaxrl.core import spaces
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec
from jaxrl.run.policy import Policy

VECTORS, IMAGES = spaces.Box(-1.0, 1.0, (4,)), spaces.Box(0.0, 1.0, (10, 10, 4))
MANY, BOX = spaces.Discrete(6), spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), (2,))


def combinations():
    """Every algorithm with the kinds of observations and actions that it takes, by name."""
    found = {}
    for name, kind in OWN_ALGORITHMS.items():
        for word, actions in (("discrete", MANY), ("continuous", BOX)):
            for seen, observations in (("vectors", VECTORS), ("images", IMAGES)):
                spec, fields = (
                    EnvSpec("test", observations, actions),
                    {field.name for field in dataclasses.fields(kind)},
                )
                algo = kind(**{"normalize_observation": True} if "normalize_observation" in fields else {})
                if not algo.resolve(spec, 8).validate(spec, 8, 1):
                    found[f"{name}-{seen}-{word}"] = (algo, spec)
    return found


def policy_of(algo, spec, env=None):
    """An untrained policy, as trained for a while: no two observations look alike to it."""
    algo = resolve_schedules(algo.resolve(spec, 8), jnp.float32(1.0))

    @jax.jit
    def actor(key):
        found = algo.actor(algo.init(key, spec))
        leaves, structure = jax.tree.flatten(found.params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        leaves = [x + 0.1 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(structure, leaves)
        seen = jax.tree.map(lambda x: x + jnp.asarray(0.3, x.dtype) if _floats(x) else x, found.statistics)
        return found.replace(params=params, statistics=seen)

    return Policy(algo, actor(jax.random.key(0)), spec, env)


def _floats(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def observations(spec, count, seed=0):
    """Within the space and beyond."""
    rng = np.random.default_rng(seed)

    def some(space):
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            return rng.normal(size=(count, *space.shape)).astype(space.dtype)
        return rng.integers(0, 2, (count, *space.shape)).astype(space.dtype)

    return spaces.tree_map(some, spec.observation_space)
