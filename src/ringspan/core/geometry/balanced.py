"""A layout for a mask: equal tokens and equal work per rank, and as little as possible to send.

Documents (``Stretches``) go to ranks whole where they fit, and are cut where balance needs it. They are placed from the
most work per token to the least. What counts of a rank is its excess: the work that it lacks beyond what it would get
if all its free tokens were filled with the average of the documents still to come.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import FORMS, Mask, documents
from ringspan.core.geometry.pairs import IntArray, Stretches, stretches
from ringspan.core.messages.numbers import described, integer, is_a
from ringspan.core.names import BATCH_LAYOUT_NAMES, BatchLayoutName, find_name

CHUNK_TOKENS: Final = 128  # below, kernels lose more than balance gains
_TOLERANCE: Final = 0.005  # of a rank's mean work
_LARGE: Final = 0.02  # of a rank's mean work: what is less is levelled out by what comes
_OVER_FOR_ONE_CHUNK: Final = 0.02  # of a rank's mean work that one chunk may be above two, which are sent to more ranks
_CANDIDATES: Final = 64  # ways to split a rank's part of a long document into an early and a late chunk

FloatArray = NDArray[np.floating]


def balanced(mask: Mask, *, length: int, ranks: int, chunk_tokens: int = CHUNK_TOKENS) -> CustomLayout:
    """The layout over ``ranks`` ranks that balances this mask on a sequence of ``length`` tokens.

    Every rank holds ``ceil(length / ranks)`` tokens, the last few of some ranks padding. Deterministic: a function of
    its arguments alone, so that all ranks find the same. For balance a document is cut into no more chunks than have
    ``chunk_tokens`` each on average; where it does not fit, as many tokens of it as there is room for may be fewer.

    Raises:
        LayoutError: a length, a number of ranks or a size of chunks below one.
    """
    if not is_a(mask, Mask):
        raise LayoutError(f"a balanced layout needs a mask, got {described(mask)}; {FORMS}")
    numbers = {"length": length, "ranks": ranks, "chunk_tokens": chunk_tokens}
    for name, value in numbers.items():
        numbers[name] = integer(value, name, LayoutError)
        if numbers[name] < 1:
            raise LayoutError(f"a balanced layout needs {name} of at least 1, got {value}")
    return _balanced(mask, *numbers.values())


def batch_layout(name: BatchLayoutName, length: int, ranks: int, documents_of: Sequence[int] | None = None) -> Layout:
    """The layout of sequences of ``length`` tokens that are these documents, or one: a named one, or for ``balanced``
    that of their mask.

    Raises:
        LayoutError: there is no such layout.
    """
    if not is_a(name, str):
        raise LayoutError(f"a layout's name must be one of {', '.join(BATCH_LAYOUT_NAMES)}, got {described(name)}")
    if find_name("layout", name, BATCH_LAYOUT_NAMES, LayoutError) != "balanced":
        return Layout(name, length, ranks)  # pyright: ignore[reportArgumentType]
    return balanced(documents(documents_of or (length,)), length=sum(documents_of or (length,)), ranks=ranks)


@lru_cache(maxsize=256)  # of all sequences of a batch
def _balanced(mask: Mask, length: int, ranks: int, chunk_tokens: int) -> CustomLayout:
    placing = _Placing(stretches(mask, length), length, ranks, chunk_tokens)
    placing.place_all()
    return placing.layout()


class _Placing:
    """Documents on ranks, one after the other."""

    def __init__(self, cut: Stretches, length: int, ranks: int, chunk_tokens: int) -> None:
        self.cut, self.length, self.ranks, self.chunk_tokens = cut, length, ranks, chunk_tokens
        self.mean = float(cut.pairs.sum()) / ranks
        self.slack = _TOLERANCE * self.mean
        self.free: IntArray = np.full(ranks, -(-length // ranks), np.int64)
        self.lacking: FloatArray = np.full(ranks, self.mean)
        self.numbers = np.arange(1, ranks + 1)
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        tokens = cut.stops - cut.starts
        self.order = np.lexsort((cut.starts, -tokens, -cut.pairs / tokens))
        # The least work that so many tokens of the last documents can be.
        self.least_tokens = np.concatenate(([0.0], tokens[self.order][::-1].cumsum()))
        self.least_pairs = np.concatenate(([0.0], cut.pairs[self.order][::-1].cumsum()))

    def place_all(self) -> None:
        tokens = (self.cut.stops - self.cut.starts)[self.order]
        pairs = self.cut.pairs[self.order]
        rest = len(self.order) - 1 - np.arange(len(self.order))
        densities = self.least_pairs[rest] / np.maximum(self.least_tokens[rest], 1)
        is_large = pairs - densities * tokens > _LARGE * self.mean
        large = int(np.flatnonzero(is_large).max(initial=-1)) + 1
        self._place_large(self.order[:large].tolist(), densities[:large].tolist())
        for first in range(large, len(self.order), self.ranks):
            self._place_small(self.order[first : first + self.ranks], float(densities[first]))

    def _place_large(self, documents: list[int], densities: list[float]) -> None:
        """Documents that are much of a rank's work: whole if what comes can then still balance all ranks.

        What can be balanced after some documents can be before the last of them. So ever more are placed at a time,
        and fewer again where that fails.
        """
        done, together = 0, 1
        while done < len(documents):
            if together == 1:
                is_balanced = self._place(documents[done], densities[done])
                done, together = done + 1, 2 if is_balanced else 1
                continue
            before = self.free.copy(), self.lacking.copy()
            some = slice(done, done + together)
            placed = list(self._placed_whole(documents[some], densities[some]))
            if placed and self._missing(self.free, self.lacking) <= self.slack:
                for rank, run in placed:
                    self.runs[rank].append(run)
                done, together = done + len(placed), 2 * together
            else:
                self.free, self.lacking = before
                together = max(1, len(placed) // 2)

    def _placed_whole(self, documents: list[int], densities: list[float]) -> Iterator[tuple[int, tuple[int, int]]]:
        """A rank for each document and its run there, as long as they fit: the one with the largest excess."""
        starts, stops, pairs = (of[documents].tolist() for of in (self.cut.starts, self.cut.stops, self.cut.pairs))
        for start, stop, work, density in zip(starts, stops, pairs, densities, strict=True):
            tokens = stop - start
            rank = int(np.where(self.free >= tokens, self.lacking - density * self.free, -np.inf).argmax())
            if self.free[rank] < tokens:
                return
            self.free[rank] -= tokens
            self.lacking[rank] -= work
            yield rank, (start, tokens)

    def _place(self, stretch: int, density: float) -> bool:
        """A document that is much of a rank's work: whole on one rank if the others can then still be balanced by what
        comes, which is returned, else over the fewest ranks for which that holds.
        """
        start, stop, pairs = (int(of[stretch]) for of in (self.cut.starts, self.cut.stops, self.cut.pairs))
        tokens, excess = stop - start, self.lacking - density * self.free
        fits = self.free >= tokens
        best, above = -1, np.inf  # the rank that would have all of it, and how much work that would leave to no rank
        if fits.any():
            best = int(np.where(fits, excess, -np.inf).argmax())
            above = self._missing_after(np.array([best]), np.array([tokens]), np.array([float(pairs)]))
            if above <= self.slack:
                self._take(best, start, tokens, pairs)
                return True
        wanted = pairs - density * tokens
        able = np.flatnonzero(self.free > 0)
        able = able[np.lexsort((able, -self.free[able], -excess[able]))]
        fewest = max(2, int((self.free[able].cumsum() >= tokens).argmax()) + 1)
        able = able[: max(fewest, tokens // (2 * self.chunk_tokens))]  # two chunks each
        widest = self._shared(tokens, wanted, density, excess, able)
        bound = max(self.slack, self._missing_after(*widest) + self.slack / 4)
        if above <= bound:
            self._take(best, start, tokens, pairs)
            return False
        # Double the ranks until they are enough, then halve the step.
        low, high = fewest - 1, min(fewest, len(able))
        found = widest
        while high < len(able):
            found = self._shared(tokens, wanted, density, excess, able[:high])
            if self._missing_after(*found) <= bound:
                break
            low, high, found = high, min(2 * high, len(able)), widest
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._shared(tokens, wanted, density, excess, able[:middle])
            if self._missing_after(*tried) <= bound:
                high, found = middle, tried
            else:
                low = middle
        self._cut(stretch, *found)
        return False

    def _shared(
        self, tokens: int, wanted: float, density: float, excess: FloatArray, ranks: IntArray
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens and work of a document for each of some ranks, by their excess."""
        shares = np.maximum(excess[ranks], 0.0)
        shares = shares / shares.sum() if shares.any() else np.full(len(ranks), 1 / len(ranks))
        counts = _split(tokens, shares, self.free[ranks])
        return ranks, counts, density * counts + wanted * shares

    def _missing_after(self, ranks: IntArray, tokens: IntArray, work: FloatArray) -> float:
        """``_missing`` after these ranks took so many tokens and so much work."""
        free, lacking = self.free.copy(), self.lacking.copy()
        free[ranks] -= tokens
        lacking[ranks] -= work
        return self._missing(free, lacking)

    def _missing(self, free: IntArray, lacking: FloatArray) -> float:
        """By how much work ranks would be above the mean if documents still to come could be cut at will: the ranks
        that need the least work per token get the least there is.
        """
        needed = np.where(free > 0, lacking / np.maximum(free, 1), np.where(lacking < 0, -np.inf, np.inf))
        order = np.argsort(needed, kind="stable")
        least = np.interp(free[order].cumsum(), self.least_tokens, self.least_pairs)
        return float(((least - lacking[order].cumsum()) / self.numbers).max())

    def _place_small(self, documents: IntArray, density: float) -> None:
        """Each document to the rank with the largest excess that has room for it."""
        starts, stops, pairs = (of[documents].tolist() for of in (self.cut.starts, self.cut.stops, self.cut.pairs))
        excess, heap = self._ranked(density)
        # There are thousands of them, and Python reads one number at a time faster from a list than from an array.
        free, lacking, excesses = (of.tolist() for of in (self.free, self.lacking, excess))
        for stretch, start, stop, work in zip(documents.tolist(), starts, stops, pairs, strict=True):
            tokens = stop - start
            while -heap[0][0] != excesses[heap[0][1]]:  # what it said of a rank holds no longer
                heappop(heap)
            rank = heap[0][1]
            if free[rank] < tokens:
                rank = int(np.where(self.free >= tokens, excess, -np.inf).argmax())
            if free[rank] < tokens:
                self.lacking[:] = lacking
                self._fill(stretch)
                excess, heap = self._ranked(density)
                free, lacking, excesses = (of.tolist() for of in (self.free, self.lacking, excess))
                continue
            self.runs[rank].append((start, tokens))
            lacking[rank] -= work
            self.free[rank] = free[rank] = free[rank] - tokens
            excess[rank] = excesses[rank] = excesses[rank] - (work - density * tokens)
            place = heapreplace if rank == heap[0][1] else heappush
            place(heap, (-excesses[rank], rank))
        self.lacking[:] = lacking

    def _ranked(self, density: float) -> tuple[FloatArray, list[tuple[float, int]]]:
        """The excess of each rank, and a heap of (minus its excess, rank)."""
        excess = self.lacking - density * self.free
        heap = [(-each, rank) for rank, each in enumerate(excess.tolist())]
        heapify(heap)
        return excess, heap

    def _fill(self, stretch: int) -> None:
        """A document with little work that fits nowhere: runs of it, to the ranks with the most room."""
        start, stop = int(self.cut.starts[stretch]), int(self.cut.stops[stretch])
        ranks = np.argsort(-self.free, kind="stable")
        edges = np.concatenate(([start], np.minimum(start + self.free[ranks].cumsum(), stop)))
        ranks, edges = ranks[: (number := int(edges.searchsorted(stop)))], edges[: number + 1]
        pairs = np.diff(self.cut.before(stretch, edges))
        for rank, first, count, work in zip(
            ranks.tolist(), edges.tolist(), np.diff(edges).tolist(), pairs.tolist(), strict=False
        ):
            self._take(rank, first, count, work)

    def _take(self, rank: int, start: int, count: int, pairs: int) -> None:
        if count:
            self.runs[rank].append((start, count))
        self.free[rank] -= count
        self.lacking[rank] -= pairs

    def _cut(self, stretch: int, ranks: IntArray, counts: IntArray, work: FloatArray) -> None:
        """Give each rank its tokens of a document: an early chunk, which sees little, and a late one, which sees much,
        so that they are the work that they should be; or one chunk where that is no more, as under a window.
        """
        start, stop = int(self.cut.starts[stretch]), int(self.cut.stops[stretch])
        edges = start + np.concatenate(([0], counts.cumsum()))
        in_order = np.diff(self.cut.before(stretch, edges))
        if (in_order - work).max() <= _OVER_FOR_ONE_CHUNK * self.mean:
            for rank, first, count, pairs in zip(ranks, edges, counts, in_order, strict=False):
                self._take(int(rank), int(first), int(count), int(pairs))
            return
        for rank, count, wanted in zip(ranks.tolist(), counts.tolist(), work.tolist(), strict=True):
            if not count:
                continue
            steps = min(count, _CANDIDATES)
            early = np.arange(steps + 1, dtype=np.int64) * count // steps
            edges = self.cut.before(stretch, np.concatenate((start + early, stop - count + early, [start, stop])))
            early_pairs, late_pairs = edges[: len(early)] - edges[-2], edges[-1] - edges[len(early) : -2]
            best = int(np.abs(early_pairs + late_pairs - wanted).argmin())
            first = int(early[best])
            self._take(rank, start, first, int(early_pairs[best]))
            self._take(rank, stop - (count - first), count - first, int(late_pairs[best]))
            start, stop = start + first, stop - (count - first)

    def layout(self) -> CustomLayout:
        padding = self.length
        parts: list[list[tuple[int, int]]] = []
        for runs, free in zip(self.runs, self.free.tolist(), strict=True):
            joined: list[tuple[int, int]] = []
            end = -1
            for start, count in sorted(runs):
                if start == end:
                    joined[-1] = (joined[-1][0], joined[-1][1] + count)
                else:
                    joined.append((start, count))
                end = start + count
            if free:
                joined.append((padding, free))
                padding += free
            parts.append(joined)
        return CustomLayout.of(parts, self.length)


def _split(tokens: int, shares: FloatArray, free: IntArray) -> IntArray:
    """Whole numbers in proportion to the shares, none above what is free, that add up to ``tokens``."""
    counts = np.zeros(len(shares), np.int64)
    left = tokens
    weights = np.where(shares > 0, shares, 1e-9 * max(1.0, float(shares.max(initial=0.0))))
    while left:
        room = free - counts
        active = np.where(room > 0, weights, 0.0)
        ideal = active / active.sum() * left
        add = np.minimum(np.floor(ideal).astype(np.int64), room)
        if not add.any():  # fewer are left than ranks: one each, to the largest remainders
            for rank in np.lexsort((np.arange(len(ideal)), -ideal)).tolist():
                if left and room[rank]:
                    counts[rank] += 1
                    left -= 1
            continue
        counts += add
        left -= int(add.sum())
    return counts
