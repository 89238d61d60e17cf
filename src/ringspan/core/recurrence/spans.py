"""Spans (consecutive tokens of one rank) in order of position, cut at documents, which begin with a state of 0.

Which span needs whose state (rounds of messages), and which inputs of a convolution (loans); of a tree of segments, a
span takes the state of the one before it on its branch.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.tree import Tree

# Up to this number of spans a chain sends the fewest bytes; beyond, doubling takes fewer rounds.
CHAIN_SPANS: Final = 8


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
    return (
        continues(places, number, starts)
        and len(pieces_of(places[number], starts)) == 1
    )


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
        tuple(
            any(continues(places, number, starts) for starts in starts_of_rows)
            for number in numbers
        ),
        tuple(
            any(passes(places, number, starts) for starts in starts_of_rows)
            for number in numbers
        ),
    )


class Message(NamedTuple):
    """Message between spans: with the map A too (``has_map``), before the target's map (``composes``), as its state."""

    source: int
    target: int
    has_map: bool
    composes: bool
    is_state: bool


Rounds = tuple[tuple[Message, ...], ...]


def scan_rounds(links: Links, *, chain_spans: int = CHAIN_SPANS) -> Rounds:
    """Return rounds that give each span its state. A round sends the values before it."""
    # Spans are in the order of the state's path; one that does not pass states on has A = 0.
    rounds: dict[int, list[Message]] = {}
    for first, last in _runs(links):
        # The last span only receives: no span needs its prefix.
        spans = last - first
        steps = _chain(first, last) if spans <= chain_spans else _doubling(first, spans)
        for number, message in steps:
            rounds.setdefault(number, []).append(message)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def _runs(links: Links) -> Iterator[tuple[int, int]]:
    """Yield each run (first, last) of spans through which a state passes, from the one that starts it to its end."""
    first = 0
    for span in range(1, len(links.takes) + 1):
        takes = span < len(links.takes) and links.takes[span]
        if takes and links.passes[span]:
            continue
        last = span if takes else span - 1
        if last > first:
            yield first, last
        first = span


def _chain(first: int, last: int) -> Iterator[tuple[int, Message]]:
    """Yield (round, message): each span sends its state to the next, one span per round."""
    for number, span in enumerate(range(first, last)):
        is_prefix_needed = span + 1 < last
        yield (
            number,
            Message(
                span, span + 1, has_map=False, composes=is_prefix_needed, is_state=True
            ),
        )


def _doubling(first: int, spans: int) -> Iterator[tuple[int, Message]]:
    """Yield (round, message) of a parallel prefix: 1, 2, 4, ... spans ahead, then every prefix one span on.

    In round r a span receives what the span 2^r before it has, and composes it before its own map: afterwards it covers
    2^(r+1) spans, or all from the first. Four spans 0 to 3 and the last, 4: 0>1 1>2 2>3, then 0>2 1>3, then 1>2 2>3
    3>4. Span 1 takes its state from span 0 in round 0, so the last round leaves it out.
    """
    delivered: set[int] = set()
    number, reach = 0, 1
    while reach < spans:
        for span in range(reach, spans):
            source = span - reach
            is_whole = source < reach
            if is_whole and reach == 1:
                delivered.add(span)
            yield (
                number,
                Message(
                    first + source,
                    first + span,
                    has_map=not is_whole,
                    composes=True,
                    is_state=is_whole and reach == 1,
                ),
            )
        number, reach = number + 1, 2 * reach
    for span in range(1, spans + 1):
        if span not in delivered:
            yield (
                number,
                Message(
                    first + span - 1,
                    first + span,
                    has_map=False,
                    composes=False,
                    is_state=True,
                ),
            )


class Loan(NamedTuple):
    """``tokens`` inputs of a span from ``offset`` on, at ``place`` in another span's halo."""

    source: int
    offset: int
    target: int
    place: int
    tokens: int


def reach_back(
    places: Sequence[Place], number: int, width: int, starts: Sequence[int]
) -> int:
    """Count the ``width`` inputs before a span that belong to its first token's document."""
    lowest = starts[bisect_right(starts, places[number].start) - 1]
    found = 0
    while number and found < width and places[number - 1].end > lowest:
        number -= 1
        found += places[number].end - max(places[number].start, lowest)
    return min(found, width)


def halo_loans(
    places: Sequence[Place], width: int, starts_of_rows: Sequence[Sequence[int]]
) -> tuple[Loan, ...]:
    """Return the owners of the ``width`` inputs before each span, by target and position."""
    # A span borrows as far back as any sequence of the batch needs.
    loans: list[Loan] = []
    for target in range(len(places)):
        left = max(
            reach_back(places, target, width, starts) for starts in starts_of_rows
        )
        source, place, mine = target, width, list[Loan]()
        while left:
            source -= 1
            count = min(left, places[source].tokens)
            place, left = place - count, left - count
            mine.append(
                Loan(source, places[source].tokens - count, target, place, count)
            )
        loans += mine[::-1]
    return tuple(loans)


def branches_of(
    layout: Layout, tree: Tree
) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    """Return the cut spans, and the number of the one before each on its branch, -1 before the first."""
    # Padding belongs to the last segment.
    begins = [*accumulate(tree.lengths[:-1], initial=0)]
    last: dict[int, int] = {-1: -1}  # the last span so far of each segment
    places: list[Place] = []
    before: list[int] = []
    for place in places_of(layout):
        for offset, tokens, is_first in pieces_of(place, begins):
            start = place.start + offset
            segment = bisect_right(begins, start) - 1
            before.append(last[tree.parents[segment] if is_first else segment])
            last[segment] = len(places)
            places.append(
                place._replace(offset=place.offset + offset, start=start, tokens=tokens)
            )
    return tuple(places), tuple(before)


def branch_rounds(before: Sequence[int], *, reverse: bool = False) -> Rounds:
    """Return a round for each link of the longest branch; in ``reverse`` spans are numbered from the last one."""
    edges = [(source, target) for target, source in enumerate(before) if source >= 0]
    if reverse:
        last = len(before) - 1
        edges = [(last - target, last - source) for source, target in reversed(edges)]
    sources = {source for source, _ in edges}
    rounds: defaultdict[int, list[Message]] = defaultdict(list)
    # The round in which a span has all that it passes on.
    level: defaultdict[int, int] = defaultdict(int)
    for source, target in edges:
        rounds[level[source]].append(
            Message(source, target, False, target in sources, True)
        )
        level[target] = max(level[target], level[source] + 1)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def branch_loans(
    places: Sequence[Place], before: Sequence[int], width: int
) -> Iterator[Loan]:
    """Yield the owners of the ``width`` inputs before each span on its branch, the nearest first."""
    for target, source in enumerate(before):
        left = width
        while left and source >= 0:
            tokens = places[source].tokens
            count = min(left, tokens)
            left -= count
            yield Loan(source, tokens - count, target, left, count)
            source = before[source]
