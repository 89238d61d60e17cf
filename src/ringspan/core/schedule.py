"""(layout, mask, rank, hop) -> the tiles to compute, what to send, to whom, and what to skip.

The block of an owner visits the other ranks in ring order. It carries only the keys that some later visitor needs, so
it thins out on the way and stops when nobody needs it: a window of w tokens over chunks of c reaches ceil((w - 1) / c)
neighbours, and a causal zigzag block drops its late chunk on the way. Its gradient follows one hop behind; each part of
it goes straight home from the last rank that adds to it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.layout import Layout, Span
from ringspan.core.mask import UNBOUNDED, Mask
from ringspan.core.ranges import Ranges, minus, size, union
from ringspan.core.tile import Tile, meet, tiles_between

RouteName = Literal["ring"]
ROUTE_NAMES: Final[tuple[str, ...]] = get_args(RouteName)

IntArray = NDArray[np.int64]

_MAX_MEETINGS: Final = 1 << 20  # spans x spans x regions met in one numpy call: bounds the schedule's own memory


@dataclass(frozen=True, slots=True)
class Hop:
    """What one rank does at one hop, while it holds the block of ``owner``.

    Ranges are indices into the owner's own storage. Hop 0 is the rank's own block, which nothing carried here.
    """

    index: int
    owner: int
    tiles: tuple[Tile, ...]
    carried: Ranges  # keys and values that arrived
    passed_on: Ranges  # what of them the next rank gets
    gradient_in: Ranges  # dk and dv that earlier visitors added up and sent here
    gradient: Ranges  # those and what this rank adds
    gradient_on: Ranges  # what of it the next rank gets
    gradient_home: Ranges  # what of it nobody adds to any more: straight to the owner

    @property
    def num_pairs(self) -> int:
        return sum(tile.num_pairs for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in one attention: its hops in order; hop t computes with the block of the rank t steps up the
    ring.

    ``direction`` +1 hands blocks to the next higher rank, -1 to the next lower one, whichever moves fewer tokens.
    ``returns[t]`` is which rank sends a part of this rank's own gradient home after hop t, and which part.
    """

    rank: int
    ranks: int
    direction: int
    hops: tuple[Hop, ...]
    returns: tuple[tuple[int, Ranges], ...]

    @property
    def next_rank(self) -> int:
        return (self.rank + self.direction) % self.ranks

    @property
    def previous_rank(self) -> int:
        return (self.rank - self.direction) % self.ranks

    @property
    def num_pairs(self) -> int:
        """Allowed (query, key) pairs that this rank computes."""
        return sum(hop.num_pairs for hop in self.hops)

    @property
    def sent_tokens(self) -> int:
        """Tokens of keys and values that this rank sends in forward."""
        return sum(size(hop.passed_on) for hop in self.hops)

    @property
    def sent_gradient_tokens(self) -> int:
        """Tokens of dk and dv that this rank sends in backward."""
        return sum(size(hop.gradient_on) + size(hop.gradient_home) for hop in self.hops)


@lru_cache(maxsize=256)
def plan(layout: Layout, mask: Mask, rank: int, key_layout: Layout | None = None, route: str = "ring") -> Schedule:
    """The schedule of one rank; pure, so that every rank knows every other rank's part.

    Args:
        layout: where the queries live.
        mask: which pairs are allowed; positions at or past a layout's length see nothing and nobody sees them.
        rank: whose schedule.
        key_layout: where the keys live, for cross-attention; ``layout`` when None.
        route: the order in which blocks visit ranks.

    Raises:
        UnsupportedError: an unknown route.
        LayoutError: two layouts of different name or number of ranks, or a rank outside of them.
    """
    if route not in ROUTE_NAMES:
        raise UnsupportedError(f"unknown route {route!r}; choose one of {', '.join(ROUTE_NAMES)}")
    keys = key_layout or layout
    if (keys.name, keys.ranks) != (layout.name, layout.ranks):
        raise LayoutError(
            f"queries are {layout.name} over {layout.ranks} ranks, keys {keys.name} over {keys.ranks}; make them alike"
        )
    travel = _travel(layout, keys, mask)
    regions = mask.table(layout.length, keys.length)
    hops: list[Hop] = []
    for index in range(layout.ranks):
        owner = (rank - travel.direction * index) % layout.ranks
        tiles = tiles_between(layout.spans(rank), keys.spans(owner), regions)
        hops.append(Hop(index, owner, tiles, *travel.leg(owner, index)))
    senders = ((rank + travel.direction * index) % layout.ranks for index in range(layout.ranks))
    returns = tuple((sender, travel.leg(rank, index)[-1]) for index, sender in enumerate(senders))
    return Schedule(rank, layout.ranks, travel.direction, tuple(hops), returns)


