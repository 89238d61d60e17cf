"""The schedule as data: one program for all ranks looks up its chunk pairs by rank and hop.

A block becomes runs of FULL chunk pairs and partly filled ones; equal lists are shared (causal: three on any ring).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.schedule import Hop, make_schedule
from ringspan.gpu.table import Table

IntArray = NDArray[np.int32]
_Row = TypeVar("_Row", bound=Hashable)
Run = tuple[int, int, int]  # query start, first key start, number of key chunks
# Query start, key start, and the bands that cut the pair.
Partial = tuple[int, int, tuple[tuple[int, int, int, int, int, int], ...]]


@dataclass(frozen=True)
class Chunks:
    """T local tokens as chunks of one size; a span's last chunk begins early enough to end with the span.

    Chunk n covers [start[n], start[n] + size): [first[n], start[n] + size) is its own, the rest the previous one's.
    """

    size: int
    start: tuple[int, ...]
    first: tuple[int, ...]

    @staticmethod
    def of(layout: Layout, limit: int) -> "Chunks":
        """Return the fewest chunks of at most ``limit`` tokens, as equal as can be."""
        tokens = layout.tokens_per_rank
        span = tokens // 2 if layout.name == "zigzag" else tokens
        number = -(-span // limit)
        size = -(-span // number)
        offsets = range(0, tokens, span)
        return Chunks(
            size,
            tuple(
                offset + min(n * size, span - size)
                for offset in offsets
                for n in range(number)
            ),
            tuple(offset + n * size for offset in offsets for n in range(number)),
        )


@dataclass(frozen=True, eq=False)
class Course:
    """Course of the blocks, and where each rank looks up a hop's work."""

    direction: int
    num_hops: int
    tile_pairs: int  # ``Schedule.tile_pairs``
    which: IntArray  # (ranks, hops): row of a kernel's lists


@dataclass(frozen=True, eq=False)
class Program(Course):
    """Work of each rank at each hop, in lists padded to the longest; the numbers say how much counts."""

    query_size: int
    key_size: int
    num_runs: IntArray  # (rows,)
    runs: IntArray  # (rows, R, 3): query start, first key start, number of consecutive key chunks
    num_partial: IntArray  # (rows,)
    # (rows, Q, 4): query start, key start, first band, number of bands
    partial: IntArray
    bands: IntArray  # (bands, 6): rows [q0, q1), keys [k0, k1) with lo <= row - key <= hi, in local indices
    is_even: bool  # True if no two chunks overlap


@lru_cache(maxsize=64)
def compile_program(
    layout: Layout, key_layout: Layout, mask: Mask, query_chunk: int, key_chunk: int
) -> Program:
    """Compile a ring's program for a mask, without hops that no rank needs."""
    queries, keys = Chunks.of(layout, query_chunk), Chunks.of(key_layout, key_chunk)
    course, rows = _look_up(
        layout, key_layout, mask, lambda hop: _lists(hop.tiles, queries, keys)
    )
    bands: dict[tuple[tuple[int, ...], ...], int] = {}
    all_bands: list[tuple[int, ...]] = []
    partial: list[list[tuple[int, int, int, int]]] = []
    for _, items in rows:
        partial.append([])
        for query, key, here in items:
            if here not in bands:
                bands[here] = len(all_bands)
                all_bands.extend(here)
            partial[-1].append((query, key, bands[here], len(here)))
    runs = [list(runs) for runs, _ in rows]
    return Program(
        **course,
        query_size=queries.size,
        key_size=keys.size,
        num_runs=np.array([len(row) for row in runs], dtype=np.int32),
        runs=_padded(runs, 3),
        num_partial=np.array([len(row) for row in partial], dtype=np.int32),
        partial=_padded(partial, 4),
        bands=np.array(all_bands or [(0,) * 6], dtype=np.int32),
        is_even=queries.start == queries.first and keys.start == keys.first,
    )


