"""Chunks of cut documents, assigned so that each rank gets its share of the work."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.pairs import IntArray, Stretches

FloatArray = NDArray[np.floating]

_CANDIDATES: Final = 64  # ways to split a rank's part of a long document into an early and a late chunk
_SWEEPS: Final = 4  # over all cut documents


@dataclass
class Cut:
    """A document on several ranks, and each rank's number of its tokens."""

    stretch: int
    ranks: IntArray
    counts: IntArray
    pairs: IntArray
    chunks: list[tuple[int, int, int]]
    """Rank, start, count."""


def cut_in_order(some: Stretches, stretch: int, ranks: IntArray, counts: IntArray) -> Cut:
    edges = some.starts[stretch] + np.concatenate(([0], counts.cumsum()))
    pairs = np.diff(some.before(stretch, edges))
    return Cut(stretch, ranks, counts, pairs, list(zip(ranks.tolist(), edges.tolist(), counts.tolist(), strict=False)))


def cut_by_work(
    some: Stretches, stretch: int, ranks: IntArray, counts: IntArray, wanted: FloatArray, above: float
) -> Cut:
    """Cut two chunks per rank, early and late (little and much work), that sum to the wanted work."""
    # One chunk if that costs at most ``above`` more, as under a window.
    in_order = cut_in_order(some, stretch, ranks, counts)
    if (in_order.pairs - wanted).max() <= above:
        return in_order
    start, stop = int(some.starts[stretch]), int(some.stops[stretch])
    pairs: list[int] = []
    chunks: list[tuple[int, int, int]] = []
    for rank, count, work in zip(ranks.tolist(), counts.tolist(), wanted.tolist(), strict=True):
        steps = min(count, _CANDIDATES)
        early = np.arange(steps + 1, dtype=np.int64) * count // steps
        edges = some.before(stretch, np.concatenate((start + early, stop - count + early, [start, stop])))
        both = edges[: len(early)] - edges[-2] + edges[-1] - edges[len(early) : -2]
        best = int(np.abs(both - work).argmin())
        first = int(early[best])
        pairs.append(int(both[best]))
        chunks += [(rank, start, first), (rank, stop - (count - first), count - first)]
        start, stop = start + first, stop - (count - first)
    return Cut(stretch, ranks, counts, np.array(pairs), [chunk for chunk in chunks if chunk[2]])


def level(some: Stretches, cuts: list[Cut], lacking: FloatArray, above: float, above_in_order: float) -> None:
    """Exchange early and late chunks to relieve ranks with ``above`` too much work; update ``cuts`` and ``lacking``."""
    for _ in range(_SWEEPS):
        is_changed = False
        for index, old in enumerate(cuts):
            before = lacking[old.ranks]
            if -before.min() <= above or before.mean() - before.min() <= above / 4:
                continue
            wanted = old.pairs + before - before.mean()
            new = cut_by_work(some, old.stretch, old.ranks, old.counts, wanted, above_in_order)
            after = before + old.pairs - new.pairs
            if after.min() > before.min():
                lacking[old.ranks] = after
                cuts[index], is_changed = new, True
        if not is_changed:
            return
