"""Pictures of the ring, tiles in positions (x is the key, y the query) so that they can be checked."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, hypot
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import Layout, Span
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.ranges import Ranges, size, union
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.schedule import Hop, make_schedule
from ringspan.report import drawing as draw
from ringspan.report.drawing import GRID, GROUND, INK, PAPER, RANK_COLOURS, SOFT, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Up to this length single cells of a striped picture stay visible, and the file small.
MAX_STRIPED_LENGTH: Final = 64


def ring_picture(layout: Layout, mask: Mask, name: str | None = None) -> "Figure":
    """Draw each rank's work (query positions downward, keys rightward), a colour per rank, fainter by hop."""
    # Strips along the edges show the ranks that hold queries and keys; the bars below, each rank's work.
    _check_drawable(layout)
    left, top, side = 84.0, 82.0, 350.0
    scale = side / layout.length
    pairs = [
        make_schedule(layout, mask, rank).num_pairs for rank in range(layout.ranks)
    ]
    shares = [100 * count / max(1, sum(pairs)) for count in pairs]
    heading = f"{name or _name(layout, mask)}, {layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    spoken = ", ".join(
        f"rank {rank} {share:.1f} %" for rank, share in enumerate(shares)
    )
    height = (
        top
        + side
        + 34
        + 4
        + 22
        * (ceil(layout.ranks / (2 if layout.ranks > 4 else 1)) + (layout.ranks > 1))
    )
    label = f"Who computes what: {heading}, {layout.length:,} positions. Share of the work: {spoken}."
    figure, page = draw.canvas(440, height, label)
    draw.text(page, 4, 18, heading, strong=True)
    draw.text(page, left + side / 2, 42, "key position", SOFT, "center")
    draw.text(page, 16, top + side / 2, "query position", SOFT, "center", rotation=90)
    _draw_position_ticks(page, layout.length, left, top, scale)
    _draw_owner_strips(page, layout, left, top, scale)
    draw.rectangle(page, left, top, side, side, GROUND)
    square = draw.panel(
        figure, (left, top), (side, side), (0, layout.length), (layout.length, 0)
    )
    for rank in range(layout.ranks):
        for hop in make_schedule(layout, mask, rank).hops:
            _draw_tiles(square, layout, rank, hop, scale)
    note = "colour: the rank that computes; number: its hop, later is fainter"
    draw.text(page, 4, top + side + 20, note, SOFT, size=11)
    _draw_work_legend(page, shares, top + side + 34)
    return figure


def travel_picture(layout: Layout, mask: Mask) -> "Figure":
    """Draw the block at each rank and hop: a ranks x hops table, filled while keys still travel."""
    _check_drawable(layout, cells=False)
    left, top, width, height = (
        58.0,
        48.0,
        max(62.0, min(170.0, 380.0 / layout.ranks)),
        48.0,
    )
    plans = [make_schedule(layout, mask, rank) for rank in range(layout.ranks)]
    moved = sum(schedule.sent_tokens for schedule in plans)
    everything = layout.ranks * (layout.ranks - 1) * layout.tokens_per_rank
    if everything:
        total = (
            f"{moved:,} tokens sent; whole blocks to every rank would be {everything:,}"
        )
    else:
        total = "one rank: nothing travels"
    bottom = top + layout.ranks * height + 18
    label = f"What travels: {_name(layout, mask)}, {layout.ranks} ranks. {total}."
    figure, page = draw.canvas(
        max(440.0, left + layout.ranks * width + 4), bottom + 10, label
    )
    draw.text(page, 4, 18, f"What travels: {_name(layout, mask)}", strong=True)
    for index in range(layout.ranks):
        draw.text(
            page, left + (index + 0.5) * width, 40, f"hop {index}", SOFT, "center"
        )
    for schedule in plans:
        y = top + schedule.rank * height
        draw.text(page, 4, y + 20, f"rank {schedule.rank}", SOFT)
        for hop in schedule.hops:
            _draw_block(
                page,
                layout,
                schedule.rank,
                hop,
                left + hop.index * width + 4,
                y + 6,
                width - 8,
            )
    draw.text(page, 4, bottom, total, SOFT, size=11)
    return figure


def _name(layout: Layout, mask: Mask) -> str:
    masked = str(mask)
    return f"{layout.name} layout, {masked if len(masked) <= 30 else masked[:29] + '…'} mask"


def _check_drawable(layout: Layout, *, cells: bool = True) -> None:
    if layout.ranks > len(RANK_COLOURS):
        raise LayoutError(
            f"a picture of {layout.ranks} ranks has no colours that can be told apart; draw at most {len(RANK_COLOURS)}"
        )
    if cells and layout.spans(0)[0].step > 1 and layout.length > MAX_STRIPED_LENGTH:
        raise LayoutError(
            f"a striped picture of {layout.length} positions would have cells smaller than a pixel; "
            f"draw at most {MAX_STRIPED_LENGTH}, the pattern repeats"
        )


