"""Orders: permutations of any size of which any part is computed at once, and stretches of what lies together.

The permutations are the same on every machine and with every NumPy: `numpy.random` promises neither the same numbers
in its next version nor a part of a permutation without the whole, and Grain's `index_shuffle` takes one index a call.
"""

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

_SORTED_UP_TO = 64  # below, the two digits of a Feistel network are too small to mix well
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(index: np.ndarray, n: int, *key: int) -> np.ndarray:
    """What a pseudo-random permutation of 0 .. n-1 has at these places.

    An alternating Feistel network over the two digits of the index, as in `jaxrl.algos.minibatches`; the indices of
    the slightly larger range that it permutes are followed until they come back below n, so it is exact for every n.

    Args:
      index: places, int, each from 0 to n - 1.
      n: how many there are, at least 1 and below 2^62.
      key: numbers, not negative; others give another permutation.

    Returns:
      int64, as the index.
    """
    index = np.asarray(index, np.int64)
    if n <= _SORTED_UP_TO:
        return np.argsort(_hash(np.arange(n, dtype=np.uint64), _combined(*key)), kind="stable")[index]
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    rounds = [_combined(*key, number) for number in range(max(6, 2 * math.ceil(15 / math.log2(a))))]
    found = _network(index, a, b, rounds)
    while (beyond := found >= n).any():
        found[beyond] = _network(found[beyond], a, b, rounds)
    return found


def runs(labels: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where stretches of equal labels begin and end: (first, one past the last) of each, in order."""
    edges = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    return itertools.pairwise([0, *edges.tolist(), len(labels)]) if len(labels) else iter(())


def _network(index, a, b, rounds):
    digits, bases = [index // b, index % b], (a, b)
    for number, key in enumerate(rounds):
        here = number % 2
        other = digits[1 - here].astype(np.uint64)
        scaled = ((_hash(other, key) >> np.uint64(32)) * np.uint64(bases[here])) >> np.uint64(32)
        digits[here] = (digits[here] + scaled.astype(np.int64)) % bases[here]
    return digits[0] * b + digits[1]


def _hash(x, key):
    """Well-mixed 64 bits of uint64: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=1 << 10)
def _combined(*key):
    """One number below 2^64 of several."""
    word = len(key)
    for number in key:
        mixed = _hash(np.asarray([number & _WORD], np.uint64), (word * _GOLDEN + 1) & _WORD)
        word = int(mixed[0])
    return word
