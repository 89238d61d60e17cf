"""A launch's tiles as arrays, and which of them each stretch of rows or keys meets."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.tile import Tile

# Rows, or keys, that share one list of tiles; a multiple of every block.
GRAIN: Final = 128


class Lists(NamedTuple):
    """A list of tiles for each ``GRAIN`` rows or keys: starts (grains + 1,), and all lists concatenated."""

    first: NDArray[np.int32]
    which: NDArray[np.int32]


class Table(NamedTuple):
    """Tiles as (tiles, 6): q0, q1, k0, k1, lo, hi; and the lists that rows, and keys, meet."""

    tiles: NDArray[np.int32]
    of_rows: Lists
    of_keys: Lists

    @staticmethod
    def of(tiles: Sequence[Tile], num_rows: int, num_keys: int) -> "Table":
        numbers = [
            (tile.q0, tile.q1, tile.k0, tile.k1, tile.lo, tile.hi) for tile in tiles
        ]
        return Table(
            np.array(numbers, np.int32).reshape(-1, 6),
            _lists([(tile.q0, tile.q1) for tile in tiles], num_rows),
            _lists([(tile.k0, tile.k1) for tile in tiles], num_keys),
        )


def _lists(spans: list[tuple[int, int]], length: int) -> Lists:
    """List the tiles that meet each ``GRAIN`` rows (or keys) of ``length``; ``spans`` are the tiles' [start, stop).

    With a grain of 128, tiles [0, 256) and [128, 200) give the lists 0 and 0 1: ``first`` 0 1 3, ``which`` 0 0 1.
    """
    lists: list[list[int]] = [[] for _ in range(-(-length // GRAIN))]
    for number, (start, stop) in enumerate(spans):
        for grain in range(start // GRAIN, -(-stop // GRAIN)):
            lists[grain].append(number)
    first = accumulate(map(len, lists), initial=0)
    return Lists(
        np.array([*first], np.int32),
        np.array([n for one in lists for n in one], np.int32),
    )
