"""Seeded permutations that are computed, not stored.

The one idea: a Feistel network over the square of side ceil(sqrt(size)) is a permutation whatever
its round function is, so where an index lands follows from (index, size, key) alone. No generator
state has to be kept, saved or shared, and the numbers do not depend on the version of numpy.
"""

import hashlib
import math

import numpy as np

ROUNDS = 6
_MASK = (1 << 64) - 1


def key_of(*parts: int | str) -> int:
    """Turns seeds, counters and labels into one 64-bit key.

    >>> key_of(0, "rows", 3) == key_of(0, "rows", 3), key_of(0, "rows", 3) == key_of(0, "rows", 4)
    (True, False)
    """
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def scramble(values: np.ndarray, key: int) -> np.ndarray:
    """Hashes integers [...] to evenly spread uint64 [...] (Steele et al. 2014, SplitMix64)."""
    z = np.asarray(values).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = z + np.uint64(key & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns where each index goes in the permutation of range(size) that `key` names.

    index: int64 [n], each in range(size). Costs O(n), whatever `size` is.

    >>> sorted(permute(np.arange(10), 10, key=7).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    side = math.isqrt(max(size, 1) - 1) + 1
    value = _feistel(np.asarray(index, np.int64), side, key)
    # The square has side * side >= size places: walk on from those that lie outside range(size).
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], side, key)
        outside = outside[value[outside] >= size]
    return value


def _feistel(value: np.ndarray, side: int, key: int) -> np.ndarray:
    left, right = np.divmod(value, side)
    for turn in range(ROUNDS):
        mixed = scramble(right, key + turn * 0xD1B54A32D192ED03) % np.uint64(side)
        left, right = right, (left + mixed.astype(np.int64)) % side
    return left * side + right