def _draw_tiles(
    square: "Axes", layout: Layout, rank: int, hop: Hop, scale: float
) -> None:
    """Draw the tiles of a rank's hop in its colour, fainter for later hops, numbered if there is room."""
    pieces = list(_pieces(layout, rank, hop))
    if not pieces:
        return
    title = f"rank {rank}, hop {hop.index}: keys of rank {hop.owner}, {hop.num_pairs:,} pairs"
    opacity = 1 - 0.6 * hop.index / max(1, layout.ranks - 1)
    draw.polygons(
        square,
        pieces,
        RANK_COLOURS[rank],
        edge=PAPER,
        kind="tile",
        title=title,
        opacity=opacity,
    )
    for piece in pieces:
        if _room(piece) * scale >= 4:
            x, y = _centre(piece)
            draw.text(
                square, x, y + 4 / scale, hop.index, anchor="center", size=11, halo=True
            )


def _pieces(layout: Layout, rank: int, hop: Hop) -> Iterator[list[Point]]:
    """Yield the polygons of a hop's tiles, in positions: unit squares for stripes, else clipped rectangles."""
    queries, keys = layout.spans(rank), layout.spans(hop.owner)
    for tile in hop.tiles:
        if queries[0].step > 1:
            yield from _cells(tile, layout.positions(rank), layout.positions(hop.owner))
        else:
            yield from _polygons(tile, queries, keys)


def _cells(
    tile: Tile, queries: NDArray[np.int64], keys: NDArray[np.int64]
) -> Iterator[list[Point]]:
    """Return unit squares: neighbours in storage lie ``step`` positions apart."""
    rows, columns = np.arange(tile.num_rows)[:, None], np.arange(tile.num_keys)[None, :]
    for i, j in np.argwhere(
        (tile.lo <= rows - columns) & (rows - columns <= tile.hi)
    ).tolist():
        yield _box(int(keys[tile.k0 + j]), int(queries[tile.q0 + i]), 1, 1)


def _polygons(
    tile: Tile, queries: Sequence[Span], keys: Sequence[Span]
) -> Iterator[list[Point]]:
    """Cut a tile at the seams between spans, each part at its positions; staircases become straight edges."""
    for row, query in _stored(queries):
        i0, i1 = max(tile.q0, row), min(tile.q1, row + query.count)
        for column, key in _stored(keys):
            j0, j1 = max(tile.k0, column), min(tile.k1, column + key.count)
            if i0 >= i1 or j0 >= j1:
                continue
            down, right = query.start - row, key.start - column
            polygon = _box(j0 + right, i0 + down, j1 - j0, i1 - i0)
            # A band is counted from the tile's corner; the shift moves it to positions.
            shift = (tile.q0 + down) - (tile.k0 + right)
            # Half a unit outside, a straight edge encloses the same area as the staircase.
            if tile.has_lower:
                polygon = _clip(polygon, tile.lo + shift - 0.5, 1)
            if tile.has_upper:
                polygon = _clip(polygon, tile.hi + shift + 0.5, -1)
            if polygon:
                yield polygon


