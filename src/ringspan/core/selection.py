"""Keys that an index may choose for each query (DeepSeek-V3.2)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import MaskError
from ringspan.core.geometry.mask import Mask

Integers = NDArray[np.int64]


class Seen(NamedTuple):
    """Keys [first, stop) that each query sees, by position; empty for padding. Shapes (T,)."""

    first: Integers
    stop: Integers

    @property
    def counts(self) -> Integers:
        return self.stop - self.first


def seen_by(mask: Mask, positions: Integers, length: int) -> Seen:
    """Return the keys that queries at these positions see; MaskError if one sees several regions."""
    table = mask.table(length, length)
    table = table[np.argsort(table[:, 0], kind="stable")]
    if (table[1:, 0] < table[:-1, 1]).any():
        raise MaskError(f"an index chooses among one range of keys for each query; use causal or documents, not {mask}")
    if not len(table):
        return Seen(np.zeros_like(positions), np.zeros_like(positions))
    q0, q1, k0, k1, lo, hi = table[np.searchsorted(table[:, 0], positions, side="right").clip(1) - 1].T
    first, stop = np.maximum(k0, positions - hi), np.minimum(k1, positions - lo + 1)
    sees = (q0 <= positions) & (positions < q1) & (first < stop)
    return Seen(np.where(sees, first, 0), np.where(sees, stop, 0))
