"""Each of N ranks' positions of a growing cached sequence: many new tokens in zigzag, few to the emptiest ranks."""

from collections.abc import Iterable
from typing import Final

from ringspan.core.geometry.layout import CustomLayout

# Tokens written to one rank in a row: shares differ by at most this number, and runs stay few.
BLOCK_TOKENS: Final = 64

Runs = tuple[tuple[int, int], ...]  # (start, count) of consecutive positions, in order


class Shares:
    """Each rank's runs of positions 0 to ``length - 1``, in increasing order."""

    def __init__(self, ranks: int) -> None:
        self.length = 0
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        # The rank being written to, and the tokens that are left of its block.
        self._writer, self._left = (
            0,
            0,
        )

    @property
    def ranks(self) -> int:
        return len(self._runs)

    def counts(self, first: int = 0) -> tuple[int, ...]:
        return tuple(
            sum(count for _, count in runs_from(runs, first)) for runs in self._runs
        )

    def split(self, count: int) -> CustomLayout:
        """Split ``count`` new positions, at least two per rank, over all ranks; return their layout."""
        pieces = 2 * self.ranks
        assert count >= pieces, "a piece of every rank has a token"
        counts = self.counts()
        fewest = sorted(range(self.ranks), key=lambda rank: (counts[rank], rank))
        # The remainder goes to the ranks that hold least, so that shares stay level over many steps.
        extra = set(
            [*fewest, *(pieces - 1 - rank for rank in fewest)][: count % pieces]
        )
        new: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        start = self.length
        for piece in range(pieces):
            size = count // pieces + (piece in extra)
            new[min(piece, pieces - 1 - piece)].append((start, size))
            start += size
        return self._appended(new)

    def deal(self, count: int) -> CustomLayout:
        """Deal ``count`` new positions in blocks to the ranks that hold least; return their layout."""
        counts = list(self.counts())
        new: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        start, end = self.length, self.length + count
        while start < end:
            if not self._left:
                self._writer, self._left = counts.index(min(counts)), BLOCK_TOKENS
            size = min(self._left, end - start)
            new[self._writer].append((start, size))
            counts[self._writer] += size
            self._left -= size
            start += size
        return self._appended(new)

    def crop(self, length: int) -> None:
        self._runs = [
            [
                (start, min(count, length - start))
                for start, count in runs
                if start < length
            ]
            for runs in self._runs
        ]
        self.length, self._left = min(self.length, length), 0

    def held(self, first: int = 0) -> CustomLayout:
        """Return positions from ``first`` on; an empty rank holds one of padding, as some models need a token."""
        held = (list(runs_from(runs, first)) for runs in self._runs)
        return CustomLayout.of(
            (runs or [(self.length + rank, 1)] for rank, runs in enumerate(held)),
            self.length,
        )

    def runs(self) -> tuple[Runs, ...]:
        return tuple(map(tuple, self._runs))

    def _appended(self, new: list[list[tuple[int, int]]]) -> CustomLayout:
        self._runs = [
            list(_joined(old + added))
            for old, added in zip(self._runs, new, strict=True)
        ]
        self.length = max(start + count for runs in new for start, count in runs)
        return CustomLayout.of(map(_joined, new))


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, count in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((start, count))
    return tuple(joined)


def runs_from(runs: Iterable[tuple[int, int]], first: int) -> Iterable[tuple[int, int]]:
    for start, count in runs:
        if start + count > first:
            yield max(start, first), start + count - max(start, first)
