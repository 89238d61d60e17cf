"""Drawings as inline SVG: who computes what, what travels when, loss by step and memory by ring.

Each is text that stands alone: no script, nothing fetched, light and dark colours inside. Lengths are pixels of the
view box, but tiles are drawn in positions (x is the key, y the query), so that what is drawn can be checked.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import compress, pairwise
from math import ceil, floor, hypot, isfinite, log10
from numbers import Real
from typing import Any, Final

import numpy as np

from ringspan.core.errors import LayoutError
from ringspan.core.layout import Layout, Span
from ringspan.core.mask import Mask
from ringspan.core.ranges import Ranges, size, union
from ringspan.core.schedule import Hop, plan
from ringspan.core.tile import Tile

# Okabe and Ito (2008) with a brown and a violet for its yellow and black, which vanish on a light or a dark page.
RANK_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5C3E", "#7C3AED")
MAX_STRIPED_LENGTH: Final = 64  # single cells of a striped picture stay visible up to here, and the file small

_STYLE: Final = (
    ".ringspan{font:13px system-ui,sans-serif;fill:#1b1f24}.ringspan .soft{fill:#57606a}"
    ".ringspan .strong{font-weight:600}.ringspan .small{font-size:11px}.ringspan .ground{fill:#eef1f4}"
    ".ringspan .edge{stroke:#fff}.ringspan .grid{stroke:#d0d7de}.ringspan .ink{stroke:#1b1f24}"
    ".ringspan .halo{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}"
    "@media(prefers-color-scheme:dark){"
    ".ringspan{fill:#e6edf3}.ringspan .soft{fill:#9da7b3}.ringspan .ground{fill:#1c232c}"
    ".ringspan .edge,.ringspan .halo{stroke:#0d1117}.ringspan .grid{stroke:#3d444d}.ringspan .ink{stroke:#e6edf3}}"
)

Point = tuple[float, float]


def ring_picture(layout: Layout, mask: Mask) -> str:
    """Who computes what, as SVG: query positions downward x key positions rightward, a colour a rank, fainter by hop.

    The strips along the edges show which rank holds the queries and the keys; the bars below, each rank's work.

    Raises:
        LayoutError: more ranks than colours, or a striped layout whose single cells would be too small to see.
    """
    _check_drawable(layout)
    left, top, side = 84.0, 82.0, 350.0
    scale = side / layout.length
    tiles, labels = [], []
    for rank in range(layout.ranks):
        for hop in plan(layout, mask, rank).hops:
            pieces = list(_pieces(layout, rank, hop))
            tiles += [_tile(pieces, layout, rank, hop)] if pieces else []
            centres = (_centre(piece) for piece in pieces if _room(piece) * scale >= 4)
            labels += [
                _text(left + x * scale, top + y * scale + 4, hop.index, "halo small", "middle") for x, y in centres
            ]
    pairs = [plan(layout, mask, rank).num_pairs for rank in range(layout.ranks)]
    shares = [100 * count / max(1, sum(pairs)) for count in pairs]
    heading = f"{_name(layout, mask)}, {layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    spoken = ", ".join(f"rank {rank} {share:.1f} %" for rank, share in enumerate(shares))
    legend, height = _work_legend(shares, top + side + 34)
    return _svg(
        440,
        height,
        f"Who computes what: {heading}, {layout.length:,} positions. Share of the work: {spoken}.",
        _text(4, 18, heading, "strong"),
        _text(left + side / 2, 42, "key position", "soft", "middle"),
        _text(0, 0, "query position", "soft", "middle", transform=f"translate(16 {top + side / 2}) rotate(-90)"),
        *_position_ticks(layout.length, left, top, scale),
        *_owner_strips(layout, left, top, scale),
        _rectangle(left, top, side, side, class_="ground"),
        element("g", *tiles, transform=f"translate({left} {top}) scale({scale!r})"),
        *labels,
        _text(4, top + side + 20, "colour: the rank that computes; number: its hop, later is fainter", "soft small"),
        *legend,
    )


def travel_picture(layout: Layout, mask: Mask) -> str:
    """Which rank's block is where at each hop, as SVG: a ranks x hops table of blocks, filled where keys still travel.

    Raises:
        LayoutError: more ranks than colours.
    """
    _check_drawable(layout, cells=False)
    left, top, width, height = 58.0, 48.0, max(62.0, min(170.0, 380.0 / layout.ranks)), 48.0
    plans = [plan(layout, mask, rank) for rank in range(layout.ranks)]
    parts = [_text(4, 18, f"What travels: {_name(layout, mask)}", "strong")]
    for index in range(layout.ranks):
        parts.append(_text(left + (index + 0.5) * width, 40, f"hop {index}", "soft", "middle"))
    for schedule in plans:
        y = top + schedule.rank * height
        parts.append(_text(4, y + 20, f"rank {schedule.rank}", "soft"))
        for hop in schedule.hops:
            parts += _block(layout, schedule.rank, hop, left + hop.index * width + 4, y + 6, width - 8)
    moved = sum(schedule.sent_tokens for schedule in plans)
    everything = layout.ranks * (layout.ranks - 1) * layout.tokens_per_rank
    if everything:
        total = f"{moved:,} tokens sent; whole blocks to every rank would be {everything:,}"
    else:
        total = "one rank: nothing travels"
    bottom = top + layout.ranks * height + 18
    return _svg(
        max(440.0, left + layout.ranks * width + 4),
        bottom + 10,
        f"What travels: {_name(layout, mask)}, {layout.ranks} ranks. {total}.",
        *parts,
        _text(4, bottom, total, "soft small"),
    )


def loss_picture(metrics: Sequence[dict[str, Any]], evaluation: Sequence[dict[str, Any]] = ()) -> str:
    """Loss (nats a token) by step as SVG, evaluation loss as diamonds; empty text when there is nothing to draw.

    Args:
        metrics: rows with "step" and "loss"; rows without a finite loss are left out.
        evaluation: rows with "step" and "eval_loss".
    """
    train, evaluated = _series(metrics, "loss"), _series(evaluation, "eval_loss")
    if not (train or evaluated):
        return ""
    place, parts = _axes(train + evaluated)
    for colour, series, dash in ((RANK_COLOURS[0], train, "none"), (RANK_COLOURS[5], evaluated, "5 4")):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, _thin(series, 600)))
        parts.append(
            element("polyline", points=line, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash)
        )
    for step, loss in _thin(train, 120):  # the last is seen, the others are there to be pointed at
        title, seen = f"step {step:,.0f}: loss {loss:.4f}", int((step, loss) == train[-1])
        parts.append(_marker(place((step, loss)), title, RANK_COLOURS[0], opacity=seen))
    for step, loss in _thin(evaluated, 120):
        title = f"step {step:,.0f}: evaluation loss {loss:.4f}"
        parts.append(_marker(place((step, loss)), title, RANK_COLOURS[5], diamond=True))
    last = [(name, series[-1]) for name, series in (("train", train), ("eval", evaluated)) if series]
    heights = _apart([place(point)[1] for _, point in last], 17)
    for (name, (_, loss)), y in zip(last, heights, strict=True):
        parts.append(_text(_RIGHT + 12, y + 4, f"{name} {loss:.3f}", "strong"))
    spoken = "; ".join(f"{name} loss {loss:.4f} at step {step:,.0f}" for name, (step, loss) in last)
    return _svg(500, _BOTTOM + 54, f"Loss by step. Last: {spoken}.", *parts)


_LEFT, _TOP, _RIGHT, _BOTTOM = 66.0, 16.0, 390.0, 226.0  # the loss chart's plot area


def _axes(points: Sequence[Point]) -> tuple[Callable[[Point], Point], list[str]]:
    """Where (step, loss) lies in the view box, and the grid with its labels."""
    x_ticks = [tick for tick in _ticks(*_extent(x for x, _ in points)) if tick == round(tick)]
    x_low, x_high = _extent([*(x for x, _ in points), *x_ticks])
    y_low, y_high = _extent(y for _, y in points)
    room = (y_high - y_low) / 16  # the last point of a good run is the lowest: keep its marker off the axis
    y_low, y_high = y_low - room, y_high + room
    y_ticks = _ticks(y_low, y_high)

    def place(point: Point) -> Point:
        along, up = (point[0] - x_low) / (x_high - x_low), (point[1] - y_low) / (y_high - y_low)
        return _LEFT + along * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    parts = [_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, class_="grid")]
    for tick in y_ticks:
        y = place((x_low, tick))[1]
        parts += [_line(_LEFT, y, _RIGHT, y, class_="grid"), _text(_LEFT - 8, y + 4, f"{tick:,g}", "soft", "end")]
    for tick in x_ticks:
        x = place((tick, y_low))[0]
        parts.append(_line(x, _BOTTOM, x, _BOTTOM + 5, class_="grid"))
        parts.append(_text(x, _BOTTOM + 20, f"{tick:,.0f}", "soft", "middle"))
    middle = f"translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)"
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "step", "soft", "middle"))
    parts.append(_text(0, 0, "loss (nats a token)", "soft", "middle", transform=middle))
    return place, parts


def memory_picture(memory: Sequence[dict[str, Any]]) -> str:
    """Activation megabytes (1e6 bytes) a rank by size of the ring, as SVG with 1/N of ring 1 marked.

    Args:
        memory: rows with "ring", "activation_bytes" and, if known, "tokens_per_rank". Without any, the text is empty.
    """
    read = [tuple(number(row.get(name)) for name in ("ring", "activation_bytes", "tokens_per_rank")) for row in memory]
    rows = [
        (ring, measured, tokens) for ring, measured, tokens in read if ring and measured and min(ring, measured) > 0
    ]
    if not rows:
        return ""
    alone = next((measured for ring, measured, _ in rows if ring == 1), None)
    left, width, row_height, top = 64.0, 266.0, 54.0, 8.0
    longest = max(measured for _, measured, _ in rows)
    parts: list[str] = []
    for index, (ring, measured, tokens) in enumerate(rows):
        y = top + index * row_height
        beside = [f"{tokens:,.0f} tokens a rank"] if tokens else []
        parts.append(_text(4, y + 17, f"ring {ring:,.0f}"))
        parts.append(_rectangle(left, y, measured / longest * width, 26, fill=RANK_COLOURS[0], class_="bar"))
        if alone and ring > 1:
            at = left + alone / ring / longest * width
            parts.append(_line(at, y - 3, at, y + 29, class_="ink ideal", stroke_width=2))
            beside.append(f"ideal {megabytes(alone / ring)}")
        for line, (content, look) in enumerate([(megabytes(measured), "strong"), *((b, "soft small") for b in beside)]):
            parts.append(_text(left + width + 14, y + 6 + 15 * line, content, look))
    bottom = top + len(rows) * row_height
    if alone:
        parts.append(_line(left + 1, bottom + 2, left + 1, bottom + 16, class_="ink", stroke_width=2))
        parts.append(_text(left + 10, bottom + 13, "ideal: ring 1 divided by the number of ranks", "soft small"))
    spoken = "; ".join(f"ring {ring:,.0f}: {megabytes(measured)}" for ring, measured, _ in rows)
    return _svg(460, bottom + 24, f"Activation memory a rank. {spoken}.", *parts)


def category_picture(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes a rank by category, as SVG: a bar a row, its categories from left to right; what all share is said once.

    Args:
        rows: those of ``bench memory``, with "tokens_per_rank", "checkpoint", "variant" and "bytes" by category.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["bytes"]))
    if not names or len(names) > len(RANK_COLOURS):
        return ""
    colours = dict(zip(names, RANK_COLOURS, strict=False))
    left, width, row_height, top = 4.0, 420.0, 46.0, 50.0
    longest = max(sum(row["bytes"].values()) for row in rows) or 1
    facts = [
        (f"ring {row['ring']}", f"{row['tokens_per_rank']:,} tokens a rank", row["checkpoint"], row["variant"])
        for row in rows
    ]
    differs = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    parts: list[str] = []
    for index, name in enumerate(names):
        x, y = left + 150 * (index % 3), 4 + 16 * (index // 3)
        parts += [_rectangle(x, y, 10, 10, fill=colours[name]), _text(x + 15, y + 10, name, "small")]
    parts.append(_text(left, 46, ", ".join(compress(facts[0], [not each for each in differs])), "small"))
    for index, row in enumerate(rows):
        y, x = top + 8 + index * row_height, left
        said = ", ".join(compress(facts[index], differs)) or "in all"
        parts.append(_text(left, y + 10, f"{said}: {megabytes(sum(row['bytes'].values()))}", "small"))
        for name, held in row["bytes"].items():
            parts.append(_rectangle(x, y + 15, held / longest * width, 18, fill=colours[name], data_category=name))
            x += held / longest * width
    spoken = "; ".join(f"{row['checkpoint']} {row['variant']}: {megabytes(sum(row['bytes'].values()))}" for row in rows)
    return _svg(left + width + 8, top + 14 + len(rows) * row_height, f"Memory a rank by category. {spoken}.", *parts)


def number(value: Any) -> float | None:
    """The value when it is a finite number, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) else None


