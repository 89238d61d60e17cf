"""Sets of indices as sorted, disjoint, non-touching half-open ranges."""

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(
        one for ranges in sets for one in ranges if one[0] < one[1]
    ):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def minus(a: Ranges, b: Ranges) -> Ranges:
    """Return the indices of ``a`` that are not in ``b``."""
    rest: list[tuple[int, int]] = []
    for start, stop in a:
        for cut_start, cut_stop in b:
            if cut_stop <= start or stop <= cut_start:
                continue
            rest.append((start, cut_start))
            start = cut_stop
        rest.append((start, stop))
    return union(rest)


def size(ranges: Ranges) -> int:
    total = 0
    for start, stop in ranges:
        total += stop - start
    return total


def stored(ranges: Ranges, start: int, stop: int) -> slice:
    """Return the place of [start, stop), a part of one range, if the ranges are packed one after the other."""
    packed = 0
    for first, last in ranges:
        if first <= start < last:
            return slice(packed + start - first, packed + stop - first)
        packed += last - first
    raise AssertionError(f"index {start} is not in {ranges}")
