"""Statistics of a dataset's arrays (mean, deviation and range), computed in one pass, and normalization with them."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.core.errors import ConfigError, unknown
from jaxrl.core.limits import varies as entries_vary
from jaxrl.core.types import PyTree
from jaxrl.data.episodes import MARKS, Episode, meaningful

Images = Literal["channel", "skip"]


@dataclasses.dataclass(frozen=True)
class Moments:
    """The statistics of one array of the steps.

    `mean`, `std`, `min` and `max` are float64 arrays with the shape of one step, or one entry per channel for images.

    Attributes:
      count: number of values that each entry summarizes: the number of steps, or of pixels for images.
      mean: the mean.
      std: the standard deviation (the sum of squares is divided by `count`); exactly 0 for constant values.
      min, max: the smallest and the largest value.
    """

    count: int
    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray

    def normalize(self, x: Any) -> Any:
        """Return (x - mean) / std; entries that hardly vary (see `jaxrl.core.limits.varies`) become 0.

        Args:
          x: a numpy or JAX array `[..., *shape]`. Integers, bools and half precision are converted to float32; other
            numbers keep their dtype.
        """
        x, mean, std, varies = self._ready(x)
        return (x - mean) / std * varies

    def denormalize(self, x: Any) -> Any:
        """Return x * std + mean, the inverse of `normalize`; entries that hardly vary become the mean.

        The dtypes are those of `normalize`.
        """
        x, mean, std, varies = self._ready(x)
        return x * (std * varies) + mean

    def _ready(self, x):
        dtype = np.promote_types(x.dtype, np.float32) if np.issubdtype(x.dtype, np.floating) else np.float32
        varies = entries_vary(self.mean, self.std)
        shape = (1,) * (x.ndim - self.mean.ndim) + self.mean.shape
        parts = (self.mean, np.where(varies, self.std, 1.0), varies)
        return x.astype(dtype), *(part.astype(dtype).reshape(shape) for part in parts)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of every numeric array of a dataset's steps.

    Attributes:
      fields: trees of `Moments`, keyed by RLDS field name ("observation", "action", "reward", "discount", and the names
        of extras); a leaf is None for text and for skipped images.
    """

    fields: dict[str, PyTree]

    def __getitem__(self, name: str) -> PyTree:
        if name not in self.fields:
            raise unknown("field of the steps", name, self.fields)
        return self.fields[name]

    def normalize(self, name: str, x: PyTree) -> PyTree:
        """Normalize the arrays `[..., *shape of one step]` of a field; arrays without statistics are unchanged."""
        return _each(Moments.normalize, self[name], x)

    def denormalize(self, name: str, x: PyTree) -> PyTree:
        """Invert `normalize`."""
        return _each(Moments.denormalize, self[name], x)


def statistics(episodes: Iterable[Episode], *, images: Images = "channel") -> Statistics:
    """Compute the statistics of episodes in one pass, with one episode in memory at a time.

    The sums are float64 and are merged episode by episode (Chan, Golub and LeVeque, 1979), so that they do not lose
    precision in long datasets. The unused actions, rewards and discounts of last steps are left out.

    Args:
      episodes: a dataset, or any episodes with the same fields.
      images: "channel" computes one entry per channel of uint8 images `[height, width, channels]`; "skip" computes no
        statistics of images.

    Raises:
      ConfigError: there are no episodes.
    """
    if images not in ("channel", "skip"):
        raise ConfigError(f"images={images!r} must be 'channel' or 'skip'")
    running: dict[str, PyTree] | None = None
    for episode in episodes:
        steps = {name: x for name, x in meaningful(episode).items() if name not in MARKS}
        if running is None:
            running = jax.tree.map(lambda x: _begin(x, images), steps)
        _each(_Running.add, running, steps)
    if running is None:
        raise ConfigError("there are no episodes to compute statistics from")
    return Statistics(_each(_Running.moments, running))


def _each(function, tree, *others):
    """Map `function` over the leaves of trees; where the first tree has None, return the second tree's leaf, if any."""
    stays = lambda leaf, *rest: (rest[0] if rest else None) if leaf is None else function(leaf, *rest)  # noqa: E731
    return jax.tree.map(stays, tree, *others, is_leaf=lambda leaf: leaf is None)


def _begin(x, images):
    if x.dtype.kind not in "biuf" and x.dtype.name != "bfloat16":
        return None
    image = x.dtype == np.uint8 and x.ndim == 4
    if image and images == "skip":
        return None
    return _Running(x.shape[-1:] if image else x.shape[1:])


class _Running:
    """A running count, mean, sum of squared deviations and range of the values passed to `add`."""

    def __init__(self, shape):
        self._shape, self._count = shape, 0
        self._mean, self._squares = np.zeros((2, *shape))
        self._low, self._high = np.full(shape, np.inf), np.full(shape, -np.inf)

    def add(self, x):
        x = x.reshape(-1, *self._shape).astype(np.float64)
        if not len(x):
            return
        mean = x.mean(axis=0)
        squares = np.square(x - mean).sum(axis=0)
        apart, count = mean - self._mean, self._count + len(x)
        self._squares = self._squares + squares + np.square(apart) * (self._count * len(x) / count)
        self._mean = self._mean + apart * (len(x) / count)
        self._low, self._high = np.minimum(self._low, x.min(axis=0)), np.maximum(self._high, x.max(axis=0))
        self._count = count

    def moments(self):
        if not self._count:
            nowhere = np.full(self._shape, np.nan)
            return Moments(0, nowhere, nowhere, nowhere, nowhere)
        varies = self._low != self._high  # exact for constants, whose sums are rounded
        return Moments(
            self._count,
            np.where(varies, self._mean, self._low),
            np.where(varies, np.sqrt(self._squares / self._count), 0.0),
            self._low,
            self._high,
        )
