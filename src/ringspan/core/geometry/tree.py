"""Masks of segments that continue others, such as answers to one prompt."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from ringspan.core.errors import MaskError
from ringspan.core.geometry.mask import UNBOUNDED, Mask, Region, documents
from ringspan.core.geometry.ranges import Ranges, union
from ringspan.core.messages.numbers import described, integer, is_a


def tree(lengths: Iterable[int], parents: Iterable[int], *, window: int | None = None) -> Mask:
    """Let a token see its own segment up to itself, and all segments that it continues.

    Segment i has ``lengths[i]`` tokens, stored after segment i - 1, and continues the earlier one ``parents[i]``; -1
    begins a document. A prompt with three answers is ``tree([30_000, 700, 900, 800], [-1, 0, 0, 0])``. Depth-first
    order has the fewest regions. With ``window`` a token sees that number of its branch's last tokens, itself included.

    Raises:
        MaskError: as ``documents``; another number of parents, or a parent that is not an earlier segment.
    """
    if is_a(parents, str) or not hasattr(parents, "__iter__"):
        raise MaskError(f"parents must be a list of segments such as [-1, 0, 0], got {described(parents)}")
    lengths, parents = [*lengths] if hasattr(lengths, "__iter__") else lengths, [*parents]
    plain = documents(lengths, window=window)
    parents = [integer(parent, "a parent", MaskError) for parent in parents]
    if len(parents) != len(plain.regions):
        raise MaskError(f"{len(parents)} parents for {len(plain.regions)} segments; give one each, -1 for none")
    for number, parent in enumerate(parents):
        if not -1 <= parent < number:
            raise MaskError(f"segment {number} continues segment {parent}; give an earlier one, or -1 for none")
    segments = _Segments(np.cumsum([0, *(region.q1 - region.q0 for region in plain.regions)]).tolist(), parents)
    shared = segments.shared() if window is None else segments.shared_within(window)
    regions = (*segments.own(UNBOUNDED if window is None else window - 1), *shared)
    return Mask(regions, f"tree of {len(parents)} segments" + (f" & window:{window}" if window else ""))


class _Segments:
    """Segments by their end in storage; a run is a stored chain of segments: one causal region."""

    def __init__(self, ends: list[int], parents: list[int]) -> None:
        self.ends, self.parents = ends, parents
        self.first = [0] * len(parents)  # of each segment's run
        for number, parent in enumerate(parents):
            self.first[number] = self.first[parent] if number and parent == number - 1 else number
        self.runs = [[*run] for _, run in groupby(range(len(parents)), key=self.first.__getitem__)]

    def own(self, hi: int) -> Iterator[Region]:
        for run in self.runs:
            start, stop = self.ends[run[0]], self.ends[run[-1] + 1]
            yield Region(start, stop, start, stop, 0, hi)

    def shared(self) -> Iterator[Region]:
        """Yield the tokens of runs that branch off against what they continue."""
        last = {run[0]: run[-1] for run in self.runs}
        later: list[list[tuple[int, int]]] = [[] for _ in self.parents]  # tokens of other runs that see a segment
        seen: list[Ranges] = [()] * len(self.parents)
        for number in reversed(range(len(self.parents))):
            seen[number], parent = union(later[number]), self.parents[number]
            if parent >= 0:
                later[parent] += seen[number]
                if number == self.first[number]:
                    later[parent].append((self.ends[number], self.ends[last[number] + 1]))
        for run in self.runs:
            for rows, same in groupby(run, key=seen.__getitem__):
                keys = [*same]
                for start, stop in rows:
                    yield Region(start, stop, self.ends[keys[0]], self.ends[keys[-1] + 1])

    def shared_within(self, window: int) -> Iterator[Region]:
        place = [0] * len(self.parents)  # of a segment's first token in its branch
        for number, parent in enumerate(self.parents):
            if parent >= 0:
                place[number] = place[parent] + self.ends[parent + 1] - self.ends[parent]
        for run in self.runs:
            start, stop, parent = self.ends[run[0]], self.ends[run[-1] + 1], self.parents[run[0]]
            while parent >= 0:
                first = self.first[parent]
                behind = (start - place[run[0]]) - (self.ends[first] - place[first])
                region = Region(start, stop, self.ends[first], self.ends[parent + 1], hi=window - 1 + behind)
                if region.is_empty:
                    break
                yield region
                parent = self.parents[first]
