"""(layout, mask, route, rank, hop) -> the tiles to compute, what to send, to whom, and what to skip.

A block holds only keys that later ranks need, so it shrinks from hop to hop and stops: a window of w tokens over chunks
of c reaches ceil((w - 1) / c) neighbours. Where a rank hardly needs a block, its owner sends it straight to the next
rank, so ranks compute with all that they receive. The gradient follows one hop later; the last rank that adds to a part
sends it to the owner. On ``pass-q`` blocks are queries (the transposed mask), and partials go to their owner directly.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.meetings import bands_between
from ringspan.core.geometry.ranges import Ranges, minus, size
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.gather import Gathered, gather
from ringspan.core.schedule.paths import Paths, find_paths, part_of
from ringspan.core.schedule.route import Route


class Send(NamedTuple):
    """Some of an owner's tokens, by storage index, sent to or received from ``peer``."""

    peer: int
    ranges: Ranges


@dataclass(frozen=True)
class Hop:
    """Work of one rank at one hop, while it holds the block of ``owner``.

    Ranges are indices into the owner's storage. A block's gradient is dk and dv, in backward; of queries, their partial
    in the same pass. ``bands`` are few tiles with any band; ``tiles`` the same for every flash kernel, cut lazily.
    """

    index: int
    owner: int
    bands: tuple[Tile, ...]
    arrives: Send  # the block, and who sent it
    # Parts of this block that are sent on, each with the hop of the receiver for which it is.
    sends: tuple[tuple[int, Send], ...]
    # Parts of the rank's own block, one for each of ``sends`` and for the same hop.
    straight: tuple[Send, ...]
    # The block's gradient that is held after this hop: the sum over earlier ranks and this one.
    gradient: Ranges
    gradient_in: Send  # its part that an earlier rank sent
    # Its part that is sent to a later rank, which adds to it at its hop ``gradient_next``.
    gradient_on: Send
    gradient_next: int
    # Its part that no other rank adds to: sent to the owner now.
    gradient_to_owner: Ranges
    # The part of this rank's own gradient that the rank with its block at this hop sends back.
    from_visitor: Send

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(tile for band in self.bands for tile in band.split())

    @cached_property
    def num_pairs(self) -> int:
        return sum(band.num_pairs for band in self.bands)

    @property
    def all_sends(self) -> tuple[Send, ...]:
        """Sends at the start of this hop, of this block and of the rank's own."""
        return tuple(send for _, send in self.sends) + self.straight


@dataclass(frozen=True, eq=False)
class Schedule:
    """One rank's hops in one attention, in order; compared by identity, as comparing all hops takes longer."""

    rank: int
    ranks: int
    hops: tuple[Hop, ...]
    # Pairs of the mean tile and of the mean rank, over all ranks, so that every rank knows the same; approximate.
    tile_pairs: int
    rank_pairs: int
    passes_queries: bool = False  # blocks are queries, else keys and values
    # On the route all-gather: the passes fetch all keys at once, without hops.
    gathered: Gathered | None = None

    @property
    def blocks(self) -> int:
        """Blocks of a head group held at once: two gathers, all blocks, or one and the next."""
        if self.gathered is not None:
            return 2 * self.ranks
        return (
            self.ranks
            if all(
                hop.index in {0, *(n for n, _ in self.hops[0].sends)}
                for hop in self.hops
            )
            else 2
        )

    @cached_property
    def active(self) -> tuple[Hop, ...]:
        """Hops at which this rank does anything, and the first one."""
        posted = {0}  # hops at which, or for which, something is sent
        for hop in self.hops:
            for (index, send), straight in zip(hop.sends, hop.straight, strict=True):
                if send.ranges or straight.ranges:
                    posted |= {hop.index, index}

        def is_active(hop: Hop) -> bool:
            received = (
                hop.arrives,
                hop.from_visitor,
                self.hops[hop.gradient_next].gradient_in,
            )
            received = *received, *(self.hops[index].arrives for index, _ in hop.sends)
            return bool(
                hop.bands or hop.gradient or any(each.ranges for each in received)
            )

        return tuple(hop for hop in self.hops if hop.index in posted or is_active(hop))

    @cached_property
    def num_pairs(self) -> int:
        return sum(hop.num_pairs for hop in self.hops)

    @property
    def sent_tokens(self) -> int:
        """Tokens that this rank sends in forward."""
        return sum(size(send.ranges) for hop in self.hops for send in hop.all_sends)


