"""Spans (consecutive tokens of one rank) in order of position, cut at documents, which begin with a state of 0."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import Layout


class Place(NamedTuple):
    """A span: its rank, number and first token in the rank's storage, and positions."""

    rank: int
    place: int
    offset: int
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


class Piece(NamedTuple):
    """Consecutive tokens of one document from an offset in a span; ``begins`` if the document's first is among them."""

    offset: int
    tokens: int
    begins: bool


def places_of(layout: Layout) -> tuple[Place, ...]:
    places: list[Place] = []
    for rank in range(layout.ranks):
        offset = 0
        for index, span in enumerate(layout.spans(rank)):
            if span.step != 1 and span.count > 1:
                raise LayoutError(
                    f"layout {layout.name!r} gives each rank every {span.step}-th token, and a layer with a recurrent "
                    "state or a convolution needs consecutive ones; use zigzag or contiguous"
                )
            places.append(Place(rank, index, offset, span.start, span.count))
            offset += span.count
    return tuple(sorted(places, key=lambda place: place.start))


def pieces_of(place: Place, starts: Sequence[int]) -> tuple[Piece, ...]:
    """Return a span's pieces; ``starts`` of documents increase from 0."""
    inside = starts[bisect_right(starts, place.start) : bisect_left(starts, place.end)]
    cuts = [place.start, *inside, place.end]
    begins = [begins_at(place.start, starts), *(True for _ in inside)]
    return tuple(
        Piece(cut - place.start, following - cut, is_first)
        for cut, following, is_first in zip(cuts, cuts[1:], begins, strict=False)
    )


def begins_at(position: int, starts: Sequence[int]) -> bool:
    found = bisect_left(starts, position)
    return found < len(starts) and starts[found] == position


def continues(places: Sequence[Place], number: int, starts: Sequence[int]) -> bool:
    """Return whether a span takes the state of the span before."""
    return number > 0 and not begins_at(places[number].start, starts)


def passes(places: Sequence[Place], number: int, starts: Sequence[int]) -> bool:
    """Return whether a span hands on the state that it takes: no document begins in it."""
    return continues(places, number, starts) and len(pieces_of(places[number], starts)) == 1


class Links(NamedTuple):
    """Each span's flags, by position, for any sequence of a batch: ``takes`` (it ``continues``) and ``passes``."""

    takes: tuple[bool, ...]
    passes: tuple[bool, ...]

    @property
    def reverse(self) -> "Links":
        """Return the links of state gradients, from the last span to the first."""
        behind = (*self.takes[1:], False)
        return Links(behind[::-1], self.passes[::-1])


def links_of(places: Sequence[Place], starts_of_rows: Sequence[Sequence[int]]) -> Links:
    numbers = range(len(places))
    return Links(
        tuple(any(continues(places, number, starts) for starts in starts_of_rows) for number in numbers),
        tuple(any(passes(places, number, starts) for starts in starts_of_rows) for number in numbers),
    )