def megabytes(num_bytes: float) -> str:
    """Bytes as text in megabytes of 1e6 bytes."""
    return f"{num_bytes / 1e6:,.1f} MB"


def element(tag: str, *children: str, **attributes: object) -> str:
    """One element with its attributes escaped; ``children`` are markup. ``fill_opacity`` is written fill-opacity."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_short(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>"


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _svg(width: float, height: float, label: str, *parts: str) -> str:
    return element(
        "svg",
        element("style", _STYLE),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(float(width))} {_short(float(height))}",
        class_="ringspan",
        role="img",
        aria_label=label,
    )


def _text(x: float, y: float, content: object, class_: str = "", anchor: str = "start", **more: object) -> str:
    return element("text", escape(str(content)), x=x, y=y, class_=class_, text_anchor=anchor, **more)


def _rectangle(x: float, y: float, width: float, height: float, **more: object) -> str:
    return element("rect", x=x, y=y, width=width, height=height, **more)


def _line(x1: float, y1: float, x2: float, y2: float, **more: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **more)


def _marker(at: Point, title: str, colour: str, *, opacity: int = 1, diamond: bool = False) -> str:
    """A dot or a diamond that says its value when pointed at."""
    x, y = at
    told, look = element("title", escape(title)), {"class_": "edge", "fill": colour, "opacity": opacity}
    if diamond:
        return element("path", told, d=_path([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)]), **look)
    return element("circle", told, cx=x, cy=y, r=4.5, **look)


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


def _tile(pieces: Iterable[Iterable[Point]], layout: Layout, rank: int, hop: Hop) -> str:
    """All that a rank computes at one hop, as one path in positions."""
    title = f"rank {rank}, hop {hop.index}: keys of rank {hop.owner}, {hop.num_pairs:,} pairs"
    return element(
        "path",
        element("title", title),
        class_="tile edge",
        d=" ".join(_path(piece) for piece in pieces),
        fill=RANK_COLOURS[rank],
        fill_opacity=1 - 0.6 * hop.index / max(1, layout.ranks - 1),
        vector_effect="non-scaling-stroke",
        data_rank=rank,
        data_hop=hop.index,
    )


def _pieces(layout: Layout, rank: int, hop: Hop) -> Iterator[list[Point]]:
    """The hop's tiles as polygons over (key position, query position); one position is one unit wide."""
    queries, keys = layout.spans(rank), layout.spans(hop.owner)
    for tile in hop.tiles:
        if queries[0].step > 1:
            yield from _cells(tile, layout.positions(rank), layout.positions(hop.owner))
        else:
            yield from _polygons(tile, queries, keys)


