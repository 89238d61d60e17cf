"""Spans of two sides that meet under a mask, without trying those far apart.

Sorted runs that meet a region lie between two binary searches. Stripes all meet every long region, but in few ways:
rank a holds ``a + N i``, so a region's end takes two indices over all ranks, and a bound on ``q - k`` three over all
pairs. So a region has few ``Cells``, however many ranks there are.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspan.core.geometry.layout import Span
from ringspan.core.geometry.tile import Tile, join, meet

IntArray = NDArray[np.int64]
Spans = tuple[Span, ...]

# Meetings in one numpy call, which bounds the memory of a schedule.
MOST_MEETINGS: Final = 1 << 15


class Runs(NamedTuple):
    """Spans of step one of several blocks, by position; ``stored`` is the storage index of a span's first token."""

    block: IntArray
    start: IntArray
    tokens: IntArray
    stored: IntArray

    @staticmethod
    def of(blocks: Sequence[Spans], first_stored: Sequence[int]) -> "Runs":
        """Sort all blocks' runs by position.

        ``first_stored`` has the storage index of each block's first token; a block's runs are stored one after the
        other. So ``Runs.of([((8, 2), (0, 4))], [0])`` has starts 0 and 8, stored from 2 and 0.
        """
        numbers = chain.from_iterable(chain.from_iterable(blocks))
        start, count, _ = np.fromiter(numbers, np.int64).reshape(-1, 3).T
        held = np.array(list(map(len, blocks)))
        block = np.repeat(np.arange(len(blocks)), held)
        before = count.cumsum() - count
        first = np.append(before, 0)[np.minimum(held.cumsum() - held, len(before))]
        stored = before - first[block] + np.array(first_stored)[block]
        order = start.argsort(kind="stable")
        return Runs(block[order], start[order], count[order], stored[order])


class Meetings(NamedTuple):
    """Numbers of the query run and of the key run of each meeting, and its bounds (``tile.meet``)."""

    queries: IntArray
    keys: IntArray
    met: IntArray


def meet_runs(queries: Runs, keys: Runs, regions: IntArray) -> Iterator[Meetings]:
    """Yield all meetings of runs in batches; a side's runs do not overlap."""
    columns = regions[regions[:, 4] <= regions[:, 5]].T
    q_stop, k_stop = queries.start + queries.tokens, keys.start + keys.tokens
    first: IntArray = columns[0]
    stop: IntArray = columns[1]
    region, query = each_of(
        q_stop.searchsorted(first, "right"), queries.start.searchsorted(stop)
    )
    q0, q1, k0, k1, low, high = columns[:, region]
    # Keys that some query of the run sees in the region: every run with one of them is a meeting.
    first = np.maximum(k0, np.maximum(q0, queries.start[query]) - high)
    stop = np.minimum(k1, np.minimum(q1, q_stop[query]) - low)
    is_met = first < stop
    first = k_stop.searchsorted(first, "right")
    stop = np.where(is_met, keys.start.searchsorted(stop), first)
    total = np.maximum(stop - first, 0).cumsum()
    edges = total.searchsorted(
        np.arange(0, total[-1] if len(total) else 0, MOST_MEETINGS), "right"
    ).tolist()
    for begin, end in pairwise([*edges, len(total)]):
        row, key = each_of(first[begin:end], stop[begin:end])
        row += begin
        one = query[row]
        sides = (
            queries.start[one],
            queries.tokens[one],
            keys.start[key],
            keys.tokens[key],
        )
        yield Meetings(one, key, meet(*sides, 1, columns[:, region[row]]))


