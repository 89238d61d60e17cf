"""(layout, mask, route, rank, hop) -> the tiles to compute, what to send, to whom, and what to skip.

The block of an owner is passed on from rank to rank in the order of the route. It holds only the keys that some later
rank needs, so it shrinks from hop to hop and is not sent on when nobody needs it: a window of w tokens over chunks of c
reaches ceil((w - 1) / c) neighbours, and a causal zigzag block drops its late chunk half way. Its gradient
follows one hop behind; each part of it is sent to its owner by the last rank that adds to it.

On the route ``pass-q`` the blocks are queries, needed by the keys that they see: the schedule of the transposed mask.
What a visited rank computes with them, a partial result, is sent to their owner directly.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import UNBOUNDED, Mask
from ringspan.core.geometry.ranges import Ranges, minus, size, union
from ringspan.core.geometry.tile import MAX_MEETINGS, Tile, bands_between, meet
from ringspan.core.schedule.route import IntArray, Itinerary, Route

_FEW_MEETINGS: Final = 1 << 12  # below, Python takes longer to call numpy than numpy to answer


class Send(NamedTuple):
    """Some of an owner's tokens, by their indices in its storage, sent to ``peer`` or, where received, by ``peer``."""

    peer: int
    ranges: Ranges


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop, while it holds the block of ``owner``.

    Ranges are indices into the owner's own storage. Hop 0 is the rank's own block, which nobody sent. A block's
    gradient is dk and dv, in the backward pass; of a block of queries it is their partial, in the same pass. ``bands``
    are what it computes as few tiles with any band; ``tiles`` the same as tiles that every flash kernel runs, cut when
    they are asked for: timing never does.
    """

    index: int
    owner: int
    bands: tuple[Tile, ...]
    arrives: Send  # the block, and who sent it
    sends: tuple[tuple[int, Send], ...]  # what of this block goes out, and for which hop of whoever gets it
    gradient: Ranges  # held after this hop: the sum over earlier ranks and this one
    gradient_in: Send  # what of it an earlier rank sent here
    gradient_on: Send  # what of it is sent to a later rank, for its hop ``gradient_next``
    gradient_next: int
    gradient_to_owner: Ranges  # what of it nobody adds to any more: sent to the owner now
    from_visitor: Send  # of this rank's own gradient, what the rank that holds its block at this hop sends back

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(tile for band in self.bands for tile in band.split())

    @cached_property
    def num_pairs(self) -> int:
        return sum(band.num_pairs for band in self.bands)


@dataclass(frozen=True)
class Schedule:
    """One rank's part in one attention: its hops in order."""

    rank: int
    ranks: int
    hops: tuple[Hop, ...]
    tile_pairs: int  # of a mean tile of all ranks, about: every rank knows the same
    passes_queries: bool = False  # blocks are queries, else keys and values

    @cached_property
    def num_pairs(self) -> int:
        """Allowed (query, key) pairs that this rank computes."""
        return sum(hop.num_pairs for hop in self.hops)

    @property
    def sent_tokens(self) -> int:
        """Tokens of keys and values, or of queries, that this rank sends in forward."""
        return sum(size(send.ranges) for hop in self.hops for _, send in hop.sends)

    @property
    def sent_gradient_tokens(self) -> int:
        """Tokens of dk and dv that this rank sends in backward, or of partials of other ranks' queries."""
        return sum(size(hop.gradient_on.ranges) + size(hop.gradient_to_owner) for hop in self.hops)


