"""The scan of spans' affine maps ``A_j S + B_j``, as rounds of messages between spans.

Span j + 1 takes the state ``B_j + A_j (B_{j-1} + A_{j-1} ...)``, span j's prefix. A chain passes on each prefix once
ready, a round per span; over more spans, rounds are logarithmic (Hillis and Steele 1986) and messages have the map too.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from ringspan.core.recurrence.spans import Links

CHAIN_SPANS: Final = 8
"""Up to so many spans, as few bytes as possible; beyond, few rounds."""


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
        spans = last - first  # those whose prefixes somebody needs, all but the last
        steps = _chain(first, last) if spans <= chain_spans else _doubling(first, spans)
        for number, message in steps:
            rounds.setdefault(number, []).append(message)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def _runs(links: Links) -> Iterator[tuple[int, int]]:
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
    for number, span in enumerate(range(first, last)):
        is_prefix_needed = span + 1 < last
        yield number, Message(span, span + 1, has_map=False, composes=is_prefix_needed, is_state=True)


def _doubling(first: int, spans: int) -> Iterator[tuple[int, Message]]:
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
                    first + source, first + span, has_map=not is_whole, composes=True, is_state=is_whole and reach == 1
                ),
            )
        number, reach = number + 1, 2 * reach
    for span in range(1, spans + 1):
        if span not in delivered:
            yield number, Message(first + span - 1, first + span, has_map=False, composes=False, is_state=True)
