"""Spans over a tree of segments: cut where segments begin, each takes the state of the one before on its branch."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.tree import Tree
from ringspan.core.recurrence.halo import Loan
from ringspan.core.recurrence.scan import Message, Rounds
from ringspan.core.recurrence.spans import Place, pieces_of, places_of


def branches_of(layout: Layout, tree: Tree) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    """Return the cut spans, and the number of the one before each on its branch, -1 before the first."""
    begins = [*accumulate(tree.lengths[:-1], initial=0)]  # padding belongs to the last segment
    last: dict[int, int] = {-1: -1}  # span of each segment
    places: list[Place] = []
    before: list[int] = []
    for place in places_of(layout):
        for offset, tokens, is_first in pieces_of(place, begins):
            start = place.start + offset
            segment = bisect_right(begins, start) - 1
            before.append(last[tree.parents[segment] if is_first else segment])
            last[segment] = len(places)
            places.append(place._replace(offset=place.offset + offset, start=start, tokens=tokens))
    return tuple(places), tuple(before)


def branch_rounds(before: Sequence[int], *, reverse: bool = False) -> Rounds:
    """Return a round for each link of the longest branch; in ``reverse`` spans are numbered from the last one."""
    edges = [(source, target) for target, source in enumerate(before) if source >= 0]
    if reverse:
        last = len(before) - 1
        edges = [(last - target, last - source) for source, target in reversed(edges)]
    sources = {source for source, _ in edges}
    rounds: defaultdict[int, list[Message]] = defaultdict(list)
    level: defaultdict[int, int] = defaultdict(int)  # round in which a span has all that it passes on
    for source, target in edges:
        rounds[level[source]].append(Message(source, target, False, target in sources, True))
        level[target] = max(level[target], level[source] + 1)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def branch_loans(places: Sequence[Place], before: Sequence[int], width: int) -> Iterator[Loan]:
    """Yield the owners of the ``width`` inputs before each span on its branch, the nearest first."""
    for target, source in enumerate(before):
        left = width
        while left and source >= 0:
            tokens = places[source].tokens
            count = min(left, tokens)
            left -= count
            yield Loan(source, tokens - count, target, left, count)
            source = before[source]
