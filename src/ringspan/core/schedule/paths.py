"""What of every owner's block is sent along a route, by whom, and what becomes of its gradient: for all ranks at once,
without their tiles. ``schedule.py`` reads one rank's part off it.

H hops, N ranks.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import UNBOUNDED, Mask
from ringspan.core.geometry.tile import MAX_MEETINGS, meet
from ringspan.core.schedule.route import IntArray, Itinerary, Route

# A hull is its first index and minus the one past its last, so that the wider of two bounds is the smaller number.
NOTHING: Final = UNBOUNDED
_SIGNS: Final = np.array([1, -1])
_FEW_MEETINGS: Final = 1 << 12  # below, Python takes longer to call numpy than numpy to answer


@dataclass(frozen=True)
class Paths:
    """What is sent of every owner's block: per (hop, owner, span) the hull of storage indices, see ``_hull``.

    ``is_straight`` (hops, owners): sent by the owner, not by the rank before. ``handed_on`` is the part of a gradient
    that the rank of a hop gets from the rank before it. ``pairs`` are those of each rank, or a few more.
    """

    itinerary: Itinerary
    carried: IntArray
    is_straight: NDArray[np.bool_]
    gradient: IntArray
    handed_on: IntArray
    pairs: IntArray
    tile_pairs: int

    @cached_property
    def source(self) -> IntArray:
        """Which rank sends a rank its block of a hop. Shape (hops, ranks)."""
        way = self.itinerary
        return np.where(np.take_along_axis(self.is_straight, way.owner, 1), way.owner, way.source)


@lru_cache(maxsize=64)
def find_paths(layout: Layout, keys: Layout, mask: Mask, route: Route) -> Paths:
    """The paths of all blocks of an attention on a route without Ulysses groups."""
    needed, pairs, tile_pairs = _needed(layout, keys, mask, route.passes_queries)
    blocks = layout if route.passes_queries else keys
    tokens = [blocks.tokens_of(owner) for owner in range(blocks.ranks)]
    candidates = (_paths_along(needed, way, tokens, pairs, tile_pairs) for way in route.itineraries(layout.ranks))
    # Of the two directions around a ring, under a causal mask one sends less, or earlier: the layout decides which.
    return min(candidates, key=_tokens_and_hops)


def _tokens_and_hops(paths: Paths) -> tuple[int, int]:
    """How many tokens are sent, and the hops at which they arrive, summed up."""
    sent = _sizes(paths.carried).sum((1, 2))
    return int(sent.sum()), int(sent @ np.arange(len(sent)))


def _paths_along(needed: IntArray, way: Itinerary, tokens: list[int], pairs: IntArray, tile_pairs: int) -> Paths:
    """Order the needs (owner, visitor, span, bound) by hop; a block is cut to the hull of what is still needed.

    ``tokens`` are those of each owner.
    """
    parts = np.array([[part_of(half, count) for count in tokens] for half in way.half.tolist()]) * _SIGNS
    by_hop = _overlap(needed[np.arange(len(needed)), way.visitor], parts[:, :, None])
    carried, is_straight = by_hop.copy(), np.zeros(by_hop.shape[:2], bool)
    # From the last hop back: what a rank still needs passes through the one before, if that one computes with half of
    # it too, and else comes from the owner. With less than half, ever more would be sent to ranks that do not need it;
    # from the owner alone, a block would not stay among neighbours.
    for hop in range(len(by_hop) - 1, 0, -1):
        earlier = way.posted[hop]
        shared, sent = (_sizes(of).sum(-1) for of in (_overlap(by_hop[earlier], carried[hop]), carried[hop]))
        is_straight[hop] = (2 * shared < sent) & (earlier > 0)
        passed = np.where(is_straight[hop, :, None, None], NOTHING, carried[hop])
        carried[earlier] = _hull(carried[earlier], passed)
    # At hop 0 each rank has its own block: nothing arrives, and its gradient stays.
    carried[0] = NOTHING
    # A gradient covers what its ranks have seen so far, so it grows on its way as the block shrinks. A rank that no
    # longer gets some rows of the block cannot add to theirs: they go to the owner from here (``_left``).
    gradient, handed_on = by_hop.copy(), np.full_like(by_hop, NOTHING)
    gradient[0] = NOTHING
    for hop in range(1, len(by_hop)):
        if way.behind[hop]:
            received = np.where(is_straight[hop, :, None, None], NOTHING, carried[hop])
            handed_on[hop] = _overlap(gradient[way.behind[hop]], received)
            gradient[hop] = _hull(handed_on[hop], gradient[hop])
    return Paths(way, carried, is_straight, gradient, handed_on, pairs, tile_pairs)


class Arrivals(NamedTuple):
    """Who sends every rank something at every hop, and how many tokens of it; both (hops, ranks)."""

    peers: IntArray
    tokens: IntArray


class Loads(NamedTuple):
    """What every rank computes, in pairs or a few more (ranks,), and what it gets: the fields ``arrives``,
    ``gradient_in`` and ``from_visitor`` of all hops of all ranks.
    """

    pairs: IntArray
    blocks: Arrivals
    gradients: Arrivals
    returned: Arrivals


def loads(layout: Layout, mask: Mask, key_layout: Layout, route: Route) -> Loads:
    """What an attention asks of all ranks, without their tiles."""
    paths = find_paths(layout, key_layout, mask, route)
    way = paths.itinerary
    carried, gradient, handed_on = (_sizes(of).sum(-1) for of in (paths.carried, paths.gradient, paths.handed_on))
    before = np.take_along_axis(way.visitor[way.behind], way.owner, 1)
    return Loads(
        paths.pairs,
        Arrivals(paths.source, np.take_along_axis(carried, way.owner, 1)),
        Arrivals(before, np.take_along_axis(handed_on, way.owner, 1)),
        Arrivals(way.visitor, gradient - handed_on[np.array(way.following)]),
    )


def part_of(half: int, tokens: int) -> tuple[int, int]:
    """The storage indices that a hop's block is about: all, or either half."""
    middle = tokens // 2
    return {-1: (0, tokens), 0: (0, middle), 1: (middle, tokens)}[half]


