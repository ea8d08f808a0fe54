"""Episodes made up for tests, and comparisons of them bit by bit."""

import jax
import numpy as np

from jaxrl.data.episodes import Episode

TYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def noise(rng, shape, dtype):
    """Every bit by chance, NaNs and all."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def episode(seed=0, transitions=4, ending="terminated", dtypes=TYPES):
    """An episode with numbers, vectors and pictures of every type."""
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
    is_first, is_last, is_terminal = np.zeros((3, steps), bool)
    is_first[0] = is_last[-1] = True
    if ending == "terminated":
        discount[-2], is_terminal[-1] = 0, True
    return Episode(
        observation, action, reward, discount, is_first, is_last, is_terminal, {"ending": ending, "score": 0.1 + seed}
    )


def assert_bitwise(one, other):
    """The same names, shapes, types and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), jax.tree_util.keystr(path)


def spoil(directory, rng):
    """One bit of the file of records is another."""
    (file,) = directory.glob("*.array_record*")
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(bytes(data))
