"""Pseudo-random permutations that can be evaluated at any indices, and runs of equal labels.

The permutations are the same on every machine and with every NumPy version. `numpy.random` does not guarantee the same
numbers in later versions and cannot compute part of a permutation; Grain's `index_shuffle` takes one index per call.
"""

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

_SORTED_UP_TO = 64  # up to this size, the two digits of a Feistel network are too small to mix well
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(index: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Return the values of a pseudo-random permutation of 0 .. n-1 at the given indices.

    The permutation is an alternating Feistel network over the two digits of the index, as in
    `jaxrl.algos.minibatches`. The network permutes a slightly larger range; a result of n or above is permuted again
    until it is below n, so the function is an exact permutation for every n.

    Args:
      index: integers from 0 to n - 1, of any shape.
      n: the size of the permutation, at least 1 and below 2^62.
      key: nonnegative numbers that select the permutation.

    Returns:
      The values, an int64 array of the same shape as `index`.
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
    """Return an iterator over the runs of equal consecutive labels, each as the pair (first index, last index + 1)."""
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
    """Hash uint64 values to 64 bits with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(_GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=1 << 10)
def _combined(*key):
    """Hash several numbers to one number below 2^64."""
    word = len(key)
    for number in key:
        mixed = _hash(np.asarray([number & _WORD], np.uint64), (word * _GOLDEN + 1) & _WORD)
        word = int(mixed[0])
    return word
