"""Keys that an index chooses for each query (DeepSeek-V3.2): ranges, and a float64 oracle.

A selection is int32 positions (B, T, k), unordered, -1 if a query sees fewer than k of S keys. H and D are the index's.
"""

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


def index_scores(
    q: NDArray[np.float64], k: NDArray[np.float64], weights: NDArray[np.float64], scale: float
) -> NDArray[np.float64]:
    """``sum_h weights_h relu(scale q_h k)``: q (T, H, D), k (S, D), weights (T, H) -> (T, S)."""
    products = np.maximum(scale * np.einsum("thd,sd->ths", q, k), 0.0)
    return np.einsum("th,ths->ts", weights, products)


def chosen_keys(scores: NDArray[np.float64], seen: Seen, topk: int) -> NDArray[np.int32]:
    """Return each query's ``topk`` best keys, of equal ones the first: (T, S) -> (T, topk)."""
    chosen = np.full((len(scores), topk), -1, np.int32)
    for row, first, stop in zip(range(len(scores)), *seen, strict=True):
        best = np.argsort(-scores[row, first:stop], kind="stable")[:topk]
        chosen[row, : len(best)] = first + best
    return chosen


def allowed_by(chosen: NDArray[np.int32], num_keys: int) -> NDArray[np.bool_]:
    """Return a selection (..., k) as a mask (..., S)."""
    one_more = np.zeros((*chosen.shape[:-1], num_keys + 1), np.bool_)
    np.put_along_axis(one_more, np.where(chosen < 0, num_keys, chosen).astype(np.int64), True, axis=-1)
    return one_more[..., :num_keys]
