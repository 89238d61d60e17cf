"""Numbers as inline SVG: loss by step, and memory by ring and by category."""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, pairwise
from math import ceil, floor, isfinite, log10
from numbers import Real
from typing import Any

from ringspan.report.svg import RANK_COLOURS, Point, element, line, marker, rectangle, svg, text


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
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, _thin(series, 600)))
        parts.append(
            element("polyline", points=points, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash)
        )
    for step, loss in _thin(train, 120):  # the last is seen, the others are there to be pointed at
        title, seen = f"step {step:,.0f}: loss {loss:.4f}", int((step, loss) == train[-1])
        parts.append(marker(place((step, loss)), title, RANK_COLOURS[0], opacity=seen))
    for step, loss in _thin(evaluated, 120):
        title = f"step {step:,.0f}: evaluation loss {loss:.4f}"
        parts.append(marker(place((step, loss)), title, RANK_COLOURS[5], diamond=True))
    last = [(name, series[-1]) for name, series in (("train", train), ("eval", evaluated)) if series]
    heights = _apart([place(point)[1] for _, point in last], 17)
    for (name, (_, loss)), y in zip(last, heights, strict=True):
        parts.append(text(_RIGHT + 12, y + 4, f"{name} {loss:.3f}", "strong"))
    spoken = "; ".join(f"{name} loss {loss:.4f} at step {step:,.0f}" for name, (step, loss) in last)
    return svg(500, _BOTTOM + 54, f"Loss by step. Last: {spoken}.", *parts)


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

    parts = [line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, class_="grid")]
    for tick in y_ticks:
        y = place((x_low, tick))[1]
        parts += [line(_LEFT, y, _RIGHT, y, class_="grid"), text(_LEFT - 8, y + 4, f"{tick:,g}", "soft", "end")]
    for tick in x_ticks:
        x = place((tick, y_low))[0]
        parts.append(line(x, _BOTTOM, x, _BOTTOM + 5, class_="grid"))
        parts.append(text(x, _BOTTOM + 20, f"{tick:,.0f}", "soft", "middle"))
    middle = f"translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)"
    parts.append(text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "step", "soft", "middle"))
    parts.append(text(0, 0, "loss (nats a token)", "soft", "middle", transform=middle))
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
        parts.append(text(4, y + 17, f"ring {ring:,.0f}"))
        parts.append(rectangle(left, y, measured / longest * width, 26, fill=RANK_COLOURS[0], class_="bar"))
        if alone and ring > 1:
            at = left + alone / ring / longest * width
            parts.append(line(at, y - 3, at, y + 29, class_="ink ideal", stroke_width=2))
            beside.append(f"ideal {megabytes(alone / ring)}")
        lines = [(megabytes(measured), "strong"), *((said, "soft small") for said in beside)]
        for below, (content, look) in enumerate(lines):
            parts.append(text(left + width + 14, y + 6 + 15 * below, content, look))
    bottom = top + len(rows) * row_height
    if alone:
        parts.append(line(left + 1, bottom + 2, left + 1, bottom + 16, class_="ink", stroke_width=2))
        parts.append(text(left + 10, bottom + 13, "ideal: ring 1 divided by the number of ranks", "soft small"))
    spoken = "; ".join(f"ring {ring:,.0f}: {megabytes(measured)}" for ring, measured, _ in rows)
    return svg(460, bottom + 24, f"Activation memory a rank. {spoken}.", *parts)


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
        parts += [rectangle(x, y, 10, 10, fill=colours[name]), text(x + 15, y + 10, name, "small")]
    parts.append(text(left, 46, ", ".join(compress(facts[0], [not each for each in differs])), "small"))
    for index, row in enumerate(rows):
        y, x = top + 8 + index * row_height, left
        said = ", ".join(compress(facts[index], differs)) or "in all"
        parts.append(text(left, y + 10, f"{said}: {megabytes(sum(row['bytes'].values()))}", "small"))
        for name, held in row["bytes"].items():
            parts.append(rectangle(x, y + 15, held / longest * width, 18, fill=colours[name], data_category=name))
            x += held / longest * width
    spoken = "; ".join(f"{row['checkpoint']} {row['variant']}: {megabytes(sum(row['bytes'].values()))}" for row in rows)
    return svg(left + width + 8, top + 14 + len(rows) * row_height, f"Memory a rank by category. {spoken}.", *parts)


def number(value: Any) -> float | None:
    """The value when it is a finite number, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) else None


def megabytes(num_bytes: float) -> str:
    """Bytes as text in megabytes of 1e6 bytes."""
    return f"{num_bytes / 1e6:,.1f} MB"


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