class Cells(NamedTuple):
    """Stripe pairs that meet a region the same way: queries a in [q0, q1), keys b in [k0, k1), ``d0 <= a - b < d1``."""

    q0: IntArray
    q1: IntArray
    k0: IntArray
    k1: IntArray
    d0: IntArray
    d1: IntArray
    met: IntArray

    def keys_of(self, query: int) -> tuple[IntArray, IntArray]:
        """Return, by cell, the range of key stripes that a query stripe meets."""
        return np.maximum(self.k0, query - self.d1 + 1), np.minimum(
            self.k1, query - self.d0 + 1
        )

    def summed(self, weights: IntArray, step: int) -> IntArray:
        """Sum ``weights`` over the key stripes that each query stripe meets. Shape (step,)."""
        # Stripe a meets ``f(a - d0 + 1) - f(a - d1 + 1)`` of a cell with ``f(t) = max(t - k0, 0) - max(t - k1, 0)``:
        # four ramps, each from its knot on. Adding up their slopes and values gives all stripes at once.
        slopes, values = np.zeros((2, step + 1), np.int64)
        for edge, bound, sign in (
            (self.k0, self.d0, 1),
            (self.k1, self.d0, -1),
            (self.k0, self.d1, -1),
            (self.k1, self.d1, 1),
        ):
            knot, weight = edge + bound - 1, sign * weights
            for where, slope in (
                (np.clip(knot, self.q0, self.q1), weight),
                (self.q1, -weight),
            ):
                np.add.at(slopes, where, slope)
                np.add.at(values, where, -slope * knot)
        return (slopes.cumsum() * np.arange(step + 1) + values.cumsum())[:-1]


def stripe_cells(
    step: int, q_count: int, k_count: int, regions: IntArray, query: int | None = None
) -> Cells:
    """Return all regions' cells for stripes 0 to ``step - 1``, or for one query stripe."""
    q0, q1, k0, k1, low, high = (regions % step).T
    first, last = np.zeros_like(q0), np.full_like(q0, step)
    q_edges, k_edges, d_edges = (
        np.sort(np.stack(edges, 1), 1)
        for edges in (
            (first, q0, q1, last)
            if query is None
            else (first + query, first + query + 1),
            (first, k0, k1, last),
            (
                1 - last,
                np.maximum(low - step, 1 - step),
                low,
                high - step + 1,
                high + 1,
                last,
            ),
        )
    )
    q, k, d = (
        q_edges[:, :, None, None],
        k_edges[:, None, :, None],
        d_edges[:, None, None, :],
    )
    # Try one pair of stripes of each cell: all of its pairs meet the region the same way.
    row = np.maximum(q[:, :-1], d[..., :-1] + k[:, :, :-1])
    key = np.minimum(k[:, :, 1:] - 1, row - d[..., :-1])
    where = np.nonzero(
        (row < q[:, 1:]) & (key >= k[:, :, :-1]) & (row - key < d[..., 1:])
    )
    met = meet(row[where], q_count, key[where], k_count, step, regions.T[:, where[0]])
    is_met = met[1] > met[0]
    r, i, j, n = (each[is_met] for each in where)
    q0, q1, k0, k1 = q_edges[r, i], q_edges[r, i + 1], k_edges[r, j], k_edges[r, j + 1]
    return Cells(q0, q1, k0, k1, d_edges[r, n], d_edges[r, n + 1], met[:, is_met])


