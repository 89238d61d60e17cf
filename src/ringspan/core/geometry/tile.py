"""Region x query span x key span -> tile, in local indices; every mask on every layout is tiles.

A query span (start a, step s) and a key span (start b, same step) meet a region ``lo <= q - k <= hi``. With ``q = a + s
i`` and ``k = b + s j``: ``ceil((lo - (a - b)) / s) <= i - j <= floor((hi - (a - b)) / s)``. For example, causal on two
stripes, queries 0, 2, 4 against keys 1, 3, 5: ``i - j >= ceil((0 - (0 - 1)) / 2) = 1``, so query 2 sees key 1.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


# A named tuple, since masks may have thousands and a data class is slow to construct and to hash.
class Tile(NamedTuple):
    """Rows [q0, q1) of one rank's queries x columns [k0, k1) of one rank's keys, with a band.

    Row i and column j, from the tile's corner, are allowed when ``lo <= i - j <= hi``. Every row sees a key and every
    key is seen; a loose bound has the value at which it just does not bind.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int

    @staticmethod
    def full(q0: int, q1: int, k0: int, k1: int) -> "Tile":
        return Tile(q0, q1, k0, k1, -(k1 - k0 - 1), q1 - q0 - 1)

    @property
    def num_rows(self) -> int:
        return self.q1 - self.q0

    @property
    def num_keys(self) -> int:
        return self.k1 - self.k0

    @property
    def has_lower(self) -> bool:
        """Some key is too late for some row (the causal side)."""
        return self.lo > 1 - self.num_keys

    @property
    def has_upper(self) -> bool:
        """Some key is too far back for some row (the window side)."""
        return self.hi < self.num_rows - 1

    @property
    def is_full(self) -> bool:
        return not self.has_lower and not self.has_upper

    @property
    def is_causal(self) -> bool:
        """Row i sees exactly columns ``j <= i``."""
        return self.lo == 0 and self.has_lower and not self.has_upper

    @property
    def num_pairs(self) -> int:
        """Allowed (row, column) pairs."""
        return self._pairs_from(self.lo) - self._pairs_from(self.hi + 1)

    def _pairs_from(self, bound: int) -> int:
        """Count pairs with ``i - j >= bound``: row i has clip(i - bound + 1, 0, num_keys) of them."""
        rows, keys = self.num_rows, self.num_keys
        first = min(max(bound, 0), rows)  # earlier rows see nothing
        # From this row on, rows see every key.
        saturated = min(max(bound + keys - 1, first), rows)
        ramp = saturated - first
        return (
            ramp * (first - bound + 1)
            + ramp * (ramp - 1) // 2
            + (rows - saturated) * keys
        )

    @property
    def is_anticausal(self) -> bool:
        """A mirrored causal tile: the last row sees only the last column, each row before it one more."""
        # ``mirrored(num_rows, num_keys).is_causal``, without a tile in between: kernels ask it for each launch.
        corner = self.num_rows - self.num_keys
        reaches_back = corner - self.lo >= self.num_rows - 1
        return self.hi == corner and self.num_keys > 1 and reaches_back

    def shifted(self, rows: int, keys: int) -> "Tile":
        return Tile(
            self.q0 + rows,
            self.q1 + rows,
            self.k0 + keys,
            self.k1 + keys,
            self.lo,
            self.hi,
        )

    def mirrored(self, num_rows: int, num_keys: int) -> "Tile":
        """Return the tile with rows and columns counted from the rectangle's ends."""
        corner = self.num_rows - self.num_keys
        return Tile(
            num_rows - self.q1,
            num_rows - self.q0,
            num_keys - self.k1,
            num_keys - self.k0,
            corner - self.hi,
            corner - self.lo,
        )

    def split(self) -> Iterator["Tile"]:
        """Yield the same pairs as tiles that flash kernels run: FULL, causal, or anticausal (causal when mirrored).

        One bound: at most a FULL rectangle and a causal or anticausal tile. A band of width w: one of each per w rows.
        """
        if self.is_full or self.is_causal or self.is_anticausal:
            yield self
        elif not self.has_upper:
            middle = self.k0 - self.lo
            yield Tile.full(self.q0, self.q1, self.k0, middle)
            yield Tile(self.q0, self.q1, middle, self.k1, 0, self.num_rows - 1)
        elif not self.has_lower:
            here = self.shifted(-self.q0, -self.k0)
            for piece in here.mirrored(self.num_rows, self.num_keys).split():
                yield piece.mirrored(self.num_rows, self.num_keys).shifted(
                    self.q0, self.k0
                )
        else:
            for piece in self._split_band():
                yield from piece.shifted(self.q0, self.k0).split()

    def _split_band(self) -> Iterator["Tile"]:
        """Split into pieces, counted from the corner, so that one bound binds in each."""
        width = self.hi - self.lo + 1
        for first in range(0, self.num_rows, width):
            rows = first, min(first + width, self.num_rows)
            # The first key that row ``first`` sees; before keys + width no row sees too far ahead.
            keys = first - self.hi
            for k0, k1 in ((keys, keys + width), (keys + width, rows[1] - self.lo)):
                piece = cut(*rows, max(k0, 0), min(k1, self.num_keys), self.lo, self.hi)
                if piece is not None:
                    yield piece


