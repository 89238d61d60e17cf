"""Pictures of numbers: loss by step, and memory by ring."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, cos, isfinite, pi, sin
from numbers import Real
from typing import TYPE_CHECKING, Any

from ringspan.report.drawing import (
    INK,
    PAPER,
    RANK_COLOURS,
    SOFT,
    Point,
    canvas,
    dress,
    line,
    panel,
    polygons,
    rectangle,
    spots,
    text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_picture(metrics: Sequence[dict[str, Any]], evaluation: Sequence[dict[str, Any]] = ()) -> "Figure | None":
    """Draw loss (nats per token) by step, evaluation loss as diamonds; None without data.

    Args:
        metrics: rows with "step" and "loss"; rows without a finite loss are left out.
        evaluation: rows with "step" and "eval_loss".
    """
    train, evaluated = _series(metrics, "loss"), _series(evaluation, "eval_loss")
    if not (train or evaluated):
        return None
    from matplotlib.ticker import MaxNLocator

    # Said in words too, for those who do not see the picture.
    last = [(name, series[-1]) for name, series in (("train", train), ("eval", evaluated)) if series]
    spoken = "; ".join(f"{name} loss {loss:.4f} at step {step:,.0f}" for name, (step, loss) in last)
    left, top, right, bottom = 66.0, 16.0, 390.0, 226.0
    figure, page = canvas(500, bottom + 54, f"Loss by step. Last: {spoken}.")
    axes = panel(figure, (left, top), (right - left, bottom - top), *_limits(train + evaluated))
    axes.set_axis_on()
    dress(axes, "step", "loss (nats per token)", 13)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,g}")

    def place(point: Point) -> Point:
        x, up = axes.transData.transform(point)
        return x, bottom + 54 - up  # matplotlib counts pixels from below

    for colour, series, style in ((RANK_COLOURS[0], train, "-"), (RANK_COLOURS[5], evaluated, (0, (2.5, 2)))):
        points = _thin(series, 500)
        line(axes, [x for x, _ in points], [y for _, y in points], colour, 2, linestyle=style, gid="curve|")
    # More stripes than that are narrower than a pointer.
    if shown := _thin(train, 120):
        middles = [(here + there) / 2 for (here, _), (there, _) in pairwise(shown)]
        edges = [axes.get_xlim()[0], *middles, axes.get_xlim()[1]]
        spots(axes, edges, (f"step {step:,.0f}: loss {loss:.4f}" for step, loss in shown))
        _draw_marker(page, place(train[-1]), RANK_COLOURS[0], f"step {train[-1][0]:,.0f}: loss {train[-1][1]:.4f}")
    for step, loss in _thin(evaluated, 120):
        title = f"step {step:,.0f}: evaluation loss {loss:.4f}"
        _draw_marker(page, place((step, loss)), RANK_COLOURS[5], title, diamond=True)
    # Both curves mostly end near each other, and so would their numbers.
    heights = _apart([place(point)[1] for _, point in last], 17)
    for (name, (_, loss)), y in zip(last, heights, strict=True):
        text(page, right + 12, y + 4, f"{name} {loss:.3f}", strong=True)
    return figure


def _limits(points: Sequence[Point]) -> tuple[Point, Point]:
    """Return the limits of the axes: left, right, bottom, top."""
    low, high = _extent(y for _, y in points)
    room = (high - low) / 16  # the last point of a good run is the lowest: keep its marker off the axis
    return _extent(x for x, _ in points), (low - room, high + room)


def _draw_marker(page: "Axes", at: Point, colour: str, title: str, *, diamond: bool = False) -> None:
    """Draw a dot or a diamond that shows its value on hover."""
    x, y = at
    across = 6 if diamond else 4.5
    turns = [0, 1, 2, 3] if diamond else [eighth / 4 for eighth in range(16)]
    corners = [(x + across * cos(turn * pi / 2), y + across * sin(turn * pi / 2)) for turn in turns]
    polygons(page, [corners], colour, edge=PAPER, kind="marker", title=title)


def memory_picture(memory: Sequence[dict[str, Any]]) -> "Figure | None":
    """Draw activation megabytes (1e6 bytes) per rank by ring size, with 1/N of ring 1 marked; None without data.

    Args:
        memory: rows with "ring", "activation_bytes" and, if known, "tokens_per_rank".
    """
    read = [tuple(number(row.get(name)) for name in ("ring", "activation_bytes", "tokens_per_rank")) for row in memory]
    rows = [
        (ring, measured, tokens) for ring, measured, tokens in read if ring and measured and min(ring, measured) > 0
    ]
    if not rows:
        return None
    alone = next((measured for ring, measured, _ in rows if ring == 1), None)
    left, width, row_height, top = 64.0, 266.0, 54.0, 8.0
    longest = max(measured for _, measured, _ in rows)
    bottom = top + len(rows) * row_height
    spoken = "; ".join(f"ring {ring:,.0f}: {megabytes(measured)}" for ring, measured, _ in rows)
    figure, page = canvas(480, bottom + 24, f"Activation memory per rank. {spoken}.")
    for index, (ring, measured, tokens) in enumerate(rows):
        y = top + index * row_height
        beside = [f"{tokens:,.0f} tokens per rank"] if tokens else []
        text(page, 4, y + 17, f"ring {ring:,.0f}")
        rectangle(page, left, y, measured / longest * width, 26, RANK_COLOURS[0], kind="bar")
        if alone and ring > 1:
            at = left + alone / ring / longest * width
            line(page, (at, at), (y - 3, y + 29), INK, 2, gid="ideal|")
            beside.append(f"ideal {megabytes(alone / ring)}")
        text(page, left + width + 14, y + 6, megabytes(measured), strong=True)
        for below, said in enumerate(beside, 1):
            text(page, left + width + 14, y + 6 + 15 * below, said, SOFT, size=11)
    if alone:
        line(page, (left + 1, left + 1), (bottom + 2, bottom + 16), INK, 2)
        text(page, left + 10, bottom + 13, "ideal: ring 1 divided by the number of ranks", SOFT, size=11)
    return figure


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) else None


def megabytes(num_bytes: float) -> str:
    """Format bytes in megabytes of 1e6 bytes."""
    return f"{num_bytes / 1e6:,.1f} MB"


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    pairs = ((number(row.get("step")), number(row.get(name))) for row in rows)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _thin(points: list[Point], most: int) -> list[Point]:
    """Pick at most about that many evenly spaced points, always with the last one."""
    stride = max(1, ceil(len(points) / most))
    return points[::-1][::stride][::-1]


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """Return lowest and highest; with room on both sides of a single value."""
    values = list(values)
    low, high = min(values), max(values)
    room = 0.0 if high > low else max(0.5, abs(low) / 100)
    return low - room, high + room


def _apart(heights: list[float], gap: float) -> list[float]:
    """Move neighbouring heights at least ``gap`` apart; meant for two."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    moved = list(heights)
    for upper, lower in pairwise(order):
        push = max(0.0, gap - (moved[lower] - moved[upper])) / 2
        moved[upper], moved[lower] = moved[upper] - push, moved[lower] + push
    return moved