@dataclass(frozen=True, eq=False)
class Tables(Course):
    """Tiles with bands of each rank and hop, for ``ringspan.gpu.attention``: a padded ``Table`` by row."""

    tiles: IntArray  # (rows, tiles, 6)
    first_of_rows: IntArray  # (rows, grains + 1)
    which_of_rows: IntArray  # (rows, entries)
    first_of_keys: IntArray
    which_of_keys: IntArray


@lru_cache(maxsize=64)
def compile_tables(layout: Layout, key_layout: Layout, mask: Mask) -> Tables:
    """Compile a ring's tables for a mask, without hops that no rank needs."""
    course, rows = _look_up(layout, key_layout, mask, lambda hop: hop.bands)
    tables = [
        Table.of(bands, layout.tokens_per_rank, key_layout.tokens_per_rank)
        for bands in rows
    ]
    return Tables(
        **course,
        tiles=_stacked([table.tiles for table in tables]),
        first_of_rows=_stacked([table.of_rows.first for table in tables]),
        which_of_rows=_stacked([table.of_rows.which for table in tables]),
        first_of_keys=_stacked([table.of_keys.first for table in tables]),
        which_of_keys=_stacked([table.of_keys.which for table in tables]),
    )


def _look_up(
    layout: Layout, key_layout: Layout, mask: Mask, row_of: Callable[[Hop], _Row]
) -> tuple[dict[str, Any], list[_Row]]:
    """Return a ``Course``'s fields, and the distinct rows of ``row_of`` over all ranks' hops."""
    schedules = [
        make_schedule(layout, mask, rank, key_layout) for rank in range(layout.ranks)
    ]
    rows: dict[_Row, int] = {}
    which = np.zeros((layout.ranks, layout.ranks), dtype=np.int32)
    for schedule in schedules:
        for hop in schedule.hops:
            which[schedule.rank, hop.index] = rows.setdefault(row_of(hop), len(rows))
    # One program runs on all ranks, so a hop is kept if any rank computes something at it.
    needed = [
        hop.index
        for schedule in schedules
        for hop in schedule.hops
        if hop.bands or hop.index == 0
    ]
    course = {
        # With two ranks both neighbours are the same, so the direction does not matter.
        "direction": -1 if layout.ranks > 2 and schedules[0].hops[1].owner == 1 else 1,
        "num_hops": 1 + max(needed),
        "tile_pairs": schedules[0].tile_pairs,
        "which": which,
    }
    return course, list(rows)


# A chunk pair's number has the chunk of keys in its low bits, and the chunk of queries above them.
KEY_BITS: Final = 16


def query_of(where: Any) -> Any:
    return where >> KEY_BITS


def key_of(where: Any) -> Any:
    return where & (1 << KEY_BITS) - 1


@dataclass(frozen=True, eq=False)
class Pairs:
    """Chunk pairs of an even program, one by one, for kernels whose grid is such a list."""

    num: IntArray  # (rows,)
    by_query: IntArray  # (rows, M, 2): sorted by the chunk of queries
    by_key: IntArray  # (rows, M, 2): sorted by the chunk of keys
    lists: IntArray  # (lists, 2): first band, number of bands


