"""Layouts that balance a mask: equal tokens and work per rank, and little to send."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.folds import check_folds, folded_layout
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import FORMS, Mask, documents
from ringspan.core.geometry.pairs import IntArray, Stretches, stretches
from ringspan.core.geometry.tree import Tree
from ringspan.core.messages.numbers import described, integer, is_a
from ringspan.core.names import BATCH_LAYOUT_NAMES, BatchLayoutName, find_name

# Kernels lose more on smaller chunks than balance gains.
CHUNK_TOKENS: Final = 128
# A placement is good enough if the busiest rank has at most this share of the mean work above the mean.
_EVEN: Final = 0.03
# Tolerances shrink to this factor at least: below, far more is sent for hardly better balance.
_LEAST_LEEWAY: Final = 0.25
# Ways that are tried to split a rank's part of a long document into an early and a late chunk.
_CANDIDATES: Final = 64
_SWEEPS: Final = 4  # at most, over all cut documents
# The next three are shares of the mean work of a rank.
# Work that may be left to no rank, so that fewer documents are cut.
_TOLERANCE: Final = 0.005
# A document with less excess work than this is levelled out by those that follow.
_LARGE: Final = 0.02
# One chunk may have this much more work than two, which would be sent to more ranks.
_OVER_FOR_ONE_CHUNK: Final = 0.02
# The next two are shares of the tolerance: how much of it one document may use up.
_MORE_FOR_NO_CUT: Final = 1 / 16  # to stay whole
_MORE_FOR_FEWER_RANKS: Final = 1 / 4  # to go to fewer ranks than it could

FloatArray = NDArray[np.floating]


def balanced(
    mask: Mask, *, length: int, ranks: int, chunk_tokens: int = CHUNK_TOKENS
) -> CustomLayout:
    """Return a layout with equal tokens, and equal work under the mask, for every rank; deterministic.

    Chunks have ``chunk_tokens`` or more on average, fewer if cut for lack of room.

    Raises:
        LayoutError: a length, a number of ranks or a size of chunks below one.
    """
    if not is_a(mask, Mask):
        raise LayoutError(
            f"a balanced layout needs a mask, got {described(mask)}; {FORMS}"
        )
    numbers = {"length": length, "ranks": ranks, "chunk_tokens": chunk_tokens}
    for name, value in numbers.items():
        numbers[name] = integer(value, name, LayoutError, at_least=1)
    return _balanced(mask, *numbers.values())


def batch_layout(
    name: BatchLayoutName,
    length: int,
    ranks: int,
    documents_of: Sequence[int] | Tree | None = None,
    folds: int = 1,
) -> Layout:
    """Return the named layout, or the ``balanced`` one for these documents (default: one) or this tree."""
    if not is_a(name, str):
        raise LayoutError(
            f"a layout's name must be one of {', '.join(BATCH_LAYOUT_NAMES)}, got {described(name)}"
        )
    known = find_name("layout", name, BATCH_LAYOUT_NAMES, LayoutError)
    if folds != 1:
        # A bound on the work: more folds than tokens would only add padding.
        check_folds(name, folds)
        if folds > max(1, length):
            raise LayoutError(
                f"folds={folds}: the sequence has {length} tokens; use at most as many folds"
            )
        return folded_layout(name, length, ranks, folds)
    if known != "balanced":
        return Layout(name, length, ranks)  # pyright: ignore[reportArgumentType]
    if isinstance(documents_of, Tree):
        return balanced(
            documents_of.mask(), length=sum(documents_of.lengths), ranks=ranks
        )
    return balanced(
        documents(documents_of or (length,)),
        length=sum(documents_of or (length,)),
        ranks=ranks,
    )


@lru_cache(maxsize=256)  # enough for the sequences of a batch
def _balanced(mask: Mask, length: int, ranks: int, chunk_tokens: int) -> CustomLayout:
    """Place documents with ever smaller tolerances until the busiest rank is near the mean; return the best layout.

    A large tolerance cuts few documents, so that little is sent; a small one balances better.
    """
    cut, leeway = stretches(mask, length), 1.0
    found: list[Placing] = []
    while leeway >= _LEAST_LEEWAY:
        found.append(Placing(cut, length, ranks, chunk_tokens, leeway))
        found[-1].place_all()
        above = found[-1].most_above / _EVEN
        if above <= found[-1].mean:
            break
        leeway /= 2 if above <= 1.5 * found[-1].mean else 4
    return min(found, key=lambda each: each.most_above).layout()


@dataclass
class Cut:
    """A document on several ranks, and each rank's number of its tokens."""

    stretch: int
    ranks: IntArray
    counts: IntArray
    pairs: IntArray
    chunks: list[tuple[int, int, int]]  # rank, start, count


