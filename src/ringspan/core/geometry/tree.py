"""Masks of segments that continue others, such as answers to one prompt."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from ringspan.core.errors import MaskError
from ringspan.core.geometry.mask import UNBOUNDED, Mask, Region, documents
from ringspan.core.geometry.ranges import Ranges, union
from ringspan.core.messages.numbers import described, integer, is_a


def tree(
    lengths: Iterable[int], parents: Iterable[int], *, window: int | None = None
) -> Mask:
    """Let a token see its own segment up to itself, and all segments that it continues.

    Segment i has ``lengths[i]`` tokens, stored after segment i - 1, and continues the earlier one ``parents[i]``; -1
    begins a document. A prompt with three answers is ``tree([30_000, 700, 900, 800], [-1, 0, 0, 0])``. Depth-first
    order has the fewest regions. With ``window`` a token sees that number of its branch's last tokens, itself included.

    Raises:
        MaskError: as ``documents``; another number of parents, or a parent that is not an earlier segment.
    """
    if is_a(parents, str) or not hasattr(parents, "__iter__"):
        raise MaskError(
            f"parents must be a list of segments such as [-1, 0, 0], got {described(parents)}"
        )
    lengths, parents = (
        [*lengths] if hasattr(lengths, "__iter__") else lengths,
        [*parents],
    )
    plain = documents(lengths, window=window)
    parents = [integer(parent, "a parent", MaskError) for parent in parents]
    if len(parents) != len(plain.regions):
        raise MaskError(
            f"{len(parents)} parents for {len(plain.regions)} segments; give one each, -1 for none"
        )
    for number, parent in enumerate(parents):
        if not -1 <= parent < number:
            raise MaskError(
                f"segment {number} continues segment {parent}; give an earlier one, or -1 for none"
            )
    segments = _Segments(
        np.cumsum([0, *(region.q1 - region.q0 for region in plain.regions)]).tolist(),
        parents,
    )
    shared = segments.shared() if window is None else segments.shared_within(window)
    regions = (*segments.own(UNBOUNDED if window is None else window - 1), *shared)
    return Mask(
        regions,
        f"tree of {len(parents)} segments" + (f" & window:{window}" if window else ""),
    )


class Tree(NamedTuple):
    """Lengths and parents of a tree's segments, as ``tree`` takes them."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """Positions of the segments' first tokens in their branches."""
        return _branch_starts(self.lengths, self.parents)

    @property
    def longest(self) -> int:
        """Tokens of the longest branch."""
        return max(
            start + length
            for start, length in zip(self.starts, self.lengths, strict=True)
        )

    @property
    def leaves(self) -> list[int]:
        """Numbers of branches that run through each segment."""
        counts = [0] * len(self.parents)
        for number in reversed(range(len(counts))):
            counts[number] = counts[number] or 1
            if self.parents[number] >= 0:
                counts[self.parents[number]] += counts[number]
        return counts

    def positions(self, length: int) -> np.ndarray:
        """Return each token's position in its branch; padding up to ``length`` counts on from the last."""
        moved = np.array(self.starts) - np.cumsum([0, *self.lengths[:-1]])
        moved = np.repeat(moved, self.lengths)
        return np.arange(length) + np.pad(moved, (0, length - len(moved)), mode="edge")

    def before(self) -> np.ndarray:
        """Return the place of the token before each one in its branch; -1 before the first."""
        places, ends = np.arange(-1, sum(self.lengths) - 1), np.cumsum(self.lengths)
        for length, parent, end in zip(self.lengths, self.parents, ends, strict=True):
            places[end - length] = ends[parent] - 1 if parent >= 0 else -1
        return places

    def mask(self, window: int | None = None, chunk: int | None = None) -> Mask:
        """Return the mask, with a window, or in chunks of ``chunk`` branch positions that no query sees beyond."""
        return tree(*(self if chunk is None else self._in_chunks(chunk)), window=window)

    def _in_chunks(self, chunk: int) -> "Tree":
        """Cut segments where chunks begin; within a chunk a piece continues its parent's last one."""
        lengths: list[int] = []
        parents: list[int] = []
        last: list[int] = []
        for length, parent, start in zip(
            self.lengths, self.parents, self.starts, strict=True
        ):
            before = last[parent] if start % chunk else -1
            for first in (
                start,
                *range(start + chunk - start % chunk, start + length, chunk),
            ):
                lengths.append(
                    min(start + length, first + chunk - first % chunk) - first
                )
                parents.append(before)
                before = -1
            last.append(len(lengths) - 1)
        return Tree(tuple(lengths), tuple(parents))


def _branch_starts(lengths: Iterable[int], parents: Iterable[int]) -> list[int]:
    starts: list[int] = []
    stops: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        starts.append(stops[parent] if parent >= 0 else 0)
        stops.append(starts[-1] + length)
    return starts