def cut(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Tile | None:
    """Return the part of a rectangle with ``lo <= i - j <= hi``, trimmed; None if empty."""
    # First cut off rows out of reach of every key, then keys out of reach of every remaining row.
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    k0, k1 = max(k0, q0 - hi), min(k1, q1 - lo)
    if q0 >= q1 or k0 >= k1:
        return None
    # The bounds move with the corner. Those that do not bind get one value, so that equal tiles are equal.
    rows, columns = q1 - q0, k1 - k0
    return Tile(
        q0, q1, k0, k1, max(lo - q0 + k0, 1 - columns), min(hi - q0 + k0, rows - 1)
    )


def meet(
    q_start: NDArray[np.int64] | int, q_count: NDArray[np.int64] | int, k_start: NDArray[np.int64] | int,
    k_count: NDArray[np.int64] | int, step: int, regions: NDArray[np.int64],
) -> NDArray[np.int64]:  # fmt: skip
    """Return where spans meet regions; arguments broadcast, ``regions`` has ``Mask.table``'s columns first."""
    # Span-local i0, i1, j0, j1 with absolute bounds lo, hi; rows that see no key and keys that no row sees are cut off.
    # An empty meeting has ``i1 <= i0``.
    q0, q1, k0, k1, low, high = regions
    offset = np.subtract(q_start, k_start)
    lo, hi = -((offset - low) // step), (high - offset) // step  # ceil and floor
    # Span indices whose positions lie in the region.
    i0, i1 = (
        np.maximum(-((q_start - q0) // step), 0),
        np.minimum(-((q_start - q1) // step), q_count),
    )
    j0, j1 = (
        np.maximum(-((k_start - k0) // step), 0),
        np.minimum(-((k_start - k1) // step), k_count),
    )
    empty = (i1 <= i0) | (j1 <= j0) | (lo > hi)
    # Like ``cut``: first cut off rows that see no key, then keys that no row sees.
    i0, i1 = np.maximum(i0, j0 + lo), np.minimum(i1, j1 + hi)
    j0, j1 = np.maximum(j0, i0 - hi), np.minimum(j1, i1 - lo)
    i1 = np.where(empty | (j1 <= j0), i0, i1)
    return np.stack(np.broadcast_arrays(i0, i1, j0, j1, lo, hi))


def join(tiles: Iterable[Tile]) -> list[Tile]:
    """Join tiles to fewer with the same pairs: causal squares along a diagonal, and touching FULL rectangles."""
    # Zigzag's own block comes as two triangles and a rectangle: one causal tile.
    found = sorted(tiles)
    return _join_full(_join_causal(found)) if len(found) > 1 else found


def _join_causal(tiles: list[Tile]) -> list[Tile]:
    """Join two causal squares along the diagonal, and the rectangle left of the lower one, to a larger causal square.

    a . . .         a . . .
    a a . .         a a . .
    c c b .   ->    a a a .
    c c b b         a a a a
    """
    pool = {(tile.q0, tile.k0): tile for tile in tiles}
    for corner in sorted(pool):
        while (
            (upper := pool.get(corner)) is not None
            and upper.is_causal
            and upper.num_rows == upper.num_keys
        ):
            # Two causal squares down the diagonal and the rectangle left of the lower one make a larger causal square.
            # It stays in the pool, where it may be the upper one of the next pair.
            lower, left = pool.get((upper.q1, upper.k1)), pool.get((upper.q1, upper.k0))
            if lower is None or left is None or not lower.is_causal or not left.is_full:
                break
            if (left.q1, left.k1) != (lower.q1, upper.k1):
                break
            del pool[lower.q0, lower.k0], pool[left.q0, left.k0]
            pool[corner] = Tile(
                upper.q0, lower.q1, upper.k0, lower.k1, 0, lower.q1 - upper.q0 - 1
            )
    return list(pool.values())


def _join_full(tiles: list[Tile]) -> list[Tile]:
    """Join FULL rectangles: first side by side with the same rows, then above each other with the same keys.

    Four quarters of a rectangle become two halves, upper and lower, and then the rectangle. Other tiles stay.
    """
    rest = [tile for tile in tiles if not tile.is_full]
    rows = {(tile.q0, tile.q1, tile.k0): tile for tile in tiles if tile.is_full}
    for key in sorted(rows, key=lambda key: key[2]):
        while (left := rows.get(key)) and (
            right := rows.pop((left.q0, left.q1, left.k1), None)
        ):
            rows[key] = Tile.full(left.q0, left.q1, left.k0, right.k1)
    columns = {(tile.k0, tile.k1, tile.q0): tile for tile in rows.values()}
    for key in sorted(columns, key=lambda key: key[2]):
        while (upper := columns.get(key)) and (
            lower := columns.pop((upper.k0, upper.k1, upper.q1), None)
        ):
            columns[key] = Tile.full(upper.q0, lower.q1, upper.k0, upper.k1)
    return sorted([*rest, *columns.values()])
