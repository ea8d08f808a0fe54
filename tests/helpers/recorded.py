"""Episodes made up for tests, comparisons of them bit by bit, and what plays others."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import jaxrl
from helpers.made import whole
from jaxrl.core import spaces
from jaxrl.core.keys import root_key
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.data import MinariWriter, RldsWriter
from jaxrl.envs.episode import restart, transition
from jaxrl.run.policies.policy import Policy

TYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def noise(rng, shape, dtype):
    """Return random bits, NaNs included."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def episode(seed=0, transitions=4, ending="terminated", dtypes=TYPES):
    """Return an episode with numbers, vectors and pictures of every type."""
    rng, steps = np.random.default_rng(seed), transitions + 1
    shapes = {"number": (), "vector": (3,), "picture": (5, 4, 1)}
    observation = {
        kind: {np.dtype(dtype).name: noise(rng, (steps, *shape), dtype) for dtype in dtypes}
        for kind, shape in shapes.items()
    }
    action = {
        "which": rng.integers(0, 6, steps).astype(np.int32),
        "how": rng.normal(size=(steps, 2)).astype(np.float32),
    }
    reward, discount = rng.normal(size=steps).astype(np.float32), np.ones(steps, np.float32)
    for x in (*action.values(), reward, discount):
        x[-1] = 0
    return whole(observation, action, reward, discount, ending, 0.1 + seed)


MADE_UP = [
    episode(0, 4, "terminated"),
    episode(1, 1, "truncated"),
    episode(2, 130, "cut off"),
    episode(3, 7, "terminated"),
]


def check_made_up(dataset):
    """Assert that a dataset has every bit of the episodes `MADE_UP`, read one by one or all."""
    assert len(dataset) == len(MADE_UP) and dataset.lengths.tolist() == [one.length for one in MADE_UP]
    for number, (wrote, read) in enumerate(zip(MADE_UP, dataset, strict=True)):
        assert_bitwise(read.steps, wrote.steps)
        assert_bitwise(dataset[number].steps, wrote.steps)
        own = {"episode_id": number, "length": wrote.length, "return": wrote.episode_return}
        assert read.metadata == dict(wrote.metadata) | own


def write_rlds(path, episodes, **options):
    """Write an RLDS dataset; return its path."""
    with RldsWriter(path, "tests:Made up-v0", **options) as writer:
        for one in episodes:
            writer.write(one)
        return writer.close()


def as_dataset(folder, *episodes):
    """A dataset of these episodes, written there and opened."""
    return jaxrl.load_dataset(f"rlds:{write_rlds(folder / 'data', episodes)}")


def write_minari(folder, episodes, dataset_id="made-v0", **options):
    """Write a Minari dataset; return its path."""
    with MinariWriter(dataset_id, *spaces_of(episodes[0]), data_dir=folder, **options) as writer:
        for one in episodes:
            writer.write(one)
        return writer.close()


def spaces_of(episode):
    """Return the spaces of an episode's observations and actions."""

    def space(x):
        if isinstance(x, dict):
            return spaces.Dict({name: space(child) for name, child in x.items()})
        limits = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        low, high = (-np.inf, np.inf) if x.dtype.kind == "f" else (limits.min, limits.max) if limits else (0, 1)
        return spaces.Box(low, high, x.shape[1:], x.dtype)

    return space(episode.observation), space(episode.action)


def assert_bitwise(one, other):
    """Assert that names, shapes, types and bits are the same."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), jax.tree_util.keystr(path)


def spoil(directory, rng):
    """Flip a bit of the file of records."""
    (file,) = directory.glob("*.array_record*")
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(bytes(data))


def untrained(env, algo):
    """Return an untrained policy."""
    spec = env_spec(jaxrl.envs.prepared(env))
    algo = resolve_schedules(algo.resolve(spec, 1), np.float32(0.0))
    return Policy(algo, jax.jit(lambda key: algo.actor(algo.init(key, spec)))(root_key(1)), spec)


@struct.dataclass
class Clock:
    """Shows the time in three ways; the reward is the time. Terminates after as many steps as the first reset said."""

    name = "tests:Clock"
    observation_space = spaces.Dict(
        {
            "face": spaces.Box(0, 255, (6, 8, 1), np.uint8),
            "hands": spaces.Dict({"now": spaces.Box(0, 99, (2,), np.float32), "odd": spaces.Box(0, 1, (), np.bool_)}),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    resets = False

    def reset(self, key):
        length = jax.random.randint(key, (), 1, 9)
        return (jnp.int32(0), length), restart(self._shown(jnp.int32(0), length))

    def step(self, state, action, key):
        now, length = state[0] + 1, state[1]
        reward = now.astype(jnp.float32)
        return (now, length), transition(self._shown(now, length), reward, now >= length, jnp.asarray(False))

    def _shown(self, now, length):
        hands = jnp.stack([now, length]).astype(jnp.float32)
        face = jnp.full((6, 8, 1), now, jnp.uint8)
        return {"face": face, "hands": {"now": hands, "odd": (now % 2).astype(jnp.bool_)}}