@lru_cache(maxsize=256)
def make_schedule(
    layout: Layout, mask: Mask, rank: int, key_layout: Layout | None = None, route: str | Route = "ring"
) -> Schedule:
    """The schedule of one rank; pure, so that every rank knows every other rank's part.

    Args:
        layout: where the queries live.
        mask: which pairs are allowed; positions at or past a layout's length see nothing and nobody sees them.
        rank: whose schedule.
        key_layout: where the keys live, for cross-attention; ``layout`` when None.
        route: the order in which blocks visit ranks, one without Ulysses groups: these trade tokens for heads first,
            and the layout here is that of the groups (``Layout.grouped``).

    Raises:
        UnsupportedError: an unknown route.
        LayoutError: two layouts of different name or number of ranks, or a rank outside of them.
    """
    keys = key_layout or layout
    if (keys.name, keys.ranks) != (layout.name, layout.ranks):
        raise LayoutError(
            f"queries are {layout.name} over {layout.ranks} ranks, keys {keys.name} over {keys.ranks}; make them alike"
        )
    route = Route.parse(route, layout.ranks) if isinstance(route, str) else route
    if route.ulysses > 1:
        raise UnsupportedError(f"{route} has Ulysses groups; plan the route between them on the layout of the groups")
    blocks = layout if route.passes_queries else keys
    paths = _paths(layout, keys, mask, route)
    way = paths.itinerary
    regions = mask.table(layout.length, keys.length)
    owners: list[int] = way.owner[:, rank].tolist()
    parts = [_part(half, blocks.tokens_of(owner)) for half, owner in zip(way.half.tolist(), owners, strict=True)]
    held = [_cut(blocks.spans(owner), *part) for owner, part in zip(owners, parts, strict=True)]
    mine = (keys if route.passes_queries else layout).spans(rank)
    found = bands_between([(block, mine) if route.passes_queries else (mine, block) for block in held], regions)
    transfers = _transfers(paths, rank)
    hops: list[Hop] = []
    for index, (owner, (start, _)) in enumerate(zip(owners, parts, strict=True)):
        offset = (start, 0) if route.passes_queries else (0, start)
        bands = tuple(band.shifted(*offset) for band in found[index]) if start else found[index]
        hops.append(
            Hop(
                index=index,
                owner=owner,
                bands=bands,
                arrives=transfers.arrives[index],
                sends=tuple((later, transfers.sent[later]) for later in way.sent_at[index]),
                gradient=transfers.gradient[index],
                gradient_in=transfers.gradient_in[index],
                gradient_on=transfers.gradient_on[index],
                gradient_next=way.following[index],
                gradient_to_owner=transfers.gradient_to_owner[index],
                from_visitor=transfers.from_visitor[index],
            )
        )
    return Schedule(rank, layout.ranks, tuple(hops), paths.tile_pairs, route.passes_queries)


def arrivals(layout: Layout, mask: Mask, key_layout: Layout, route: Route) -> tuple[IntArray, IntArray]:
    """Who sends each rank its block of each hop, and how many tokens of it: ``arrives`` of all hops of all ranks, both
    (hops, ranks).
    """
    paths = _paths(layout, key_layout, mask, route)
    way = paths.itinerary
    return way.source, np.take_along_axis(_sizes(paths.carried).sum(-1), way.owner, 1)


def _part(half: int, tokens: int) -> tuple[int, int]:
    """The storage indices that a hop's block is about: all, or either half."""
    middle = tokens // 2
    return {-1: (0, tokens), 0: (0, middle), 1: (middle, tokens)}[half]