@dataclass(frozen=True)
class _Travel:
    """Where every owner's block goes: per (owner, hop, span) the first and past-the-last index, in storage indices."""

    direction: int
    carried: IntArray
    gradient: IntArray

    def leg(self, owner: int, index: int) -> tuple[Ranges, Ranges, Ranges, Ranges, Ranges, Ranges]:
        """carried, passed_on, gradient_in, gradient, gradient_on, gradient_home of an owner's block at one hop."""
        carried, gradient = _ranges(self.carried[owner, index]), _ranges(self.gradient[owner, index])
        onward, gradient_on = (), ()
        if index + 1 < self.carried.shape[1]:
            onward = _ranges(self.carried[owner, index + 1])
            gradient_on = _ranges(_overlap(self.gradient[owner, index], self.carried[owner, index + 1]))
        gradient_in = _ranges(_overlap(self.gradient[owner, index - 1], self.carried[owner, index])) if index else ()
        return carried, onward, gradient_in, gradient, gradient_on, minus(gradient, gradient_on)


@lru_cache(maxsize=64)
def _travel(layout: Layout, keys: Layout, mask: Mask) -> _Travel:
    needed = _needed(layout, keys, mask)
    return min((_journey(needed, direction) for direction in (1, -1)), key=lambda travel: _sizes(travel.carried))


def _journey(needed: IntArray, direction: int) -> _Travel:
    """Order the needs (owner, visitor, span, bound) by hop; a block carries the hull of what is still needed."""
    ranks = len(needed)
    owner, index = np.arange(ranks)[:, None], np.arange(ranks)[None, :]
    by_hop = needed[owner, (owner + direction * index) % ranks]
    carried = by_hop.copy()
    for hop in reversed(range(ranks - 1)):
        carried[:, hop] = _hull(carried[:, hop], carried[:, hop + 1])
    carried[:, 0] = _NOTHING
    gradient = by_hop.copy()
    gradient[:, 0] = _NOTHING
    for hop in range(1, ranks):
        gradient[:, hop] = _hull(_overlap(gradient[:, hop - 1], carried[:, hop]), gradient[:, hop])
    return _Travel(direction, carried, gradient)


def _needed(layout: Layout, keys: Layout, mask: Mask) -> IntArray:
    """Hull of the keys of each (owner, visitor, owner's span) that the visitor sees, in the owner's storage indices."""
    regions = mask.table(layout.length, keys.length)
    queries = _span_table(layout)
    needed = np.empty((layout.ranks, layout.ranks, 2, 2), dtype=np.int64)
    needed[:] = _NOTHING
    for owner in range(layout.ranks):
        storage = 0
        for number, span in enumerate(keys.spans(owner)):
            last = span.start + span.step * (span.count - 1)
            near = regions[(regions[:, 2] <= last) & (regions[:, 3] > span.start)]
            at_once = max(1, _MAX_MEETINGS // max(1, 2 * len(near)))
            for first in range(0, layout.ranks, at_once):
                visitors = slice(first, first + at_once)
                needed[owner, visitors, number] = _keys_seen(queries[visitors], span, near) + storage
            storage += span.count
    return needed


def _keys_seen(queries: IntArray, span: Span, regions: IntArray) -> IntArray:
    """Hull of the indices of a key span that each visitor's query spans (visitor, span, start and count) see."""
    starts, counts = queries[..., 0, None], queries[..., 1, None]
    met = meet(starts, counts, np.array(span.start), np.array(span.count), span.step, regions)
    seen = met[..., 1] > met[..., 0]
    first = np.where(seen, met[..., 2], _NOTHING[0]).min((1, 2), initial=_NOTHING[0])
    stop = np.where(seen, met[..., 3], _NOTHING[1]).max((1, 2), initial=_NOTHING[1])
    return np.stack((first, stop), axis=-1)


def _span_table(layout: Layout) -> IntArray:
    """Start and count of each rank's spans, a missing second span with count 0. Shape (ranks, 2, 2)."""
    table = np.zeros((layout.ranks, 2, 2), dtype=np.int64)
    for rank in range(layout.ranks):
        for number, span in enumerate(layout.spans(rank)):
            table[rank, number] = span.start, span.count
    return table


_NOTHING: Final = np.array([UNBOUNDED, -UNBOUNDED], dtype=np.int64)  # the hull with nothing in it


def _hull(a: IntArray, b: IntArray) -> IntArray:
    return np.stack((np.minimum(a[..., 0], b[..., 0]), np.maximum(a[..., 1], b[..., 1])), axis=-1)


def _overlap(a: IntArray, b: IntArray) -> IntArray:
    both = np.stack((np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])), axis=-1)
    return np.where((both[..., 0] < both[..., 1])[..., None], both, _NOTHING)


def _sizes(hulls: IntArray) -> int:
    return int(np.maximum(hulls[..., 1] - hulls[..., 0], 0).sum())


def _ranges(hulls: IntArray) -> Ranges:
    return union([(int(start), int(stop)) for start, stop in hulls])