def _stored(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the storage index of its first token."""
    index = 0
    for span in spans:
        yield index, span
        index += span.count


def _box(x: float, y: float, width: float, height: float) -> list[Point]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _clip(polygon: list[Point], bound: float, sign: int) -> list[Point]:
    """Clip a convex polygon to a side of ``y - x = bound`` (Sutherland and Hodgman 1974)."""
    kept: list[Point] = []
    for (x0, y0), (x1, y1) in pairwise([*polygon, *polygon[:1]]):
        here, there = sign * (y0 - x0 - bound), sign * (y1 - x1 - bound)
        if here >= 0:
            kept.append((x0, y0))
        if here * there < 0:
            part = here / (here - there)
            kept.append((x0 + part * (x1 - x0), y0 + part * (y1 - y0)))
    return kept


def _area(polygon: list[Point]) -> float:
    """Return a polygon's area by the shoelace formula."""
    return (
        abs(
            sum(
                x0 * y1 - x1 * y0
                for (x0, y0), (x1, y1) in pairwise([*polygon, polygon[0]])
            )
        )
        / 2
    )


def _centre(polygon: list[Point]) -> Point:
    """Return a convex polygon's centre of gravity: the mean centre of a fan of triangles, weighted by area."""
    (x0, y0), total, x, y = polygon[0], 0.0, 0.0, 0.0
    for a, b in pairwise(polygon[1:]):
        area = _area([polygon[0], a, b])
        total, x, y = (
            total + area,
            x + area * (x0 + a[0] + b[0]) / 3,
            y + area * (y0 + a[1] + b[1]) / 3,
        )
    return (x / total, y / total)


def _room(polygon: list[Point]) -> float:
    """Return area over perimeter: a quarter of a square's side, half a band's thickness."""
    return _area(polygon) / sum(
        hypot(x1 - x0, y1 - y0)
        for (x0, y0), (x1, y1) in pairwise([*polygon, polygon[0]])
    )


def _draw_position_ticks(
    page: "Axes", length: int, left: float, top: float, scale: float
) -> None:
    """Write positions along the top and left edges: quarters of the length if it divides by 4, else halves."""
    quarters = (
        [length * part // 4 for part in range(5)]
        if length % 4 == 0
        else [0, length // 2, length]
    )
    for position in quarters:
        anchor = (
            "left" if position == 0 else "right" if position == length else "center"
        )
        at = f"{position:,}" if length < 100_000 else f"{position / 1000:,.0f}K"
        draw.text(page, left + position * scale, top - 18, at, SOFT, anchor, size=11)
        draw.text(
            page, left - 16, top + position * scale + 4, at, SOFT, "right", size=11
        )


def _draw_owner_strips(
    page: "Axes", layout: Layout, left: float, top: float, scale: float
) -> None:
    """Draw a strip along the top and left edges in the colours of the ranks that hold the positions."""
    for rank in range(layout.ranks):
        held = [
            run for span in layout.spans(rank) for run in _runs(span, layout.length)
        ]
        for start, stop in union(held):
            title = f"positions {start:,} to {stop - 1:,}: rank {rank}"
            first, extent, colour = (
                start * scale,
                (stop - start) * scale,
                RANK_COLOURS[rank],
            )
            draw.rectangle(page, left + first, top - 12, extent, 8, colour, title=title)
            draw.rectangle(page, left - 12, top + first, 8, extent, colour, title=title)


def _runs(span: Span, length: int) -> Iterator[tuple[int, int]]:
    starts = [span.start] if span.step == 1 else range(span.start, length, span.step)
    size_of_run = span.count if span.step == 1 else 1
    yield from (
        (start, min(start + size_of_run, length)) for start in starts if start < length
    )


def _draw_work_legend(page: "Axes", shares: list[float], top: float) -> None:
    """Draw a bar for each rank's share of the work in percent, with a mark at an even share."""
    columns = 2 if len(shares) > 4 else 1
    pitch, longest = 432 / columns, max(*shares, 1e-9) if len(shares) > 1 else 100.0
    bar = pitch - 136
    for rank, share in enumerate(shares):
        x, y = 4 + (rank % columns) * pitch, top + rank // columns * 22
        even = x + 60 + 100 / len(shares) / longest * bar
        draw.text(page, x, y + 12, f"rank {rank}")
        draw.rectangle(page, x + 60, y, share / longest * bar, 14, RANK_COLOURS[rank])
        draw.text(
            page,
            x + 68 + max(share / longest * bar, even - x - 60),
            y + 12,
            f"{share:.1f} %",
            strong=True,
        )
        if len(shares) > 1:
            draw.line(page, (even, even), (y - 2, y + 16), INK, 2)
    if len(shares) > 1:
        bottom = top + ceil(len(shares) / columns) * 22
        draw.line(page, (8, 8), (bottom + 6, bottom + 18), INK, 2)
        draw.text(
            page,
            16,
            bottom + 16,
            f"an even share, {100 / len(shares):.4g} %",
            SOFT,
            size=11,
        )


def _draw_block(
    page: "Axes", layout: Layout, rank: int, hop: Hop, x: float, y: float, width: float
) -> None:
    """Draw the block of a rank's hop: the parts that arrived, in the owner's colour, and their share."""
    tokens = layout.tokens_per_rank
    present: Ranges = hop.arrives.ranges if hop.index else ((0, tokens),)
    share = f"{100 * size(present) / tokens:.0f} %"
    title = f"hop {hop.index}: rank {rank} computes with {size(present):,} of {tokens:,} tokens of rank {hop.owner}"
    draw.rectangle(page, x, y, width, 16, GROUND, edge=GRID)
    for start, stop in present:
        first, extent = x + start / tokens * width, (stop - start) / tokens * width
        draw.rectangle(
            page,
            first,
            y,
            extent,
            16,
            RANK_COLOURS[hop.owner],
            kind="carried",
            title=title,
        )
    told = (
        "own" if hop.index == 0 else f"r{hop.owner}: {share}" if present else "nothing"
    )
    draw.text(page, x + width / 2, y + 30, told, SOFT, "center", size=11)