def _cells(tile: Tile, queries: Any, keys: Any) -> Iterator[list[Point]]:
    """Unit squares: neighbours in storage lie ``step`` positions apart."""
    rows, columns = np.arange(tile.num_rows)[:, None], np.arange(tile.num_keys)[None, :]
    for i, j in np.argwhere((tile.lo <= rows - columns) & (rows - columns <= tile.hi)).tolist():
        yield _box(int(keys[tile.k0 + j]), int(queries[tile.q0 + i]), 1, 1)


def _polygons(tile: Tile, queries: Sequence[Span], keys: Sequence[Span]) -> Iterator[list[Point]]:
    """A tile cut at the seams between spans, each part where its positions are; staircases become straight edges."""
    for row, query in _stored(queries):
        i0, i1 = max(tile.q0, row), min(tile.q1, row + query.count)
        for column, key in _stored(keys):
            j0, j1 = max(tile.k0, column), min(tile.k1, column + key.count)
            if i0 >= i1 or j0 >= j1:
                continue
            down, right = query.start - row, key.start - column
            polygon = _box(j0 + right, i0 + down, j1 - j0, i1 - i0)
            shift = (tile.q0 + down) - (tile.k0 + right)  # of the band, from the tile's corner to positions
            # Half a unit out, where a straight edge has the area of the staircase that it stands for.
            if tile.has_lower:
                polygon = _clip(polygon, tile.lo + shift - 0.5, 1)
            if tile.has_upper:
                polygon = _clip(polygon, tile.hi + shift + 0.5, -1)
            if polygon:
                yield polygon