def _cut(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """The spans of storage indices [start, stop)."""
    kept: list[Span] = []
    stored = 0
    for span in spans:
        first, last = max(start - stored, 0), min(stop - stored, span.count)
        if first < last:
            kept.append(Span(span.start + span.step * first, last - first, span.step))
        stored += span.count
    return tuple(kept)


@dataclass(frozen=True)
class _Paths:
    """What is sent of every owner's block: per (hop, owner, span) the hull of storage indices, see ``_hull``.

    ``handed_on`` is the part of a gradient that the rank of a hop gets from the rank before it.
    """

    itinerary: Itinerary
    carried: IntArray
    gradient: IntArray
    handed_on: IntArray
    tile_pairs: int


class _Transfers(NamedTuple):
    """The fields of ``Hop`` about messages, for each of one rank's hops; ``sent`` is by the hop that it is sent for."""

    arrives: list[Send]
    sent: list[Send]
    gradient: list[Ranges]
    gradient_in: list[Send]
    gradient_on: list[Send]
    gradient_to_owner: list[Ranges]
    from_visitor: list[Send]


def _transfers(paths: _Paths, rank: int) -> _Transfers:
    way = paths.itinerary
    hops, owners, following = np.arange(len(way.owner)), way.owner[:, rank], np.array(way.following)
    # A block is handed on from the hop at which it is posted, so that it travels while another one is computed.
    owned_before = owners[way.posted]  # whose block was here when a later hop's was sent
    gradient, on = _listed(paths.gradient[hops, owners]), _listed(paths.handed_on[following, owners])
    mine, mine_on = _listed(paths.gradient[:, rank]), _listed(paths.handed_on[following, rank])
    return _Transfers(
        arrives=_sends(way.source[:, rank], _listed(paths.carried[hops, owners])),
        sent=_sends(way.visitor[hops, owned_before], _listed(paths.carried[hops, owned_before])),
        gradient=gradient,
        gradient_in=_sends(way.visitor[way.behind, owners], _listed(paths.handed_on[hops, owners])),
        gradient_on=_sends(way.visitor[following, owners], on),
        gradient_to_owner=list(map(_left, gradient, on)),
        from_visitor=_sends(way.visitor[:, rank], list(map(_left, mine, mine_on))),
    )


def _sends(peers: IntArray, ranges: list[Ranges]) -> list[Send]:
    return list(map(Send, peers.tolist(), ranges))


@lru_cache(maxsize=64)
def _paths(layout: Layout, keys: Layout, mask: Mask, route: Route) -> _Paths:
    needed, tile_pairs = _needed(layout, keys, mask, route.passes_queries)
    blocks = layout if route.passes_queries else keys
    tokens = [blocks.tokens_of(owner) for owner in range(blocks.ranks)]
    candidates = (_paths_along(needed, way, tokens, tile_pairs) for way in route.itineraries(layout.ranks))
    # Of the two directions around a ring, under a causal mask one sends less: the layout decides which.
    return min(candidates, key=lambda paths: int(_sizes(paths.carried).sum()))


def _paths_along(needed: IntArray, way: Itinerary, tokens: list[int], tile_pairs: int) -> _Paths:
    """Order the needs (owner, visitor, span, bound) by hop; a block is cut to the hull of what is still needed.

    ``tokens`` are those of each owner.
    """
    parts = np.array([[_part(half, count) for count in tokens] for half in way.half.tolist()]) * _SIGNS
    by_hop = _overlap(needed[np.arange(len(needed)), way.visitor], parts[:, :, None])
    carried = by_hop.copy()
    # From the last hop back: what a later rank still needs has to pass through every earlier one.
    for hop in range(len(by_hop) - 1, 0, -1):
        earlier = way.posted[hop]
        carried[earlier] = _hull(carried[earlier], carried[hop])
    # At hop 0 each rank has its own block: nothing arrives, and its gradient stays.
    carried[0] = _NOTHING
    # A gradient covers what its ranks have seen so far, so it grows on its way as the block shrinks. A rank that no
    # longer gets some rows of the block cannot add to theirs: they go to the owner from here (``_left``).
    gradient, handed_on = by_hop.copy(), np.full_like(by_hop, _NOTHING)
    gradient[0] = _NOTHING
    for hop in range(1, len(by_hop)):
        if way.behind[hop]:
            handed_on[hop] = _overlap(gradient[way.behind[hop]], carried[hop])
            gradient[hop] = _hull(handed_on[hop], gradient[hop])
    return _Paths(way, carried, gradient, handed_on, tile_pairs)


@lru_cache(maxsize=32)
def _needed(layout: Layout, keys: Layout, mask: Mask, passes_queries: bool) -> tuple[IntArray, int]:
    """Hull of the keys of each (owner, visitor, owner's span) that the visitor sees, in the owner's storage indices;
    and the pairs of a mean meeting of two spans and a region. With queries as blocks, of those that see its keys.
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
    meetings = pairs = 0
    needed = np.full((layout.ranks, layout.ranks, _most_spans(keys), 2), _NOTHING, dtype=np.int64)
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
            pairs += int(_num_pairs(met).sum())
    return needed, pairs // max(1, meetings)


def _keys_seen(met: IntArray) -> IntArray:
    """Hull of the indices of a key span that each visitor sees."""
    seen = met[..., 1] > met[..., 0]
    return np.where(seen[..., None], met[..., 2:4] * _SIGNS, _NOTHING).min((-3, -2), initial=_NOTHING)


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


# A hull is its first index and minus the one past its last, so that the wider of two bounds is the smaller number.
_NOTHING: Final = UNBOUNDED
_SIGNS: Final = np.array([1, -1])


_hull = np.minimum


def _overlap(a: IntArray, b: IntArray) -> IntArray:
    both = np.maximum(a, b)
    return np.where(both.sum(-1, keepdims=True) < 0, both, _NOTHING)


def _sizes(hulls: IntArray) -> IntArray:
    """Indices in each hull."""
    return np.maximum(-hulls.sum(-1), 0)


def _listed(hulls: IntArray) -> list[Ranges]:
    """Each hull per span as ranges; the last two axes of ``hulls`` are (spans, 2)."""
    return [_ranges(tuple(each)) for each in hulls.reshape(-1, 2 * hulls.shape[-2]).tolist()]


@lru_cache(maxsize=1 << 12)  # of a hop and the next one, of a rank and the next, mostly the same
def _ranges(bounds: tuple[int, ...]) -> Ranges:
    return union([(first, -minus_stop) for first, minus_stop in zip(bounds[::2], bounds[1::2], strict=True)])


_left = lru_cache(maxsize=1 << 12)(minus)
