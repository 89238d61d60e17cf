"""Keys that an index may choose for each query (DeepSeek-V3.2), and what chooses, attends to and fetches them costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import MaskError
from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask

EVERYTHING: Final = 2**62
SCORES_AT_ONCE: Final = 2**23
"""Scores of a chunk of queries, each next to its order in eight bytes."""
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Index:
    """A layer's choice: a query attends to ``keys`` of each of the ``topk`` best entries, and to ``others`` always.

    ``window``: last tokens that a query attends to, too; their columns lie before the entries'.

    An entry is of ``size`` tokens. ``scored``: numbers that are multiplied to score one; ``key``: numbers of a
    token that travel for it, both 0 where another layer's choice is shared; ``token``: numbers of one for attention.
    ``kept``: positions that are kept of a query's choice, by full checkpoints too if layers hand it on (``is_passed``).
    ``tail``: last tokens and numbers of each that a cache keeps on every rank for entries to come.
    """

    topk: int
    token: float
    size: int = 1
    keys: int = 1
    others: float = 0
    scored: int = 0
    key: float = 0
    kept: int = 0
    is_passed: bool = False
    window: int = 0
    tail: tuple[int, int] = (0, 0)

    def most(self, length: int) -> int:
        """Return the largest number of entries that a query attends to."""
        return min(self.topk, length // self.size)


class Seen(NamedTuple):
    """Keys [first, stop) that each query sees, by position; empty for padding. Shapes (T,)."""

    first: Integers
    stop: Integers

    @property
    def counts(self) -> Integers:
        return self.stop - self.first


class Tokens(NamedTuple):
    """Tokens that a rank sends to each rank, and those that it receives, itself included."""

    sent: tuple[tuple[int, int], ...]
    received: tuple[tuple[int, int], ...]


def seen_in(mask: Mask, length: int) -> Callable[[Integers], Seen]:
    """Return a function from positions to the keys that queries there see; MaskError if one sees several regions."""
    table = mask.table(length, length)
    table = table[np.argsort(table[:, 0], kind="stable")]
    if (table[1:, 0] < table[:-1, 1]).any():
        raise MaskError(
            f"an index chooses among one range of keys for each query; use causal or documents, not {mask}"
        )
    return partial(_seen, table)


def _seen(table: Integers, positions: Integers) -> Seen:
    """Return the keys [first, stop) that queries at ``positions`` see.

    ``table`` has regions in order of their queries, which do not overlap: a query's region is the last that begins at
    or before it, and ``lo <= q - k <= hi`` within its keys leaves ``max(k0, q - hi) <= k < min(k1, q - lo + 1)``.
    """
    if not len(table):
        return Seen(np.zeros_like(positions), np.zeros_like(positions))
    q0, q1, k0, k1, lo, hi = table[
        np.searchsorted(table[:, 0], positions, side="right").clip(1) - 1
    ].T
    first, stop = np.maximum(k0, positions - hi), np.minimum(k1, positions - lo + 1)
    sees = (q0 <= positions) & (positions < q1) & (first < stop)
    return Seen(np.where(sees, first, 0), np.where(sees, stop, 0))


class Held(NamedTuple):
    """Positions of tokens, in order, and the first key that each sees."""

    positions: Integers
    first: Integers


def seeing(layout: Layout, seen_at: Callable[[Integers], Seen]) -> list[Held]:
    """Return each rank's positions that see something."""
    each = [np.sort(layout.positions(rank)) for rank in range(layout.ranks)]
    sees = [(positions, seen_at(positions)) for positions in each]
    return [
        Held(positions[seen.counts > 0], seen.first[seen.counts > 0])
        for positions, seen in sees
    ]


def wanted(held: Held, readers: Held, reach: int = EVERYTHING) -> NDArray[np.bool_]:
    """Mark the held positions that a reader needs: the next reader is near (``reach``) and in the same document."""
    places = np.searchsorted(readers.positions, held.positions)
    following, first = (np.append(each, -1)[places] for each in readers)
    return (
        (following >= 0) & (following - held.positions < reach) & (first == held.first)
    )


@lru_cache(maxsize=256)
def exchanged(layout: Layout, mask: Mask, rank: int) -> Tokens:
    """Return the tokens that one rank sends and receives, so that every rank has the keys that its queries see."""
    held = _held(layout, mask)
    sent = (int(wanted(held[rank], each).sum()) for each in held)
    received = (int(wanted(each, held[rank]).sum()) for each in held)
    return Tokens(
        *(
            tuple((peer, count) for peer, count in enumerate(each) if count)
            for each in (sent, received)
        )
    )


@lru_cache(maxsize=4)  # few, as each covers all ranks of a layout
def _held(layout: Layout, mask: Mask) -> list[Held]:
    return seeing(layout, seen_in(mask, layout.length))


def scored_and_chosen(seen: Seen, topk: float, size: int = 1) -> tuple[int, float]:
    """Count the pairs of a query and a key (or entry of ``size`` tokens) that an index scores, and that it chooses."""
    entries = seen.counts // size
    return int(entries.sum()), float(np.minimum(entries, topk).sum())


def scored_and_chosen_causally(
    spans: Iterable[Span], length: int, topk: float, size: int = 1
) -> tuple[int, float]:
    """Return ``scored_and_chosen`` of runs of positions of one document."""
    counts = [0.0, 0.0]
    for start, count, _ in spans:
        stop = min(start + count, length)
        for number, most in enumerate((length, topk)):
            counts[number] += _entries_before(stop, most, size) - _entries_before(
                min(start, stop), most, size
            )
    return int(counts[0]), counts[1]


def _entries_before(tokens: int, most: float, size: int) -> float:
    """Sum ``min(most, seen tokens // size)`` over the first tokens of a document."""
    few = min(tokens, int(most * size))
    whole = few // size
    return (
        size * whole * (whole - 1) // 2
        + whole * (few - size * whole + 1)
        + most * (tokens - few)
    )


def position_bytes(length: int) -> int:
    """Return the bytes of a position below ``length``, or of the mark for no position."""
    return next(size for size in (2, 3, 4) if length < 1 << 8 * size)
