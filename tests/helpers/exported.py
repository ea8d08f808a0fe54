"""Policies to export: of every algorithm, on vectors and images, with parameters and statistics that matter."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from helpers.programs import ENV, PPO
from helpers.registered import OWN_ALGORITHMS
from jaxrl import envs, networks
from jaxrl.algos.fields import Memory
from jaxrl.core import spaces
from jaxrl.core.config import encode
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import EnvSpec, env_spec
from jaxrl.envs.configs import to_config
from jaxrl.run.policies import policy_folder
from jaxrl.run.policies.policy import Policy

VECTORS, IMAGES = spaces.Box(-1.0, 1.0, (4,)), spaces.Box(0.0, 1.0, (10, 10, 4))
MANY, BOX = spaces.Discrete(6), spaces.Box(np.float32([-2, 0]), np.float32([2, 10]), (2,))
PARTS = spaces.Dict({"move": BOX, "speak": spaces.Tuple((MANY, spaces.MultiDiscrete((2, 3))))})
SMALL = networks.MLP((16,))
SPEC = EnvSpec("test", VECTORS, MANY)


def ppo(torso=SMALL, core=None, **fields):
    """Return PPO with this torso and core."""
    return jaxrl.PPO(network=networks.ActorCritic(torso=torso, core=core, **fields))


PLAIN = ppo()
RECURRENT = {
    "gru": ppo(core=networks.GRU(8), previous_action=True, previous_reward=True).replace(
        normalize_observation=True, normalize_reward=True
    ),
    "lstm": jaxrl.R2D2(network=networks.QNetwork(torso=SMALL, core=networks.LSTM(8), previous_action=True)),
    "mingru": ppo(core=networks.MinGRU(8, layers=2), shared=True),
    "lru": ppo(core=networks.LRU(8)),
    "gtrxl": jaxrl.PQN(network=networks.QNetwork(torso=SMALL, core=networks.GTrXL(8, heads=2, memory=5))),
    "sac": jaxrl.SAC(
        policy=networks.Actor(torso=SMALL, core=networks.GRU(8)),
        critic=networks.Critic(torso=SMALL, core=networks.GRU(8)),
        memory=Memory(length=6, burn_in=2),
    ),
}
RECURRENT = {
    name: (algo, EnvSpec("test", VECTORS, BOX) if name in ("sac", "mingru") else SPEC)
    for name, algo in RECURRENT.items()
}


def nested(camera):
    """Return a space of several parts, one of which is `camera`."""
    return spaces.Dict({"camera": camera, "arm": spaces.Dict({"angle": VECTORS}), "room": MANY})


def combinations():
    """Return every algorithm with the kinds of observations and actions that it takes, by name."""
    found = {}
    for name, kind in OWN_ALGORITHMS.items():
        for word, actions in (("discrete", MANY), ("continuous", BOX)):
            for seen, observations in (("vectors", VECTORS), ("images", IMAGES)):
                spec = EnvSpec("test", observations, actions)
                algo = kind(**{"normalize_observation": True} if hasattr(kind, "normalize_observation") else {})
                if not algo.resolve(spec, 8).validate(spec, 8, 1):
                    found[f"{name}-{seen}-{word}"] = (algo, spec)
    return found


def policy_of(algo, spec, env=None):
    """Return an untrained policy with changed parameters, to which no two observations look alike."""
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


def write_folder(path):
    """Write an untrained policy of PPO in CartPole as a folder, at step 128 of 256; return it."""
    algo, spec = PPO.replace(normalize_observation=True), env_spec(ENV)
    config = {"algorithm": encode(algo), "environment": to_config(envs.prepared(ENV)), "topology": None}
    policy = policy_of(algo, spec)
    policy_folder.write(path, policy.actor, config | {"total_steps": 256}, 128)
    return policy


def _floats(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def observations(spec, count, seed=0):
    """Return observations inside and outside of the space."""
    rng = np.random.default_rng(seed)

    def some(space):
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            return rng.normal(size=(count, *space.shape)).astype(space.dtype)
        return rng.integers(0, 2, (count, *space.shape)).astype(space.dtype)

    return spaces.tree_map(some, spec.observation_space)


def assert_same(policy, act, *, batches=(1, 256), steps=1, sample=False, tolerance=1e-6):
    """Assert that an exported policy acts as the run's, for steps of episodes some of which begin at each.

    Args:
      act: its call with observations, carry (None at the beginning), whether episodes begin, rewards and key.
    """
    for batch in batches:
        memory, carry, rng = None, None, np.random.default_rng(batch)
        for step in range(steps):
            seen = observations(policy.spec, batch, step)
            first = (rng.random(batch) < 0.05) | (step == 0)
            reward, key = rng.normal(size=batch).astype(np.float32), jax.random.key(step) if sample else None
            right, memory = policy(seen, memory, key=key, first=first, reward=reward)
            action, carry = act(seen, carry, first, reward, key)
            assert jax.tree.structure(right) == jax.tree.structure(action)
            for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(action), strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(a).max()))
    assert len({x.tobytes() for x in np.asarray(jax.tree.leaves(action)[0])}) > 1, "it does the same everywhere"
