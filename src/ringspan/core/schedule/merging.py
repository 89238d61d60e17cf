"""Times at which partials of the same rows are merged: rarely, so that each row is written once."""

from bisect import bisect_left
from functools import lru_cache
from typing import Final, NamedTuple

from ringspan.core.geometry.ranges import Ranges

MAX_WAITING: Final = 5
"""Results whose rows may wait; beyond, they are added up in a float32 sum, as large as two 16-bit results."""


class Segment(NamedTuple):
    start: int
    stop: int
    # Numbers of the partials, in order of arrival.
    partials: tuple[int, ...]


def is_full(num_waiting: int, rows: int) -> bool:
    """Return True if partials of ``num_waiting`` rows, for a result of ``rows`` rows, wait no longer."""
    return num_waiting > MAX_WAITING * rows


@lru_cache(maxsize=1024)
def segments(waiting: Ranges, rows: int) -> tuple[Segment, ...]:
    """Cut a result's rows where the partials that cover them change."""
    ends = sorted({0, rows}.union(*waiting))
    covering: list[list[int]] = [[] for _ in ends[1:]]
    for number, (start, stop) in enumerate(waiting):
        for place in range(bisect_left(ends, start), bisect_left(ends, stop)):
            covering[place].append(number)
    return tuple(
        Segment(ends[place], ends[place + 1], tuple(numbers))
        for place, numbers in enumerate(covering)
    )
