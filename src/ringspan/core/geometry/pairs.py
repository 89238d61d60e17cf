"""Counts of keys that queries before a position see: exact work for every mask. R regions."""

# Query q of a region sees ``clip(q - lo + 1, k0, k1) - clip(q - hi, k0, k1)`` keys: summed in closed form.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.mask import Mask

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Stretches:
    """The sequence cut wherever no pair of the mask crosses: positions [starts[i], stops[i]) see ``pairs[i]`` keys."""

    starts: IntArray
    stops: IntArray
    pairs: IntArray
    regions: IntArray  # in the order of their stretches. Shape (R, 6).
    # The first region of each stretch, and the number of regions at the end.
    first_region: IntArray

    def before(self, stretch: int, positions: IntArray) -> IntArray:
        some = self.regions[self.first_region[stretch] : self.first_region[stretch + 1]]
        return pairs_before(some, positions[:, None]).sum(1)


def stretches(mask: Mask, length: int) -> Stretches:
    """Split a sequence into stretches; unseeing, unseen positions form stretches without pairs."""
    regions = bound(mask.table(length, length))
    # A region ties together all positions from its first query or key to its last.
    firsts, lasts = (
        np.minimum(regions[:, 0], regions[:, 2]),
        np.maximum(regions[:, 1], regions[:, 3]),
    )
    order = np.argsort(firsts, kind="stable")
    regions, firsts, lasts = (
        regions[order],
        firsts[order],
        np.maximum.accumulate(lasts[order]),
    )
    opens = np.flatnonzero(
        np.concatenate(([True], firsts[1:] >= lasts[:-1]))[: len(regions)]
    )
    starts, stops = (
        firsts[opens],
        lasts[np.append(opens[1:], len(regions)) - 1] if len(opens) else lasts,
    )
    pairs = (
        np.add.reduceat(pairs_before(regions, stops[-1]), opens)
        if len(opens)
        else opens
    )
    # Add the gaps: between stretches, before the first and after the last.
    gap_starts, gap_stops = np.concatenate(([0], stops)), np.append(starts, length)
    is_gap = gap_starts < gap_stops
    begins = np.concatenate((starts, gap_starts[is_gap]))
    where = np.argsort(begins, kind="stable")
    counts = np.concatenate(
        (np.diff(np.append(opens, len(regions))), np.zeros(int(is_gap.sum()), np.int64))
    )[where]
    return Stretches(
        begins[where],
        np.concatenate((stops, gap_stops[is_gap]))[where],
        np.concatenate((pairs, np.zeros(int(is_gap.sum()), np.int64)))[where],
        regions,
        np.concatenate(([0], counts.cumsum())),
    )


def pairs_before(regions: IntArray, positions: IntArray) -> IntArray:
    """Count each region's pairs whose query lies before a position; (R,) broadcasts with positions (..., 1)."""
    q0, q1, k0, k1, lo, hi = regions.T
    last = np.minimum(np.maximum(positions, q0), q1)  # np.clip takes twice as long
    return _clipped(q0, last, lo - 1, k0, k1) - _clipped(q0, last, hi, k0, k1)


def _clipped(
    first: IntArray, last: IntArray, shift: IntArray, k0: IntArray, k1: IntArray
) -> IntArray:
    """Sum ``clip(q - shift, k0, k1)`` over q in [first, last)."""
    low, high = (np.minimum(np.maximum(key + shift, first), last) for key in (k0, k1))
    middle = (low + high - 1) * (high - low) // 2 - shift * (high - low)
    return (low - first) * k0 + middle + (last - high) * k1


def bound(regions: IntArray) -> IntArray:
    """Tighten regions to queries, keys and bounds that have pairs; drop empty ones."""
    q0, q1, k0, k1, lo, hi = regions.T.copy()
    for _ in range(2):
        q0, q1 = np.maximum(q0, k0 + lo), np.minimum(q1, k1 + hi)
        k0, k1 = np.maximum(k0, q0 - hi), np.minimum(k1, q1 - lo)
    lo, hi = np.maximum(lo, q0 - k1 + 1), np.minimum(hi, q1 - 1 - k0)
    return np.stack([q0, q1, k0, k1, lo, hi], 1)[(q0 < q1) & (k0 < k1) & (lo <= hi)]
