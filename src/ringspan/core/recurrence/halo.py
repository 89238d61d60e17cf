"""Halos of a causal convolution of K taps: the K - 1 inputs before a span, in its document."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ringspan.core.recurrence.spans import Place


class Loan(NamedTuple):
    """``tokens`` inputs of a span from ``offset`` on, at ``place`` in another span's halo."""

    source: int
    offset: int
    target: int
    place: int
    tokens: int


def reach_back(places: Sequence[Place], number: int, width: int, starts: Sequence[int]) -> int:
    """Count the ``width`` inputs before a span that belong to its first token's document."""
    lowest = starts[bisect_right(starts, places[number].start) - 1]
    found = 0
    while number and found < width and places[number - 1].end > lowest:
        number -= 1
        found += places[number].end - max(places[number].start, lowest)
    return min(found, width)


def halo_loans(places: Sequence[Place], width: int, starts_of_rows: Sequence[Sequence[int]]) -> tuple[Loan, ...]:
    """Return the owners of the ``width`` inputs before each span, by target and position."""
    # As far back as any sequence of the batch needs them; spans are in the order of their positions.
    loans: list[Loan] = []
    for target in range(len(places)):
        left = max(reach_back(places, target, width, starts) for starts in starts_of_rows)
        source, place, mine = target, width, list[Loan]()
        while left:
            source -= 1
            count = min(left, places[source].tokens)
            place, left = place - count, left - count
            mine.append(Loan(source, places[source].tokens - count, target, place, count))
        loans += mine[::-1]
    return tuple(loans)