def _stored(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the local index of its first token."""
    index = 0
    for span in spans:
        yield index, span
        index += span.count


def _box(x: float, y: float, width: float, height: float) -> list[Point]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _clip(polygon: list[Point], bound: float, sign: int) -> list[Point]:
    """The part of a convex polygon on one side of ``y - x = bound`` (Sutherland and Hodgman 1974)."""
    kept: list[Point] = []
    for (x0, y0), (x1, y1) in pairwise([*polygon, *polygon[:1]]):
        here, there = sign * (y0 - x0 - bound), sign * (y1 - x1 - bound)
        if here >= 0:
            kept.append((x0, y0))
        if here * there < 0:
            part = here / (here - there)
            kept.append((x0 + part * (x1 - x0), y0 + part * (y1 - y0)))
    return kept


def _path(polygon: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_short(float(x))} {_short(float(y))}" for x, y in polygon) + "Z"


def _area(polygon: list[Point]) -> float:
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise([*polygon, polygon[0]]))) / 2


def _centre(polygon: list[Point]) -> Point:
    """Centre of area, by triangles around the first corner."""
    (x0, y0), total, x, y = polygon[0], 0.0, 0.0, 0.0
    for a, b in pairwise(polygon[1:]):
        area = _area([polygon[0], a, b])
        total, x, y = total + area, x + area * (x0 + a[0] + b[0]) / 3, y + area * (y0 + a[1] + b[1]) / 3
    return (x / total, y / total)


def _room(polygon: list[Point]) -> float:
    """Area over perimeter: a quarter of a square's side, half the thickness of a band."""
    return _area(polygon) / sum(hypot(x1 - x0, y1 - y0) for (x0, y0), (x1, y1) in pairwise([*polygon, polygon[0]]))


def _position_ticks(length: int, left: float, top: float, scale: float) -> Iterator[str]:
    quarters = [length * part // 4 for part in range(5)] if length % 4 == 0 else [0, length // 2, length]
    for position in quarters:
        anchor = "start" if position == 0 else "end" if position == length else "middle"
        at = f"{position:,}" if length < 100_000 else f"{position / 1000:,.0f}K"
        yield _text(left + position * scale, top - 18, at, "soft small", anchor)
        yield _text(left - 16, top + position * scale + 4, at, "soft small", "end")


def _owner_strips(layout: Layout, left: float, top: float, scale: float) -> Iterator[str]:
    """Beside the square: who holds these queries; above it: who holds these keys."""
    for rank in range(layout.ranks):
        held = [run for span in layout.spans(rank) for run in _runs(span, layout.length)]
        for start, stop in union(held):
            title = element("title", f"positions {start:,} to {stop - 1:,}: rank {rank}")
            first, extent, look = start * scale, (stop - start) * scale, {"fill": RANK_COLOURS[rank]}
            yield element("rect", title, x=left + first, y=top - 12, width=extent, height=8.0, **look)
            yield element("rect", title, x=left - 12, y=top + first, width=8.0, height=extent, **look)


def _runs(span: Span, length: int) -> Iterator[tuple[int, int]]:
    """The positions of a span below ``length``, as ranges."""
    starts = [span.start] if span.step == 1 else range(span.start, length, span.step)
    size_of_run = span.count if span.step == 1 else 1
    yield from ((start, min(start + size_of_run, length)) for start in starts if start < length)


def _work_legend(shares: list[float], top: float) -> tuple[list[str], float]:
    """A bar a rank, in two columns from five ranks on, the even share marked; and where the legend ends."""
    columns = 2 if len(shares) > 4 else 1
    pitch, longest = 432 / columns, max(*shares, 1e-9) if len(shares) > 1 else 100.0
    bar = pitch - 136
    parts: list[str] = []
    for rank, share in enumerate(shares):
        x, y = 4 + (rank % columns) * pitch, top + rank // columns * 22
        even = x + 60 + 100 / len(shares) / longest * bar
        parts += [
            _text(x, y + 12, f"rank {rank}"),
            _rectangle(x + 60, y, share / longest * bar, 14, fill=RANK_COLOURS[rank]),
            _text(x + 68 + max(share / longest * bar, even - x - 60), y + 12, f"{share:.1f} %", "strong"),
        ]
        if len(shares) > 1:
            parts.append(_line(even, y - 2, even, y + 16, class_="ink", stroke_width=2))
    bottom = top + ceil(len(shares) / columns) * 22
    if len(shares) > 1:
        parts += [_line(8, bottom + 6, 8, bottom + 18, class_="ink", stroke_width=2)]
        parts += [_text(16, bottom + 16, f"an even share, {100 / len(shares):.4g} %", "soft small")]
        bottom += 22
    return parts, bottom + 4


def _block(layout: Layout, rank: int, hop: Hop, x: float, y: float, width: float) -> Iterator[str]:
    """One cell of the travel table: the owner's block, filled where it is present."""
    tokens = layout.tokens_per_rank
    present: Ranges = hop.arrives.ranges if hop.index else ((0, tokens),)
    share = f"{100 * size(present) / tokens:.0f} %"
    verb = "computes with" if hop.num_pairs else "only passes on"
    title = f"hop {hop.index}: rank {rank} {verb} {size(present):,} of {tokens:,} tokens of rank {hop.owner}"
    yield _rectangle(x, y, width, 16, class_="ground grid", stroke_width=1)
    for start, stop in present:
        yield element(
            "rect",
            element("title", title),
            x=x + start / tokens * width,
            y=y,
            width=(stop - start) / tokens * width,
            height=16,
            class_="carried",
            fill=RANK_COLOURS[hop.owner],
            fill_opacity=1.0 if hop.num_pairs else 0.4,
            data_rank=rank,
            data_hop=hop.index,
        )
    told = "own" if hop.index == 0 else f"r{hop.owner}: {share}" if present else "nothing"
    yield _text(x + width / 2, y + 30, told, "soft small", "middle")


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    pairs = ((number(row.get("step")), number(row.get(name))) for row in rows)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _thin(points: list[Point], most: int) -> list[Point]:
    """At most about that many points, evenly taken, the last one always."""
    stride = max(1, ceil(len(points) / most))
    return points[::-1][::stride][::-1]


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest; around a single value, room on both sides."""
    values = list(values)
    low, high = min(values), max(values)
    room = 0.0 if high > low else max(0.5, abs(low) / 100)
    return low - room, high + room


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    power = 10.0 ** floor(log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= most)
    return [round(index * step, 12) for index in range(ceil(low / step), floor(high / step) + 1)]


def _apart(heights: list[float], gap: float) -> list[float]:
    """The same heights with neighbours at least ``gap`` apart; meant for two."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    moved = list(heights)
    for upper, lower in pairwise(order):
        push = max(0.0, gap - (moved[lower] - moved[upper])) / 2
        moved[upper], moved[lower] = moved[upper] - push, moved[lower] + push
    return moved