@lru_cache(maxsize=256)
def make_schedule(
    layout: Layout,
    mask: Mask,
    rank: int,
    key_layout: Layout | None = None,
    route: str | Route = "ring",
) -> Schedule:
    """Return one rank's schedule; pure, so that every rank knows the others' parts.

    ``layout`` is of the queries, with Ulysses groups theirs (``Layout.grouped``); ``key_layout``, for cross-attention,
    of the keys. Positions from a layout's length on neither see nor are seen.

    Raises:
        UnsupportedError: an unknown route.
        LayoutError: two layouts of different name or number of ranks, or a rank outside of them.
    """
    keys = key_layout or layout
    if (keys.name, keys.ranks) != (layout.name, layout.ranks):
        raise LayoutError(
            f"queries are {layout.name} over {layout.ranks} ranks, keys {keys.name} over {keys.ranks}; make them equal"
        )
    route = Route.parse(route, layout.ranks) if isinstance(route, str) else route
    if route.ulysses > 1:
        raise UnsupportedError(
            f"{route} has Ulysses groups; plan the route between them on the layout of the groups"
        )
    blocks, others = (layout, keys) if route.passes_queries else (keys, layout)
    paths = find_paths(layout, keys, mask, route)
    way = paths.itinerary
    owners: list[int] = way.owner[:, rank].tolist()
    starts, stops = (
        part.tolist()
        for part in part_of(way.half, np.array(list(map(blocks.tokens_of, owners))))
    )
    held = [
        _cut(blocks.spans(owner), *part)
        for owner, *part in zip(owners, starts, stops, strict=True)
    ]
    regions = mask.table(layout.length, keys.length)
    found = bands_between(
        others.spans(rank), held, starts, regions, passes_queries=route.passes_queries
    )
    hops = tuple(
        _hop(paths, rank, *each)
        for each in zip(range(len(found)), owners, found, strict=True)
    )
    gathered = None
    if route.name == "all-gather" and layout.ranks > 1:
        sends, receives = (
            [send for _, send in hops[0].sends],
            [(hop.owner, hop.arrives.ranges) for hop in hops[1:]],
        )
        gathered = gather(layout, keys, mask, rank, hops[0].bands, sends, receives)
    return Schedule(
        rank,
        layout.ranks,
        hops,
        paths.tile_pairs,
        int(paths.pairs.mean()),
        route.passes_queries,
        gathered,
    )


def _hop(
    paths: Paths, rank: int, index: int, owner: int, bands: tuple[Tile, ...]
) -> Hop:
    """Read one rank's hop off the paths of all ranks.

    ``behind`` and ``following`` are the hops whose visitors have the block's gradient before and after this hop. Of the
    gradient that this rank holds, the following visitor gets the part it adds to, and the owner the rest.
    """
    way = paths.itinerary
    behind, following = int(way.behind[index]), way.following[index]
    held, handed_on = paths.gradients
    gradient, on = (
        paths.ranges(held, index, owner),
        paths.ranges(handed_on, following, owner),
    )
    mine, mine_on = (
        paths.ranges(held, index, rank),
        paths.ranges(handed_on, following, rank),
    )
    return Hop(
        index=index,
        owner=owner,
        bands=bands,
        arrives=Send(
            owner if paths.straight(index, owner) else int(way.source[index, rank]),
            paths.ranges(paths.carried, index, owner),
        ),
        # A block is posted a hop ahead of its use, so that it travels while another one is computed.
        sends=tuple(
            (hop, _sent(paths, hop, owner, is_straight=False))
            for hop in way.sent_at[index]
        ),
        straight=tuple(
            _sent(paths, hop, rank, is_straight=True) for hop in way.sent_at[index]
        ),
        gradient=gradient,
        gradient_in=Send(
            int(way.visitor[behind, owner]), paths.ranges(handed_on, index, owner)
        ),
        gradient_on=Send(int(way.visitor[following, owner]), on),
        gradient_next=following,
        gradient_to_owner=minus(gradient, on),
        from_visitor=Send(int(way.visitor[index, rank]), minus(mine, mine_on)),
    )


def _sent(paths: Paths, hop: int, owner: int, *, is_straight: bool) -> Send:
    is_sent = paths.straight(hop, owner) == is_straight
    return Send(
        int(paths.itinerary.visitor[hop, owner]),
        paths.ranges(paths.carried, hop, owner) if is_sent else (),
    )


def _cut(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Return the spans of the stored tokens [start, stop)."""
    kept: list[Span] = []
    stored = 0
    for span in spans:
        first, last = max(start - stored, 0), min(stop - stored, span.count)
        if first < last:
            kept.append(Span(span.start + span.step * first, last - first, span.step))
        stored += span.count
    return tuple(kept)