@lru_cache(maxsize=64)
def compile_pairs(program: Program) -> Pairs:
    """Return the chunk pairs of a program one by one, if its chunks do not overlap."""
    queries, keys = program.query_size, program.key_size
    lists: dict[tuple[int, int], int] = {}
    rows: list[list[tuple[int, int]]] = []
    for row in range(len(program.runs)):
        pairs: list[tuple[int, int]] = []
        for query, key, count in program.runs[row, : program.num_runs[row]].tolist():
            pairs += [
                (query // queries << KEY_BITS | key // keys + n, -1)
                for n in range(count)
            ]
        for query, key, first, count in program.partial[
            row, : program.num_partial[row]
        ].tolist():
            cut = lists.setdefault((first, count), len(lists))
            pairs.append((query // queries << KEY_BITS | key // keys, cut))
        rows.append(pairs)
    longest = max(1, *map(len, rows))

    def table(order: Callable[[tuple[int, int]], int]) -> IntArray:
        full = [sorted(pairs, key=order) or [(0, -1)] for pairs in rows]
        # Shorter lists repeat their last pair: its blocks are loaded already, and ``num`` keeps it from being added
        # again.
        return np.array(
            [pairs + pairs[-1:] * (longest - len(pairs)) for pairs in full],
            dtype=np.int32,
        )

    return Pairs(
        np.array([len(pairs) for pairs in rows], dtype=np.int32),
        table(lambda pair: query_of(pair[0])),
        table(lambda pair: key_of(pair[0])),
        np.array(list(lists) or [(0, 0)], dtype=np.int32),
    )


def _lists(
    tiles: tuple[Tile, ...], queries: Chunks, keys: Chunks
) -> tuple[tuple[Run, ...], tuple[Partial, ...]]:
    """List runs of FULL chunk pairs, and the other allowed chunk pairs with their bands."""
    query_first, query_stop = (
        np.array(queries.first),
        np.array(queries.start) + queries.size,
    )
    key_first, key_stop = np.array(keys.first), np.array(keys.start) + keys.size
    # If chunks do not divide the length, the last one begins earlier and overlaps the one before. A band cuts the
    # shared rows off, so its pairs are never whole.
    shifted = (query_first > queries.start)[:, None] | (key_first > keys.start)[None, :]
    full = np.zeros((len(query_first), len(key_first)), dtype=np.bool_)
    touched: dict[tuple[int, int], list[tuple[int, int, int, int, int, int]]] = {}
    for tile in tiles:
        corner = tile.q0 - tile.k0
        lo, hi = tile.lo + corner, tile.hi + corner
        q0, q1 = (
            np.maximum(query_first, tile.q0)[:, None],
            np.minimum(query_stop, tile.q1)[:, None],
        )
        k0, k1 = (
            np.maximum(key_first, tile.k0)[None, :],
            np.minimum(key_stop, tile.k1)[None, :],
        )
        some = (q0 < q1) & (k0 < k1) & (q1 - 1 - k0 >= lo) & (q0 - (k1 - 1) <= hi)
        whole = (
            (q0 == query_first[:, None])
            & (q1 == query_stop[:, None])
            & (k0 == key_first)
            & (k1 == key_stop)
        )
        whole &= (q0 - (k1 - 1) >= lo) & (q1 - 1 - k0 <= hi) & ~shifted
        full |= some & whole
        for i, j in np.argwhere(some & ~whole).tolist():
            band = int(q0[i, 0]), int(q1[i, 0]), int(k0[0, j]), int(k1[0, j]), lo, hi
            touched.setdefault((i, j), []).append(band)
    runs: list[Run] = []
    for i, j in np.argwhere(full).tolist():
        query, key = queries.start[i], keys.start[j]
        # Consecutive chunks of keys become one run, in which a kernel looks nothing up.
        if (
            runs
            and runs[-1][0] == query
            and runs[-1][1] + runs[-1][2] * keys.size == key
        ):
            runs[-1] = (query, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((query, key, 1))
    partial = [
        (queries.start[i], keys.start[j], tuple(sorted(bands)))
        for (i, j), bands in sorted(touched.items())
    ]
    return tuple(runs), tuple(partial)


def _padded(rows: list[list[tuple[int, ...]]], columns: int) -> IntArray:
    return _stacked(
        [np.array(entries, dtype=np.int32).reshape(-1, columns) for entries in rows]
    )


def _stacked(rows: Sequence[IntArray]) -> IntArray:
    longest = max(1, *map(len, rows))
    return np.stack(
        [
            np.pad(row, [(0, longest - len(row)), *[(0, 0)] * (row.ndim - 1)])
            for row in rows
        ]
    )