class _Segments:
    """Segments, stored from ``ends[i]`` to ``ends[i + 1]``; a run is a chain stored in one piece: a causal region."""

    def __init__(self, ends: list[int], parents: list[int]) -> None:
        self.ends, self.parents = ends, parents
        # The first segment of each segment's run.
        self.first = [0] * len(parents)
        for number, parent in enumerate(parents):
            self.first[number] = (
                self.first[parent] if number and parent == number - 1 else number
            )
        self.runs = [
            [*run]
            for _, run in groupby(range(len(parents)), key=self.first.__getitem__)
        ]

    def own(self, hi: int) -> Iterator[Region]:
        """Yield each run's causal region with itself, with at most ``hi`` tokens back."""
        for run in self.runs:
            start, stop = self.ends[run[0]], self.ends[run[-1] + 1]
            yield Region(start, stop, start, stop, 0, hi)

    def shared(self) -> Iterator[Region]:
        """Yield the regions of segments (keys) and the later runs that continue them (queries)."""
        last = {run[0]: run[-1] for run in self.runs}
        # For each segment the ranges of later tokens, in other runs, that see it.
        later: list[list[tuple[int, int]]] = [[] for _ in self.parents]
        seen: list[Ranges] = [()] * len(self.parents)
        for number in reversed(range(len(self.parents))):
            seen[number], parent = union(later[number]), self.parents[number]
            if parent >= 0:
                later[parent] += seen[number]
                if number == self.first[number]:
                    later[parent].append(
                        (self.ends[number], self.ends[last[number] + 1])
                    )
        for run in self.runs:
            for rows, same in groupby(run, key=seen.__getitem__):
                keys = [*same]
                for start, stop in rows:
                    yield Region(
                        start, stop, self.ends[keys[0]], self.ends[keys[-1] + 1]
                    )

    def shared_within(self, window: int) -> Iterator[Region]:
        """Yield each run's region with the runs that it continues, as far back as the window reaches.

        A branch's tokens are not adjacent in storage. Between two runs the distance in storage exceeds that on the
        branch by a constant c (``behind``), so ``window - 1`` tokens back become ``q - k <= window - 1 + c``.
        """
        place = _branch_starts(np.diff(self.ends).tolist(), self.parents)
        for run in self.runs:
            start, stop, parent = (
                self.ends[run[0]],
                self.ends[run[-1] + 1],
                self.parents[run[0]],
            )
            while parent >= 0:
                first = self.first[parent]
                behind = (start - place[run[0]]) - (self.ends[first] - place[first])
                region = Region(
                    start,
                    stop,
                    self.ends[first],
                    self.ends[parent + 1],
                    hi=window - 1 + behind,
                )
                if region.is_empty:
                    break
                yield region
                parent = self.parents[first]


class Shared(NamedTuple):
    """Rows as the branches of a tree."""

    tree: Tree
    tokens: np.ndarray  # all segments, one after the other
    places: list[np.ndarray]  # places of each row's tokens in ``tokens``


def shared_prefixes(rows: Sequence[np.ndarray], least: int) -> Shared:
    """Store the shared beginnings of rows of tokens once, if that saves ``least`` tokens or more of a row.

    Every row ends in a segment of its own, of a token at least: equal rows differ in their last segment. Segments are
    stored depth first.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes())
    common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    lengths: list[int] = []
    parents: list[int] = []
    parts: list[np.ndarray] = []
    before: list[np.ndarray] = []  # places of each segment's branch
    places = [np.zeros(0, np.int64)] * len(rows)
    # Ranges of the sorted rows that share a beginning, and the segment that they continue.
    todo = [(0, len(order), -1)]
    while todo:
        first, stop, parent = todo.pop()
        row = rows[order[first]]
        shared = min(common[first : stop - 1], default=len(row))
        branch = before[parent] if parent >= 0 else np.zeros(0, np.int64)
        start = len(branch)
        if stop - first == 1 or shared - start >= least:
            place = sum(lengths)
            before.append(
                np.concatenate((branch, np.arange(place, place + shared - start)))
            )
            lengths.append(shared - start)
            parents.append(parent)
            parts.append(row[start:shared])
            parent = len(lengths) - 1
        if stop - first == 1:
            places[order[first]] = before[parent]
        else:
            cuts = [
                number + 1
                for number in range(first, stop - 1)
                if common[number] == shared
            ]
            todo += [
                (*ends, parent) for ends in reversed([*pairwise((first, *cuts, stop))])
            ]
    return Shared(Tree(tuple(lengths), tuple(parents)), np.concatenate(parts), places)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of two rows' shared beginning, without the last token of each."""
    length = min(len(one), len(other)) - 1
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
