"""All keys that a rank's rows see, in one stretch by position: each row is computed once, without merges between ranks.

Or in two stages for kernels of squares, which compute most rows twice anyway: the rank's own keys while the others
arrive, then those, in order of position.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Final, NamedTuple

from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.meetings import bands_between
from ringspan.core.geometry.ranges import Ranges, size, stored, union
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunches

# Messages of one post; NCCL may hang on more (pytorch/pytorch#174942).
MOST_MESSAGES: Final = 256


class Piece(NamedTuple):
    """An owner's stored tokens [start, stop), laid out from ``place`` on."""

    owner: int
    start: int
    stop: int
    place: int

    @property
    def places(self) -> slice:
        """Return the tokens' places."""
        return slice(self.place, self.place + self.stop - self.start)


class Stretch(NamedTuple):
    """Keys from the place ``start`` on, which a peer sends or is sent."""

    peer: int
    start: int
    size: int

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.size)


Post = tuple[tuple[Stretch, ...], tuple[Stretch, ...]]
"""Stretches that are sent, and those that are received."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Bands that are computed together; compared by identity."""

    bands: tuple[Tile, ...]

    @cached_property
    def num_pairs(self) -> int:
        return sum(band.num_pairs for band in self.bands)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The keys of one rank's rows, and its queries' bands against them; compared by identity.

    All keys have come before the last stage; an earlier one sees only the rank's own. ``posts`` exchange stretches of
    keys in place.
    """

    pieces: tuple[Piece, ...]
    stages: tuple[Stage, ...]
    posts: tuple[Post, ...]
    in_stages: "Gathered | None" = None

    @property
    def num_keys(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def bands(self) -> tuple[Tile, ...]:
        return tuple(band for stage in self.stages for band in stage.bands)

    def of(self, owner: int) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.owner == owner)

    def suited(
        self, launches: Callable[[tuple[Tile, ...]], KernelLaunches]
    ) -> "Gathered":
        """Return two stages, the rank's own keys first, if a kernel with these launches computes no more rows then."""

        def rows(one: Gathered) -> int:
            return sum(
                launch.num_rows
                for stage in one.stages
                for launch in launches(stage.bands)
            )

        return (
            self.in_stages
            if self.in_stages and rows(self.in_stages) <= rows(self)
            else self
        )


# Positions of an owner's tokens, the owner, and the storage index of the first.
_Found = tuple[Span, int, int]


def gather(
    layout: Layout, keys: Layout, mask: Mask, rank: int, own: tuple[Tile, ...], sends: Sequence[tuple[int, Ranges]],
    receives: Sequence[tuple[int, Ranges]],
) -> Gathered | None:  # fmt: skip
    """Lay out a rank's own keys, whose tiles are ``own``, and all that it receives, in the order of the hops.

    None for stripes, whose positions do not continue.
    """
    if any(span.step != 1 for owner in range(keys.ranks) for span in keys.spans(owner)):
        return None
    mine = union(((tile.k0, tile.k1) for tile in own), *(ranges for _, ranges in sends))
    held = list(_cut(keys, rank, mine))
    came = sorted(
        one for owner, ranges in receives for one in _cut(keys, owner, ranges)
    )
    sent = [(peer, sorted(_cut(keys, rank, ranges))) for peer, ranges in sends]
    regions = mask.table(layout.length, keys.length)

    def laid_out(
        found: list[_Found], first: int, *own: Stage, in_stages: Gathered | None = None
    ) -> Gathered:
        """Lay out pieces, and meet those from the place ``first`` on, which are in order of position."""
        pieces, spans, place = list[Piece](), list[Span](), 0
        for span, owner, start in found:
            pieces.append(Piece(owner, start, start + span.count, place))
            if (
                place >= first
                and spans
                and spans[-1].start + spans[-1].count == span.start
            ):
                spans[-1] = Span(spans[-1].start, spans[-1].count + span.count)
            elif place >= first:
                spans.append(span)
            place += span.count
        (bands,) = bands_between(
            layout.spans(rank), [tuple(spans)], [first], regions, passes_queries=False
        )
        posts = _posts(pieces, rank, sent, [owner for owner, _ in receives])
        return Gathered(tuple(pieces), (*own, Stage(bands)), posts, in_stages)

    shifted = tuple(
        tile.shifted(0, stored(mine, tile.k0, tile.k1).start - tile.k0) for tile in own
    )
    in_stages = laid_out([*held, *came], size(mine), Stage(shifted))
    return laid_out(sorted([*held, *came]), 0, in_stages=in_stages)


def _cut(keys: Layout, owner: int, ranges: Ranges) -> Iterator[_Found]:
    before = 0
    for span in keys.spans(owner):
        for start, stop in ranges:
            first, last = max(start, before), min(stop, before + span.count)
            if first < last:
                yield Span(span.start + first - before, last - first), owner, first
        before += span.count


def _posts(
    pieces: Sequence[Piece],
    rank: int,
    sent: Iterable[tuple[int, list[_Found]]],
    owners: Iterable[int],
) -> tuple[Post, ...]:
    """Pair what is sent and received hop by hop, and cut that into posts.

    However ranks cut, none waits for ever: a message's two sides are of one hop, and all earlier ones have ended.
    """
    held: dict[int, list[Piece]] = {}
    for piece in pieces:
        held.setdefault(piece.owner, []).append(piece)
    pairs: list[tuple[Stretch | None, Stretch | None]] = []
    for (peer, found), owner in zip(sent, owners, strict=True):
        there = [
            Stretch(peer, _place(held[rank], start), span.count)
            for span, _, start in found
        ]
        here = [
            Stretch(owner, piece.place, piece.stop - piece.start)
            for piece in held.get(owner, ())
        ]
        pairs += zip_longest(there, here)
    cuts = (
        pairs[first : first + MOST_MESSAGES // 2]
        for first in range(0, len(pairs), MOST_MESSAGES // 2)
    )
    return tuple(
        (tuple(a for a, _ in cut if a), tuple(b for _, b in cut if b)) for cut in cuts
    )


def _place(mine: Iterable[Piece], start: int) -> int:
    return next(
        piece.place + start - piece.start
        for piece in mine
        if piece.start <= start < piece.stop
    )