def stripe_hulls(
    queries: IntArray,
    keys: IntArray,
    step: int,
    q_count: int,
    k_count: int,
    regions: IntArray,
) -> IntArray:
    """Return hulls of keys that query stripes see: first, minus one past the last, ``k_count`` if none. (2, pairs)."""
    found = np.full((2, len(queries)), k_count, np.int64)
    able = np.flatnonzero(_differences(step, regions)[(queries - keys) % step])
    for side, sign in ((0, 1), (1, -1)):
        # Try regions in the order in which their keys begin (for last keys, end) until none that follows can hold an
        # earlier (later) key.
        columns, left, done = (
            regions[(sign * regions[:, 2 + side]).argsort(kind="stable")].T,
            able,
            0,
        )
        while left.size and done < len(regions):
            some = columns[:, None, done : done + max(1, MOST_MEETINGS // left.size)]
            done += some.shape[-1]
            met = meet(
                queries[left, None], q_count, keys[left, None], k_count, step, some
            )
            bounds = np.where(met[1] > met[0], sign * met[2 + side], k_count).min(-1)
            found[side, left] = np.minimum(found[side, left], bounds)
            if done < len(regions):
                left = left[
                    found[side, left]
                    > -sign * ((keys[left] - columns[2 + side, done]) // step)
                ]
    return found


def _differences(step: int, regions: IntArray) -> NDArray[np.bool_]:
    """Mark the differences a - b mod ``step`` of stripes a and b that occur between a query and a key of some region.

    A region's pairs have every ``q - k`` from ``low`` to ``high``, so stripes meet at all only if theirs is one of
    these modulo the number of stripes: with 4 stripes, ``0 <= q - k <= 1`` marks 0 and 1. Shape (step,).
    """
    q0, q1, k0, k1, low, high = regions.T
    low, high = np.maximum(low, q0 - k1 + 1), np.minimum(high, q1 - 1 - k0)
    opened = np.zeros(2 * step + 1, np.int64)
    np.add.at(opened, low % step, 1)
    np.add.at(opened, low % step + np.clip(high - low + 1, 0, step), -1)
    is_open = opened.cumsum() > 0
    return is_open[:step] | is_open[step:-1]


def transposed(regions: IntArray) -> IntArray:
    """Exchange queries and keys: ``lo <= q - k <= hi`` becomes ``-hi <= k - q <= -lo``."""
    return regions[:, [2, 3, 0, 1, 5, 4]] * np.array([1, 1, 1, 1, -1, -1])


def bands_between(
    mine: Spans,
    blocks: Sequence[Spans],
    first_stored: Sequence[int],
    regions: IntArray,
    *,
    passes_queries: bool,
) -> list[tuple[Tile, ...]]:
    """Return each block's tiles of my queries against its keys, or its queries against my keys."""
    # Tiles that touch are joined. No two blocks hold the same positions. Rows and columns are indices into an owner's
    # storage; ``first_stored`` has the index of each block's first token.
    regions = transposed(regions) if passes_queries else regions
    if not mine or mine[0].step == 1:
        return _run_bands(
            Runs.of([mine], [0]),
            Runs.of(blocks, first_stored),
            len(blocks),
            regions,
            passes_queries,
        )
    (stripe,) = mine
    found: list[tuple[Tile, ...]] = [()] * len(blocks)
    # On the route bidirectional a block is half a stripe, and the first halves of all stripes are the first half of all
    # positions. So each half is met as if the regions ended there.
    halves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (first, block) in enumerate(zip(first_stored, blocks, strict=True)):
        for span in block:  # none, if a half has no token
            halves.setdefault((first, first + span.count), []).append(
                (span.start % stripe.step, number)
            )
    for (first, stop), owners in halves.items():
        cut = regions.copy()
        cut[:, 2] = np.maximum(cut[:, 2], first * stripe.step)
        cut[:, 3] = np.minimum(cut[:, 3], stop * stripe.step)
        cells = stripe_cells(
            stripe.step, stripe.count, stop, cut[cut[:, 2] < cut[:, 3]], stripe.start
        )
        keys, numbers = np.array(sorted(owners)).T
        for number, tiles in zip(
            numbers.tolist(),
            _stripe_bands(cells, stripe.start, keys, passes_queries),
            strict=True,
        ):
            found[number] = tiles
    return found


def _run_bands(
    mine: Runs, blocks: Runs, count: int, regions: IntArray, passes_queries: bool
) -> list[tuple[Tile, ...]]:
    """Return each block's tiles against the runs ``mine``, in storage indices, with touching tiles joined."""
    found: list[list[Tile]] = [[] for _ in range(count)]
    for one, key, met in meet_runs(mine, blocks, regions):
        met[:2] += mine.stored[one]
        met[2:4] += blocks.stored[key]
        met[4:] += mine.stored[one] - blocks.stored[key]
        numbers: list[int] = blocks.block[key].tolist()
        for number, bounds in zip(
            numbers, _bounds(met, passes_queries).T.tolist(), strict=True
        ):
            found[number].append(Tile._make(bounds))
    return [tuple(join(tiles)) for tiles in found]


def _stripe_bands(
    cells: Cells, query: int, keys: IntArray, passes_queries: bool
) -> Iterator[tuple[Tile, ...]]:
    """Yield a query stripe's tiles against each of the key stripes ``keys``; equal tiles are one object."""
    bounds = _bounds(cells.met, passes_queries)
    first, stop = (
        keys.searchsorted(each).astype(np.int32) for each in cells.keys_of(query)
    )
    # Sort all tiles once, so that each rank's are in order too.
    order = np.lexsort(bounds[::-1])
    order = order[first[order] < stop[order]]
    bounds, first, stop = bounds[:, order], first[order], stop[order]
    tiles = list(map(Tile._make, bounds.T.tolist()))
    table, is_joined = np.fromiter(tiles, object, len(tiles)), np.zeros(len(keys), bool)
    for one, other in _touching(tiles, bounds):
        is_joined[max(first[one], first[other]) : min(stop[one], stop[other])] = True
    together = max(1, MOST_MEETINGS * len(keys) // max(1, int((stop - first).sum())))
    for begin in range(0, len(keys), together):
        end = min(begin + together, len(keys))
        which, key = each_of(np.maximum(first, begin), np.minimum(stop, end))
        by_key = (key - begin).astype(np.uint16).argsort(kind="stable")
        held: list[Tile] = table[which[by_key]].tolist()
        edges = np.bincount(key - begin, minlength=end - begin).cumsum().tolist()
        for start, last, joins in zip(
            [0, *edges[:-1]], edges, is_joined[begin:end].tolist(), strict=True
        ):
            yield tuple(join(held[start:last])) if joins else tuple(held[start:last])


def _touching(tiles: list[Tile], bounds: IntArray) -> Iterator[tuple[int, int]]:
    """Yield pairs of tiles that ``join`` may join: the second is FULL, and next to or below the first."""
    q0, q1, k0, k1, lo, hi = bounds
    above: dict[tuple[int, int, int], list[int]] = {}
    beside: dict[tuple[int, int, int], list[int]] = {}
    for number in np.flatnonzero((lo == 1 - (k1 - k0)) & (hi == q1 - q0 - 1)).tolist():
        tile = tiles[number]
        above.setdefault((tile.q0, tile.k0, tile.k1), []).append(number)
        beside.setdefault((tile.q0, tile.q1, tile.k0), []).append(number)
    for number, tile in enumerate(tiles if above else ()):
        for other in above.get((tile.q1, tile.k0, tile.k1), []) + beside.get(
            (tile.q0, tile.q1, tile.k1), []
        ):
            yield number, other


def _bounds(met: IntArray, passes_queries: bool) -> IntArray:
    """Return tile fields of meetings, one row each, with loose bounds as in ``cut``."""
    i0, i1, j0, j1, lo, hi = met
    lo, hi = (
        np.maximum(lo - i0 + j0, 1 - (j1 - j0)),
        np.minimum(hi - i0 + j0, i1 - i0 - 1),
    )
    return np.stack(
        (j0, j1, i0, i1, -hi, -lo) if passes_queries else (i0, i1, j0, j1, lo, hi)
    )


def each_of(first: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """Concatenate ranges [first, stop): return each number's range, and the number."""
    counts = np.maximum(stop - first, 0)
    which = np.arange(len(counts), dtype=first.dtype).repeat(counts)
    return which, np.arange(len(which), dtype=first.dtype) + (
        first - counts.cumsum(dtype=first.dtype) + counts
    )[which]