def cut_in_order(
    some: Stretches, stretch: int, ranks: IntArray, counts: IntArray
) -> Cut:
    """Cut a document into one chunk per rank, in the order of ``ranks``, with ``counts`` tokens each."""
    edges = some.starts[stretch] + np.concatenate(([0], counts.cumsum()))
    pairs = np.diff(some.before(stretch, edges))
    return Cut(
        stretch,
        ranks,
        counts,
        pairs,
        list(zip(ranks.tolist(), edges.tolist(), counts.tolist(), strict=False)),
    )


def cut_by_work(
    some: Stretches,
    stretch: int,
    ranks: IntArray,
    counts: IntArray,
    wanted: FloatArray,
    above: float,
) -> Cut:
    """Cut an early and a late chunk per rank, with little and much work, that sum to the wanted work.

    Chunks are taken from both ends inwards: for three ranks the document is cut into 0 1 2 2 1 0. Under a causal mask a
    later chunk sees more, so moving tokens from a rank's early chunk to its late one adds work at the same count.
    """
    # One chunk is enough if it has at most ``above`` too much work, as under a window, whose work is even.
    in_order = cut_in_order(some, stretch, ranks, counts)
    if (in_order.pairs - wanted).max() <= above:
        return in_order
    start, stop = int(some.starts[stretch]), int(some.stops[stretch])
    pairs: list[int] = []
    chunks: list[tuple[int, int, int]] = []
    for rank, count, work in zip(
        ranks.tolist(), counts.tolist(), wanted.tolist(), strict=True
    ):
        steps = min(count, _CANDIDATES)
        early = np.arange(steps + 1, dtype=np.int64) * count // steps
        edges = some.before(
            stretch,
            np.concatenate((start + early, stop - count + early, [start, stop])),
        )
        both = edges[: len(early)] - edges[-2] + edges[-1] - edges[len(early) : -2]
        best = int(np.abs(both - work).argmin())
        first = int(early[best])
        pairs.append(int(both[best]))
        chunks += [(rank, start, first), (rank, stop - (count - first), count - first)]
        start, stop = start + first, stop - (count - first)
    return Cut(
        stretch, ranks, counts, np.array(pairs), [chunk for chunk in chunks if chunk[2]]
    )


def level(
    some: Stretches,
    cuts: list[Cut],
    lacking: FloatArray,
    above: float,
    above_in_order: float,
) -> None:
    """Exchange early and late chunks to relieve ranks with ``above`` too much work; update ``cuts`` and ``lacking``."""
    for _ in range(_SWEEPS):
        is_changed = False
        for index, old in enumerate(cuts):
            before = lacking[old.ranks]
            if -before.min() <= above or before.mean() - before.min() <= above / 4:
                continue
            wanted = old.pairs + before - before.mean()
            new = cut_by_work(
                some, old.stretch, old.ranks, old.counts, wanted, above_in_order
            )
            after = before + old.pairs - new.pairs
            if after.min() > before.min():
                lacking[old.ranks] = after
                cuts[index], is_changed = new, True
        if not is_changed:
            return


