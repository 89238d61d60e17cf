"""Parts of every owner's block sent along a route, for all ranks at once. H hops."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import UNBOUNDED, Mask
from ringspan.core.geometry.meetings import (
    Runs,
    each_of,
    meet_runs,
    stripe_cells,
    stripe_hulls,
    transposed,
)
from ringspan.core.geometry.ranges import Ranges, union
from ringspan.core.schedule.route import IntArray, Itinerary, Route

_MOST_PAIRS: Final = 1 << 15  # pairs of ranks in one numpy call


@dataclass(frozen=True)
class Paths:
    """Parts sent of every owner's block: a hull of storage indices for each of its spans that other ranks need.

    Hops that need an owner's block have a ``place`` (hops, owners), else -1, and rows, one per span, from ``first``.
    Hulls (2, rows + 1), the last row empty, are a first index and minus one past the last: the wider bound is smaller.
    ``needed``: what a hop's rank computes with; ``before``: the span's row at the hop that sends it; ``is_straight``
    (by place): sent by the owner, not by the rank before; ``pairs``: each rank's pairs, or a few more.
    """

    itinerary: Itinerary
    place: IntArray
    first: IntArray
    before: IntArray
    needed: IntArray
    carried: IntArray
    is_straight: NDArray[np.bool_]
    pairs: IntArray
    tile_pairs: int

    @cached_property
    def gradients(self) -> tuple[IntArray, IntArray]:
        """Return the parts of a block's gradient that a rank holds, and the parts that it gets from the rank before."""
        # A gradient covers what its ranks have seen so far, so it grows on its way as the block shrinks. A rank that no
        # longer gets some rows of the block cannot add to theirs: they go to the owner from here (``Hop``).
        held, handed_on = self.needed.copy(), np.full_like(self.needed, self.nothing)
        for hop, places, rows in self.hops():
            if self.itinerary.behind[hop]:
                received = np.where(
                    self._of_rows(self.is_straight, places),
                    self.nothing,
                    self.carried[:, rows],
                )
                handed_on[:, rows] = _overlap(
                    held[:, self.before[rows]], received, self.nothing
                )
                held[:, rows] = np.minimum(held[:, rows], handed_on[:, rows])
        return held, handed_on

    @property
    def nothing(self) -> int:
        return int(self.needed[0, -1])

    def hops(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (hop, places, rows) for each hop whose blocks are posted after hop 0."""
        ends = np.count_nonzero(self.place >= 0, axis=1).cumsum()
        rows: list[int] = self.first[ends].tolist()
        for hop, (start, end) in enumerate(pairwise(ends.tolist()), 1):
            if start < end and self.itinerary.posted[hop]:
                yield hop, slice(start, end), slice(rows[hop - 1], rows[hop])

    def _of_rows(self, values: NDArray[np.bool_], places: slice) -> NDArray[np.bool_]:
        counts = np.diff(self.first[places.start : places.stop + 1])
        return (
            values[places]
            if counts.sum() == len(counts)
            else values[places].repeat(counts)
        )

    def pass_on(self) -> None:
        """Compute what each block carries: from the last hop back, its part plus the parts it passes on."""
        # A part goes through the rank before if that rank computes with at least half of it too, else it comes straight
        # from the owner. Below half, ranks would receive ever more that they do not need; but if the owner sent
        # everything, blocks would not stay among neighbours.
        for _, places, rows in reversed(list(self.hops())):
            starts, before, passed = (
                self.first[places] - rows.start,
                self.before[rows],
                self.carried[:, rows],
            )
            shared, sent = (
                _sizes(of)
                for of in (np.maximum(self.needed[:, before], passed), passed)
            )
            self.is_straight[places] = 2 * np.add.reduceat(
                shared, starts
            ) < np.add.reduceat(sent, starts)
            passed = np.where(
                self._of_rows(self.is_straight, places), self.nothing, passed
            )
            self.carried[:, before] = np.minimum(self.carried[:, before], passed)

    def straight(self, hop: int, owner: int) -> bool:
        """Return True if the owner sends the block, not the rank that has it a hop before."""
        place = self.place[hop, owner]
        return place >= 0 and bool(self.is_straight[place])

    def ranges(self, hulls: IntArray, hop: int, owner: int) -> Ranges:
        place = self.place[hop, owner]
        if place < 0:
            return ()
        bounds: list[list[int]] = hulls[
            :, self.first[place] : self.first[place + 1]
        ].T.tolist()
        return union([(start, -minus_stop) for start, minus_stop in bounds])

    def tokens(self, hulls: IntArray) -> IntArray:
        found = np.zeros(self.place.shape, np.int64)
        if len(self.is_straight):
            found[self.place >= 0] = np.add.reduceat(_sizes(hulls), self.first[:-1])
        return found

    @cached_property
    def source(self) -> IntArray:
        """Return which rank sends a rank its block. Shape (hops, ranks)."""
        way = self.itinerary
        place = np.take_along_axis(self.place, way.owner, 1)
        return np.where(
            np.append(self.is_straight, False)[place], way.owner, way.source
        )


@lru_cache(maxsize=8)  # few, as each covers all ranks
def find_paths(layout: Layout, keys: Layout, mask: Mask, route: Route) -> Paths:
    """Return the candidate of the route's itineraries that sends the fewest tokens, at equal numbers the earliest."""
    needs = _needed(layout, keys, mask, route.passes_queries)
    blocks = layout if route.passes_queries else keys
    tokens = np.array([blocks.tokens_of(owner) for owner in range(blocks.ranks)])
    candidates = (
        _paths_along(needs, way, tokens) for way in route.itineraries(layout.ranks)
    )
    # Under a causal mask one direction around the ring sends less, or earlier; which one depends on the layout.
    return min(candidates, key=_tokens_and_hops)


def _tokens_and_hops(paths: Paths) -> tuple[int, int]:
    sent = paths.tokens(paths.carried).sum(1)
    return int(sent.sum()), int(sent @ np.arange(len(sent)))


class _Needs(NamedTuple):
    """Parts of blocks that other ranks need: rows per owner, visitor and span from ``first`` on, as in ``Paths``."""

    owner: IntArray
    visitor: IntArray
    first: IntArray
    hulls: IntArray
    pairs: IntArray
    tile_pairs: int


def _paths_along(needs: _Needs, way: Itinerary, tokens: IntArray) -> Paths:
    """Return the paths of one itinerary: the parts that ranks need, in order of hops, and what blocks carry for them.

    A need of (owner, visitor) becomes a place at the hop at which the itinerary brings the owner's block to that
    visitor, cut to the half of the block that travels. ``pass_on`` then adds what later hops need of a block.
    """
    numbers = np.full((len(tokens), len(tokens)), -1, needs.hulls.dtype)
    numbers[needs.owner, needs.visitor] = np.arange(len(needs.owner))
    place = numbers[np.arange(len(tokens)), way.visitor]
    is_needed = place >= 0
    pair = place[is_needed]
    place[is_needed] = np.arange(len(pair))
    of_place, row = each_of(needs.first[pair], needs.first[pair + 1])
    first = np.append(0, np.diff(needs.first)[pair].cumsum()).astype(place.dtype)
    needed = needs.hulls[:, np.append(row, -1)]
    if (way.half >= 0).any():
        hop, owner = np.nonzero(is_needed)
        start, stop = part_of(way.half[hop], tokens[owner])
        needed[:, :-1] = _overlap(
            needed[:, :-1], np.stack([start, -stop])[:, of_place], needed[0, -1]
        )
    # A block sent from hop 0 is the owner's own, which has no place and so no row before.
    earlier = place[way.posted][is_needed]
    before = (
        np.arange(len(row), dtype=place.dtype) + (first[earlier] - first[:-1])[of_place]
    )
    before[(earlier < 0)[of_place]] = len(row)
    is_straight = np.zeros(len(pair), bool)
    paths = Paths(
        way,
        place,
        first,
        before,
        needed,
        needed.copy(),
        is_straight,
        needs.pairs,
        needs.tile_pairs,
    )
    paths.pass_on()
    return paths


class Arrivals(NamedTuple):
    """Sender to every rank at every hop, and its number of tokens; both (hops, ranks)."""

    peers: IntArray
    tokens: IntArray


class Loads(NamedTuple):
    """Load of every rank: pairs or a few more (ranks,), and ``arrives``, ``gradient_in``, ``from_visitor`` by hop."""

    pairs: IntArray
    blocks: Arrivals
    gradients: Arrivals
    returned: Arrivals


def loads(layout: Layout, mask: Mask, key_layout: Layout, route: Route) -> Loads:
    """Return every rank's load: its pairs, and at each hop the tokens that it receives and their sender."""
    paths = find_paths(layout, key_layout, mask, route)
    way = paths.itinerary
    carried, gradient, handed_on = map(paths.tokens, (paths.carried, *paths.gradients))
    before = np.take_along_axis(way.visitor[way.behind], way.owner, 1)
    return Loads(
        paths.pairs,
        Arrivals(paths.source, np.take_along_axis(carried, way.owner, 1)),
        Arrivals(before, np.take_along_axis(handed_on, way.owner, 1)),
        Arrivals(way.visitor, gradient - handed_on[np.array(way.following)]),
    )


def part_of(half: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Return the storage indices [from, to) of a hop's block: all, or either half."""
    middle = tokens // 2
    return np.where(half == 1, middle, 0), np.where(half == 0, middle, tokens)


@lru_cache(maxsize=8)
def _needed(layout: Layout, keys: Layout, mask: Mask, passes_queries: bool) -> _Needs:
    """Return the parts of every owner's block that any other rank needs under the mask, on any route.

    Blocks are keys; on a route that sends queries they are queries, under the transposed mask. An empty hull has
    ``nothing``, the largest number of tokens, for both bounds.
    """
    regions = mask.table(layout.length, keys.length)
    if passes_queries:
        layout, keys, regions = keys, layout, transposed(regions)
    is_striped = keys.name == "striped" and keys.ranks > 1
    owner, visitor, first, hulls, pairs, meetings = (
        _of_stripes if is_striped else _of_runs
    )(layout, keys, regions)
    nothing = max(map(keys.tokens_of, range(keys.ranks)))
    hulls = np.append(np.minimum(hulls, nothing), np.full((2, 1), nothing), 1)
    dtype = _dtype(max(nothing, hulls.shape[1]))
    first, hulls = first.astype(dtype), hulls.astype(dtype)
    return _Needs(
        owner, visitor, first, hulls, pairs, int(pairs.sum()) // max(1, meetings)
    )


# The first five fields of ``_Needs``, and the number of meetings.
_Found = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, int]


def _of_stripes(layout: Layout, keys: Layout, regions: IntArray) -> _Found:
    """Find needs if each rank holds one stripe: one hull for each pair of ranks that meet.

    Pairs of ranks are tried in batches, which bounds the memory; each rank's work comes from the cells in closed form.
    """
    ranks, counts = keys.ranks, (layout.tokens_per_rank, keys.tokens_per_rank)
    cells = stripe_cells(ranks, *counts, regions)
    found: list[IntArray] = []
    together = max(1, _MOST_PAIRS // ranks)
    for begin in range(0, ranks, together):
        owners, visitors = np.divmod(
            np.arange(begin * ranks, min(begin + together, ranks) * ranks), ranks
        )
        hulls = stripe_hulls(visitors, owners, ranks, *counts, regions)
        kept = (hulls.sum(0) < 0) & (owners != visitors)
        found.append(
            np.stack([owners, visitors, *hulls])[:, kept].astype(
                _dtype(keys.tokens_per_rank)
            )
        )
    owner, visitor, *hulls = np.concatenate(found, 1)
    pairs, meetings = (
        cells.summed(of, ranks)
        for of in (_num_pairs(cells.met), np.ones(len(cells.q0), np.int64))
    )
    return (
        owner,
        visitor,
        np.arange(len(owner) + 1),
        np.stack(hulls),
        pairs,
        int(meetings.sum()),
    )


def _of_runs(layout: Layout, keys: Layout, regions: IntArray) -> _Found:
    """Find needs if ranks hold runs: for each (owner, visitor) that meet, a hull for each of the owner's shared spans.

    A span is shared if any other rank needs some of it; a visitor that does not gets an empty hull for it. Each meeting
    of a query run with a key run gives bounds (first key, minus one past the last), and a hull is their minimum.
    """
    ranks = keys.ranks
    queries, blocks = (
        Runs.of(list(map(each.spans, range(ranks))), [0] * ranks)
        for each in (layout, keys)
    )
    # The number of spans, and each one's number in the order of owners and storage.
    count, number = (
        len(blocks.block),
        np.lexsort((blocks.stored, blocks.block)).argsort(),
    )
    pairs, meetings = np.zeros(ranks, np.int64), 0
    found = [np.zeros((3, 0), np.int64)]
    for one, key, met in meet_runs(queries, blocks, regions):
        visitor, owner, stored = (
            queries.block[one],
            blocks.block[key],
            blocks.stored[key],
        )
        meetings += len(one)
        np.add.at(pairs, visitor, _num_pairs(met))
        key = (owner * ranks + visitor) * count + number[key]
        found.append(
            np.stack([key, met[2] + stored, -met[3] - stored])[:, owner != visitor]
        )
    key, *bounds = np.concatenate(found, 1)
    order = key.argsort()
    key = key[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    # The hull of all keys that any of the visitor's runs sees in a span.
    bounds = np.minimum.reduceat(np.stack(bounds)[:, order], starts, axis=1)
    pair, span = np.divmod(key[starts], max(1, count))
    shared = np.unique(span)
    owned = np.bincount(np.sort(blocks.block)[shared], minlength=ranks)
    is_first = np.diff(pair, prepend=-1) != 0
    owner, visitor = np.divmod(pair[is_first], ranks)
    first = np.append(0, owned[owner].cumsum())
    before = first[:-1] - (owned.cumsum() - owned)[owner]
    hulls = np.full((2, first[-1]), UNBOUNDED)
    hulls[:, before[is_first.cumsum() - 1] + shared.searchsorted(span)] = bounds
    return owner, visitor, first, hulls, pairs, meetings


def _dtype(most: int) -> type[np.signedinteger[Any]]:
    return np.int32 if 2 * most < np.iinfo(np.int32).max else np.int64


def _num_pairs(met: IntArray) -> IntArray:
    """Count pairs, or a few more: as if each row saw a full band."""
    i0, i1, j0, j1, lo, hi = met
    return (i1 - i0) * np.minimum(j1 - j0, hi - lo + 1)


def _overlap(a: IntArray, b: IntArray, nothing: int) -> IntArray:
    both = np.maximum(a, b)
    return np.where(both[0] + both[1] < 0, both, nothing)


def _sizes(hulls: IntArray) -> IntArray:
    return np.maximum(-(hulls[0] + hulls[1]), 0)