@lru_cache(maxsize=32)
def _needed(layout: Layout, keys: Layout, mask: Mask, passes_queries: bool) -> tuple[IntArray, IntArray, int]:
    """Hull of the keys of each (owner, visitor, owner's span) that the visitor sees, in the owner's storage indices;
    the pairs of each visitor, and of a mean meeting of two spans and a region. With queries as blocks, of those that
    see its keys.
    """
    regions = mask.table(layout.length, keys.length)
    if passes_queries:  # transposed: k - q instead of q - k
        layout, keys, regions = keys, layout, regions[:, [2, 3, 0, 1, 5, 4]] * np.array([1, 1, 1, 1, -1, -1])
    queries = _span_table(layout)[:, :, None]
    spans = [
        (owner, number, span, sum(before.count for before in owned[:number]))
        for owner, owned in enumerate(map(keys.spans, range(keys.ranks)))
        for number, span in enumerate(owned)
    ]
    meetings, pairs = 0, np.zeros(layout.ranks, np.int64)
    needed = np.full((layout.ranks, layout.ranks, _most_spans(keys), 2), NOTHING, dtype=np.int64)
    # Spans are met some at a time: one by one is slow for many short ones, all at once takes memory by their square.
    together = max(1, _FEW_MEETINGS // (layout.ranks * max(1, len(regions))))
    for some in (spans[first : first + together] for first in range(0, len(spans), together)):
        owners, numbers, met_spans, stored = zip(*some, strict=True)
        starts, counts, storage = (
            np.array(column)[:, None, None, None]
            for column in ([span.start for span in met_spans], [span.count for span in met_spans], stored)
        )
        # Of thousands of documents most are nowhere near these spans.
        stop = max(span.start + span.step * (span.count - 1) for span in met_spans)
        near = regions[(regions[:, 2] <= stop) & (regions[:, 3] > starts.min())]
        at_once = max(1, MAX_MEETINGS // max(1, queries.shape[1] * len(some) * len(near)))
        for first in range(0, layout.ranks, at_once):
            visitors = slice(first, first + at_once)
            met = meet(queries[visitors, ..., 0], queries[visitors, ..., 1], starts, counts, met_spans[0].step, near)
            needed[owners, visitors, numbers] = _keys_seen(met) + storage[..., 0] * _SIGNS
            meetings += int(np.count_nonzero(met[..., 1] > met[..., 0]))
            counted = _num_pairs(met)
            pairs[visitors] += counted.sum(tuple(axis for axis in range(counted.ndim) if axis != 1))
    return needed, pairs, int(pairs.sum()) // max(1, meetings)


def _keys_seen(met: IntArray) -> IntArray:
    """Hull of the indices of a key span that each visitor sees."""
    seen = met[..., 1] > met[..., 0]
    return np.where(seen[..., None], met[..., 2:4] * _SIGNS, NOTHING).min((-3, -2), initial=NOTHING)


def _num_pairs(met: IntArray) -> IntArray:
    """Pairs of each meeting, or a few more: as if each row saw as many keys as the band is wide."""
    i0, i1, j0, j1, lo, hi = np.moveaxis(met, -1, 0)
    return np.maximum(i1 - i0, 0) * np.minimum(j1 - j0, hi - lo + 1)


def _most_spans(layout: Layout) -> int:
    return max(1, *(len(layout.spans(rank)) for rank in range(layout.ranks)))


def _span_table(layout: Layout) -> IntArray:
    """Start and count of each rank's spans, missing ones with count 0. Shape (ranks, spans, 2)."""
    table = np.zeros((layout.ranks, _most_spans(layout), 2), dtype=np.int64)
    for rank in range(layout.ranks):
        for number, span in enumerate(layout.spans(rank)):
            table[rank, number] = span.start, span.count
    return table


_hull = np.minimum


def _overlap(a: IntArray, b: IntArray) -> IntArray:
    both = np.maximum(a, b)
    return np.where(both.sum(-1, keepdims=True) < 0, both, NOTHING)


def _sizes(hulls: IntArray) -> IntArray:
    """Indices in each hull."""
    return np.maximum(-hulls.sum(-1), 0)