class Placing:
    """Documents placed one after the other onto ranks with equal room, within a tolerance of the mean work."""

    def __init__(
        self, some: Stretches, length: int, ranks: int, chunk_tokens: int, leeway: float
    ) -> None:
        """Set up a placement: each rank has room for its share of the tokens and lacks the mean work.

        ``free``: tokens that each rank has room for. ``lacking``: work that each rank is below the mean; negative above
        it. ``order``: documents (stretches) by work per token, densest first; those to come always have less work per
        token. ``least_pairs`` over ``least_tokens``: the least work that the last n tokens of that order can have, as a
        curve.
        """
        self.some, self.length, self.ranks, self.chunk_tokens = (
            some,
            length,
            ranks,
            chunk_tokens,
        )
        self.mean = float(some.pairs.sum()) / ranks
        self.slack, self.large, self.over = (
            leeway * each * self.mean
            for each in (_TOLERANCE, _LARGE, _OVER_FOR_ONE_CHUNK)
        )
        self.free: IntArray = np.full(ranks, -(-length // ranks), np.int64)
        self.lacking: FloatArray = np.full(ranks, self.mean)
        self.numbers = np.arange(1, ranks + 1)
        self.tokens = some.stops - some.starts
        self.order = np.lexsort((some.starts, -self.tokens, -some.pairs / self.tokens))
        self.least_tokens = np.concatenate(
            ([0.0], self.tokens[self.order][::-1].cumsum())
        )
        self.least_pairs = np.concatenate(
            ([0.0], some.pairs[self.order][::-1].cumsum())
        )
        self.missing = 0.0  # ``_missing`` after the documents placed so far
        # Rank of each document that stays whole, else -1.
        self.home: IntArray = np.full(len(self.tokens), -1)
        self.cuts: list[Cut] = []

    @property
    def most_above(self) -> float:
        """The busiest rank's work above the mean."""
        return -float(self.lacking.min())

    def place_all(self) -> None:
        """Place the large documents, which may be cut, then the small ones by ``ranks`` at a time, and level the cuts.

        A document is large if its work exceeds by more than ``large`` the work that its number of tokens has in the
        documents after it: these cannot even it out.
        """
        tokens, pairs = self.tokens[self.order], self.some.pairs[self.order]
        rest = len(self.order) - 1 - np.arange(len(self.order))
        densities = self.least_pairs[rest] / np.maximum(self.least_tokens[rest], 1)
        large = (
            int(np.flatnonzero(pairs - densities * tokens > self.large).max(initial=-1))
            + 1
        )
        self._place_large(self.order[:large], densities[:large].tolist())
        for first in range(large, len(self.order), self.ranks):
            self._place_small(
                self.order[first : first + self.ranks], float(densities[first])
            )
        level(self.some, self.cuts, self.lacking, self.slack, self.over)

    def _place_large(self, documents: IntArray, densities: list[float]) -> None:
        """Place large documents, densest first: whole if the others can still be balanced, else cut.

        Whole documents are tried 2, 4, 8, ... at a time, which asks for the balance once; after a failure the ranks are
        restored and fewer are tried, down to one, which ``_place`` may cut.
        """
        # Placing one more can only worsen the bound, so if it holds after several, it held after each.
        done, together = 0, 1
        while done < len(documents):
            if together == 1:
                together = (
                    2 if self._place(int(documents[done]), densities[done]) else 1
                )
                done += 1
                continue
            before = self.free.copy(), self.lacking.copy()
            some = slice(done, done + together)
            homes = self._homes(documents[some], densities[some])
            missing = self._missing(self.free, self.lacking)
            if homes and missing <= self._bound(self.missing, _MORE_FOR_NO_CUT):
                self.home[documents[done : done + len(homes)]] = homes
                self.missing = missing
                done, together = done + len(homes), 2 * together
            else:
                self.free, self.lacking = before
                together = max(1, len(homes) // 2)

    def _bound(self, missing: float, more: float) -> float:
        """Return the work that may stay unplaced, given ``missing`` and the slack to come."""
        return max(self.slack, missing + more * self.slack)

    def _homes(self, documents: IntArray, densities: list[float]) -> list[int]:
        """Put documents whole on the rank with room and the largest excess work; return the ranks.

        A rank's excess is the work that it lacks beyond what its free tokens would have at ``density``, the mean work
        per token of the documents to come. Stops at the first document that no rank has room for.
        """
        homes: list[int] = []
        tokens, pairs = (
            self.tokens[documents].tolist(),
            self.some.pairs[documents].tolist(),
        )
        for count, work, density in zip(tokens, pairs, densities, strict=True):
            rank = int(
                np.where(
                    self.free >= count, self.lacking - density * self.free, -np.inf
                ).argmax()
            )
            if self.free[rank] < count:
                break
            self.free[rank] -= count
            self.lacking[rank] -= work
            homes.append(rank)
        return homes

    def _place(self, stretch: int, density: float) -> bool:
        """Place a document whole if the rest can balance it (True), else over the fewest ranks."""
        tokens, pairs = int(self.tokens[stretch]), int(self.some.pairs[stretch])
        excess = self.lacking - density * self.free
        fits = self.free >= tokens
        # The rank that would take the whole document, and the work that would then be left to no rank.
        best, above = (
            -1,
            np.inf,
        )
        if fits.any():
            best = int(np.where(fits, excess, -np.inf).argmax())
            above = self._missing_after(
                np.array([best]), np.array([tokens]), np.array([float(pairs)])
            )
            if above <= self._bound(self.missing, _MORE_FOR_NO_CUT):
                self._take_whole(stretch, best, above)
                return True
        wanted = pairs - density * tokens
        able = np.flatnonzero(self.free > 0)
        able = able[np.lexsort((able, -self.free[able], -excess[able]))]
        fewest = max(2, int((self.free[able].cumsum() >= tokens).argmax()) + 1)
        able = able[: max(fewest, tokens // (2 * self.chunk_tokens))]  # two chunks each
        widest = self._shared(tokens, wanted, density, excess, able)
        bound = self._bound(self._missing_after(*widest), _MORE_FOR_FEWER_RANKS)
        if above <= bound:
            self._take_whole(stretch, best, above)
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
        self._take_cut(stretch, *found)
        return False

    def _shared(
        self,
        tokens: int,
        wanted: float,
        density: float,
        excess: FloatArray,
        ranks: IntArray,
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Share a document among ranks in proportion to their excess; return the ranks, tokens and expected work.

        ``wanted`` is the document's work beyond ``density`` per token: a rank gets ``density`` per token, and a share
        of it.
        """
        shares = np.maximum(excess[ranks], 0.0)
        shares += max(0.0, wanted - float(shares.sum())) / len(ranks)
        shares = (
            shares / shares.sum()
            if shares.any()
            else np.full(len(ranks), 1 / len(ranks))
        )
        counts = _split(tokens, shares, self.free[ranks])
        return ranks, counts, density * counts + wanted * shares

    def _missing_after(
        self, ranks: IntArray, tokens: IntArray, work: FloatArray
    ) -> float:
        """Return ``_missing`` if these ranks took these tokens with this work."""
        free, lacking = self.free.copy(), self.lacking.copy()
        free[ranks] -= tokens
        lacking[ranks] -= work
        return self._missing(free, lacking)

    def _missing(self, free: IntArray, lacking: FloatArray) -> float:
        """Return how far some rank must end above the mean, even if the documents to come could be cut at will.

        Ranks that need the least work per free token get too much first. Any n of them have room for some number of
        tokens, which have at least the work that the curve ``least_pairs`` gives: what they do not lack of it, over n,
        is too much.
        """
        needed = np.where(
            free > 0,
            lacking / np.maximum(free, 1),
            np.where(lacking < 0, -np.inf, np.inf),
        )
        order = np.argsort(needed, kind="stable")
        least = np.interp(free[order].cumsum(), self.least_tokens, self.least_pairs)
        return float(((least - lacking[order].cumsum()) / self.numbers).max())

    def _take_whole(self, stretch: int, rank: int, missing: float) -> None:
        self.home[stretch] = rank
        self.free[rank] -= self.tokens[stretch]
        self.lacking[rank] -= self.some.pairs[stretch]
        self.missing = missing

    def _take_cut(
        self, stretch: int, ranks: IntArray, counts: IntArray, work: FloatArray
    ) -> None:
        held = counts > 0
        cut = cut_by_work(
            self.some, stretch, ranks[held], counts[held], work[held], self.over
        )
        self.cuts.append(cut)
        self.free[cut.ranks] -= cut.counts
        self.lacking[cut.ranks] -= cut.pairs
        self.missing = self._missing(self.free, self.lacking)

    def _place_small(self, documents: IntArray, density: float) -> None:
        """Put small documents whole on the rank with the largest excess, see ``_homes``; cut those that fit on no rank.

        The ranks wait in a heap with the largest excess on top. An entry whose excess has changed since is dropped.
        """
        excess = self.lacking - density * self.free
        # There may be thousands of documents, and Python reads single numbers faster from a list than from an array.
        free, lacking = self.free.tolist(), self.lacking.tolist()
        excesses: list[float] = excess.tolist()
        heap = [(-each, rank) for rank, each in enumerate(excesses)]
        heapify(heap)
        tokens, pairs = (
            self.tokens[documents].tolist(),
            self.some.pairs[documents].tolist(),
        )
        for stretch, count, work in zip(documents.tolist(), tokens, pairs, strict=True):
            # Drop entries whose excess has changed since.
            while -heap[0][0] != excesses[heap[0][1]]:
                heappop(heap)
            rank = heap[0][1]
            if free[rank] < count:
                rank = int(np.where(self.free >= count, excess, -np.inf).argmax())
            if free[rank] < count:
                self.cuts.append(cut := self._fill(stretch))
                taken = zip(
                    cut.ranks.tolist(),
                    cut.counts.tolist(),
                    cut.pairs.tolist(),
                    strict=True,
                )
            else:
                self.home[stretch] = rank
                taken = ((rank, count, work),)
            for one, number, some in taken:
                lacking[one] -= some
                self.free[one] = free[one] = free[one] - number
                excess[one] = excesses[one] = excesses[one] - (some - density * number)
                (heapreplace if one == heap[0][1] else heappush)(
                    heap, (-excesses[one], one)
                )
        self.lacking[:] = lacking

    def _fill(self, stretch: int) -> Cut:
        """Cut a document over the ranks with most room, each filled in turn."""
        ranks = np.argsort(-self.free, kind="stable")
        filled = self.free[ranks].cumsum()
        tokens = int(self.tokens[stretch])
        ranks = ranks[: int(filled.searchsorted(tokens)) + 1]
        counts = np.diff(np.minimum(filled[: len(ranks)], tokens), prepend=0)
        return cut_in_order(self.some, stretch, ranks, counts)

    def layout(self) -> CustomLayout:
        """Return the layout: whole documents, chunks of cut ones and padding, as runs in order of rank and position.

        Adjacent runs of a rank are joined. Padding gets the positions from ``length`` on, rank by rank.
        """
        whole = np.flatnonzero(self.home >= 0)
        runs = np.concatenate(
            [
                np.stack(
                    (self.home[whole], self.some.starts[whole], self.tokens[whole]), 1
                ),
                *(np.array(cut.chunks, np.int64) for cut in self.cuts),
                # Padding fills the room that is left.
                np.stack(
                    (
                        self.numbers - 1,
                        self.length + self.free.cumsum() - self.free,
                        self.free,
                    ),
                    1,
                ),
            ]
        )
        runs = runs[runs[:, 2] > 0]
        ranks, starts, counts = runs[np.lexsort((runs[:, 1], runs[:, 0]))].T
        # Join runs of a rank that touch, but keep padding apart.
        is_first = (
            (ranks[1:] != ranks[:-1])
            | (starts[1:] != starts[:-1] + counts[:-1])
            | (starts[1:] == self.length)
        )
        firsts = np.flatnonzero(np.concatenate(([True], is_first)))
        joined = list(
            zip(
                starts[firsts].tolist(),
                np.add.reduceat(counts, firsts).tolist(),
                strict=True,
            )
        )
        edges = np.searchsorted(ranks[firsts], np.arange(self.ranks + 1)).tolist()
        return CustomLayout.of((joined[a:b] for a, b in pairwise(edges)), self.length)


def _split(tokens: int, shares: FloatArray, free: IntArray) -> IntArray:
    """Split ``tokens`` in proportion to the shares, each at most what is free."""
    counts = np.zeros(len(shares), np.int64)
    left = tokens
    weights = np.where(
        shares > 0, shares, 1e-9 * max(1.0, float(shares.max(initial=0.0)))
    )
    while left:
        room = free - counts
        active = np.where(room > 0, weights, 0.0)
        ideal = active / active.sum() * left
        # If fewer tokens are left than ranks, the largest remainders get one each.
        add = np.minimum(np.floor(ideal).astype(np.int64), room)
        if not add.any():
            for rank in np.lexsort((np.arange(len(ideal)), -ideal)).tolist():
                if left and room[rank]:
                    counts[rank] += 1
                    left -= 1
            continue
        counts += add
        left -= int(add.sum())
    return counts
