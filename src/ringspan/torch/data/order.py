"""A random order of any number of examples, computed only for requested places."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 6
# The finaliser of SplitMix64 (Steele et al. 2014): shifts and odd factors after which every bit depends on every other.
_MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def shuffled(places: NDArray[np.int64], num_examples: int, seed: int) -> NDArray[np.int64]:
    """Return the examples at some places of a seed's permutation of ``range(num_examples)``.

    A Feistel network over at most 4 numbers per example, applied again to what it puts outside (Black and Rogaway
    2002).
    """
    half = max(1, (num_examples - 1).bit_length() + 1 >> 1)
    keys = np.random.PCG64(seed % (1 << 64)).random_raw(_ROUNDS)  # which is the same in every version of NumPy
    found = np.empty(len(places), np.uint64)
    open_, numbers = np.arange(len(places)), places.astype(np.uint64)
    while len(open_):
        numbers = _permuted(numbers, half, keys)
        found[open_] = numbers
        outside = numbers >= num_examples
        open_, numbers = open_[outside], numbers[outside]
    return found.astype(np.int64)


def _permuted(numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute numbers of ``2 * half`` bits: each round mixes one half into the other."""
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & low
    for key in keys:
        mixed = right + key
        for shift, factor in _MIXING:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        left, right = right, left ^ (mixed & low)
    return left << bits | right
