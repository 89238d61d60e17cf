"""All keys that a rank's rows see, in one stretch by position: each row is computed once, without merges."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.meetings import bands_between
from ringspan.core.geometry.ranges import Ranges
from ringspan.core.geometry.tile import Tile


class Piece(NamedTuple):
    """An owner's stored tokens [start, stop), laid out from ``place`` on."""

    owner: int
    start: int
    stop: int
    place: int

    @property
    def places(self) -> slice:
        """Return their places."""
        return slice(self.place, self.place + self.stop - self.start)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The keys of one rank's rows, and its queries' bands against them; compared by identity."""

    pieces: tuple[Piece, ...]
    bands: tuple[Tile, ...]

    @property
    def num_keys(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @cached_property
    def num_pairs(self) -> int:
        return sum(band.num_pairs for band in self.bands)

    def of(self, owner: int) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.owner == owner)


def gather(layout: Layout, keys: Layout, mask: Mask, rank: int, held: Iterable[tuple[int, Ranges]]) -> Gathered | None:
    """Lay out what a rank holds of each owner; None for stripes, whose positions do not continue."""
    found: list[tuple[Span, int, int]] = []
    for owner, ranges in held:
        stored = 0
        for span in keys.spans(owner):
            if span.step != 1 and span.count > 1:
                return None
            for start, stop in ranges:
                first, last = max(start, stored), min(stop, stored + span.count)
                if first < last:
                    found.append((Span(span.start + first - stored, last - first), owner, first))
            stored += span.count
    found.sort()
    pieces, spans, place = list[Piece](), list[Span](), 0
    for span, owner, start in found:
        pieces.append(Piece(owner, start, start + span.count, place))
        place += span.count
        if spans and spans[-1].start + spans[-1].count == span.start:
            spans[-1] = Span(spans[-1].start, spans[-1].count + span.count)
        else:
            spans.append(span)
    regions = mask.table(layout.length, keys.length)
    (bands,) = bands_between(layout.spans(rank), [tuple(spans)], [0], regions, passes_queries=False)
    return Gathered(tuple(pieces), bands)
