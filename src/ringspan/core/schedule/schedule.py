"""(layout, mask, route, rank, hop) -> the tiles to compute, what to send, to whom, and what to skip.

The block of an owner is passed on from rank to rank in the order of the route. It holds only the keys that some later
rank needs, so it shrinks from hop to hop and is not sent on when nobody needs it: a window of w tokens over chunks of c
reaches ceil((w - 1) / c) neighbours, and a causal zigzag block drops its late chunk half way. No rank passes on what it
has little use for itself: there the owner, which always has its block, sends it straight to whoever is next. So every
rank computes with every block that it receives. The block's gradient follows one hop behind; each part of it is sent to
its owner by the last rank that adds to it.

On the route ``pass-q`` the blocks are queries, needed by the keys that they see: the schedule of the transposed mask.
What a visited rank computes with them, a partial result, is sent to their owner directly.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.ranges import Ranges, minus, size, union
from ringspan.core.geometry.tile import Tile, bands_between
from ringspan.core.schedule.paths import NOTHING, Paths, find_paths, part_of
from ringspan.core.schedule.route import IntArray, Route


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
    straight: tuple[Send, ...]  # for each of ``sends`` what goes out of the rank's own block, for the same hop
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

    @property
    def all_sends(self) -> tuple[Send, ...]:
        """What goes out at the start of this hop, of this block and of the rank's own."""
        return tuple(send for _, send in self.sends) + self.straight


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
        return sum(size(send.ranges) for hop in self.hops for send in hop.all_sends)

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
    paths = find_paths(layout, keys, mask, route)
    way = paths.itinerary
    regions = mask.table(layout.length, keys.length)
    owners: list[int] = way.owner[:, rank].tolist()
    parts = [part_of(half, blocks.tokens_of(owner)) for half, owner in zip(way.half.tolist(), owners, strict=True)]
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
                straight=tuple(transfers.straight[later] for later in way.sent_at[index]),
                gradient=transfers.gradient[index],
                gradient_in=transfers.gradient_in[index],
                gradient_on=transfers.gradient_on[index],
                gradient_next=way.following[index],
                gradient_to_owner=transfers.gradient_to_owner[index],
                from_visitor=transfers.from_visitor[index],
            )
        )
    return Schedule(rank, layout.ranks, tuple(hops), paths.tile_pairs, route.passes_queries)


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


class _Transfers(NamedTuple):
    """The fields of ``Hop`` about messages, for each of one rank's hops; ``sent`` and ``straight`` are by the hop that
    they are sent for.
    """

    arrives: list[Send]
    sent: list[Send]
    straight: list[Send]
    gradient: list[Ranges]
    gradient_in: list[Send]
    gradient_on: list[Send]
    gradient_to_owner: list[Ranges]
    from_visitor: list[Send]


def _transfers(paths: Paths, rank: int) -> _Transfers:
    way = paths.itinerary
    hops, owners, following = np.arange(len(way.owner)), way.owner[:, rank], np.array(way.following)
    # A block is handed on from the hop at which it is posted, so that it travels while another one is computed.
    owned_before = owners[way.posted]  # whose block was here when a later hop's was sent
    sent = np.where(paths.is_straight[hops, owned_before, None, None], NOTHING, paths.carried[hops, owned_before])
    straight = np.where(paths.is_straight[:, rank, None, None], paths.carried[:, rank], NOTHING)
    gradient, on = _listed(paths.gradient[hops, owners]), _listed(paths.handed_on[following, owners])
    mine, mine_on = _listed(paths.gradient[:, rank]), _listed(paths.handed_on[following, rank])
    return _Transfers(
        arrives=_sends(paths.source[:, rank], _listed(paths.carried[hops, owners])),
        sent=_sends(way.visitor[hops, owned_before], _listed(sent)),
        straight=_sends(way.visitor[:, rank], _listed(straight)),
        gradient=gradient,
        gradient_in=_sends(way.visitor[way.behind, owners], _listed(paths.handed_on[hops, owners])),
        gradient_on=_sends(way.visitor[following, owners], on),
        gradient_to_owner=list(map(_left, gradient, on)),
        from_visitor=_sends(way.visitor[:, rank], list(map(_left, mine, mine_on))),
    )


def _sends(peers: IntArray, ranges: list[Ranges]) -> list[Send]:
    return list(map(Send, peers.tolist(), ranges))


def _listed(hulls: IntArray) -> list[Ranges]:
    """Each hull per span as ranges; the last two axes of ``hulls`` are (spans, 2)."""
    return [_ranges(tuple(each)) for each in hulls.reshape(-1, 2 * hulls.shape[-2]).tolist()]


@lru_cache(maxsize=1 << 12)  # of a hop and the next one, of a rank and the next, mostly the same
def _ranges(bounds: tuple[int, ...]) -> Ranges:
    return union([(first, -minus_stop) for first, minus_stop in zip(bounds[::2], bounds[1::2], strict=True)])


_left = lru_cache(maxsize=1 << 12)(minus)
