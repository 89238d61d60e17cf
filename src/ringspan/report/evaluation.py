"""Pictures and page of ``ringspan eval``: accuracy by length and depth, and loss by position."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspan.report import drawing as draw
from ringspan.report.drawing import GRID, INK, PAPER, RANK_COLOURS, SOFT
from ringspan.report.page import command, element, page, section, table, write_whole
from ringspan.report.page import picture as drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]
_CELL, _LEFT = (62.0, 30.0), 76.0
_DARK_FROM = 0.7
# The panel of the curves, in points from the left and the top.
_FROM, _TO, _TOP, _BOTTOM = 66.0, 420.0, 16.0, 250.0


def short_names(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, or whole names if these collide."""
    last = [name.rstrip("/").rpartition("/")[2] or name for name in names]
    return last if len(set(last)) == len(last) else [*names]


def _names(results: Sequence[Result]) -> list[str]:
    return short_names([str(result["model"]) for result in results])


def write_page(
    results: Sequence[dict[str, Any]], path: Path, line: str, about: str = ""
) -> None:
    """Write a task's page, a result per model, whole or not at all; ``line`` is the command line."""
    is_map = any("depth" in row for result in results for row in result["rows"])
    said = (
        "Point at a cell for its 95% interval."
        if is_map
        else "Bands are 95% intervals. Point at a curve for values."
    )
    figure = element(
        "figure", drawn(picture, results), element("figcaption", said), class_="map"
    )
    tables = (
        _section(name, result)
        for name, result in zip(_names(results), results, strict=True)
    )
    lead = element("p", escape(about), class_="lead task")
    style = ".map svg { max-width: 640px } .task { max-width: 60rem }"
    title = f"ringspan eval {results[0]['task']}"
    write_whole(path, page(title, lead, figure, *tables, command(line), style=style))


def _section(name: str, result: dict[str, Any]) -> str:
    """Return a model's section: its folder, a table of its rows, and the skipped lengths with reasons."""
    heads, rows = cells(result["rows"])
    skipped = (
        f"Skipped: {each['length']:,} tokens, {each['why']}."
        for each in result["skipped"]
    )
    # perplexity draws nothing at random, so it has no seed.
    drawn_by = f", seed {result['seed']}" if result["task"] != "perplexity" else ""
    where, *notes = (
        element("p", escape(each), class_="soft")
        for each in (f"{result['model']}{drawn_by}", *skipped)
    )
    return section(
        name, where, table(rows, heads, class_="numbers"), *notes, name=f"model-{name}"
    )


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: loss by position, or accuracy by length, and by depth if rows have it."""
    if any("loss" in row for row in rows):
        heads = [
            "positions",
            "nats per token",
            "95% interval",
            "bits per byte",
            "documents",
        ]
        return heads, [
            [
                f"{row['start']:,} to {row['length'] - 1:,}",
                f"{row['loss']:.4f}",
                *_interval(row),
                f"{row['items']:,}",
            ]
            for row in rows
        ]
    depth = ["depth"] * any("depth" in row for row in rows)
    heads = ["tokens", *depth, "accuracy", "95% interval", "items"]
    return heads, [
        [
            f"{row['length']:,}",
            *(f"{row[name]:g}" for name in depth),
            *_accuracy(row),
            f"{row['items']:,}",
        ]
        for row in rows
    ]


def _accuracy(row: Result) -> tuple[str, str]:
    return f"{row['accuracy']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}"


def _interval(row: Result) -> tuple[str, str]:
    interval = "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
    return interval, "-" if row[
        "bits_per_byte"
    ] is None else f"{row['bits_per_byte']:.4f}"


def picture(results: Sequence[Result]) -> "Figure":
    columns = {name for result in results for row in result["rows"] for name in row}
    if "loss" in columns:
        return curves(results, "loss", "position (tokens)", "loss (nats per token)")
    if "depth" in columns:
        return maps(results)
    return curves(results, "accuracy", "length (tokens)", "accuracy")


def save_picture(results: Sequence[Result], path: Path) -> None:
    figure = picture(results)
    if path.suffix == ".svg":
        path.write_text(draw.svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=144, facecolor=PAPER)


def curves(
    results: Sequence[Result],
    name: str,
    x_label: str,
    y_label: str,
    unit: str = "tokens",
) -> "Figure":
    """Draw a curve per model over lengths (logarithmic), with its 95% interval, and values on hover."""
    names = _names(results)
    legend = _BOTTOM + 58
    spoken = "; ".join(
        f"{model}: "
        + ", ".join(
            f"{_value(row[name], name)} at {row['length']:,}" for row in result["rows"]
        )
        for model, result in zip(names, results, strict=True)
    )
    label = f"{y_label} by {x_label}. {spoken}."
    figure, ground = draw.canvas(460, legend + 18 * len(names) + 4, label)
    rows = [row for result in results for row in result["rows"]]
    lengths = sorted({row["length"] for row in rows})
    room = 0.25 if len(lengths) == 1 else 0.0
    across = (lengths[0] * (1 - room), lengths[-1] * (1 + room))
    axes = draw.panel(
        figure,
        (_FROM, _TOP),
        (_TO - _FROM, _BOTTOM - _TOP),
        across,
        _limits(rows, name),
    )
    _scale(axes, lengths, name)
    draw.dress(axes, x_label, y_label, 12)
    for at, (model, result) in enumerate(zip(names, results, strict=True)):
        colour = RANK_COLOURS[at % len(RANK_COLOURS)]
        style = {} if at < len(RANK_COLOURS) else {"linestyle": "--"}
        _interval_of(axes, result["rows"], colour)
        _curve(axes, result["rows"], name, colour, style)
        y = legend + 18 * at
        draw.line(ground, (_FROM, _FROM + 18), (y, y), colour, 3, **style)
        draw.text(ground, _FROM + 26, y + 4, model, size=12)
    middles = [(here * there) ** 0.5 for here, there in pairwise(lengths)]
    draw.spots(
        axes,
        [across[0], *middles, across[1]],
        (
            f"{length:,} {unit}. {_values(names, results, name, length)}"
            for length in lengths
        ),
    )
    return figure


def _scale(axes: "Axes", lengths: Sequence[int], name: str) -> None:
    """Show at most seven lengths on a logarithmic axis, and accuracies as percentages."""
    axes.set_xscale("log", base=2)
    axes.set_axis_on()
    shown = lengths if len(lengths) < 8 else lengths[:: len(lengths) // 6 + 1]
    axes.set_xticks(shown, [_short(length) for length in shown])
    axes.set_xticks([], minor=True)
    if name == "accuracy":
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])


def _interval_of(axes: "Axes", rows: Sequence[Result], colour: str) -> None:
    """Draw the intervals that are known: a band, or a bar if there is only one."""
    sure = [row for row in rows if row["low"] is not None]
    if len(sure) > 1:
        upper = [(row["length"], row["high"]) for row in sure]
        lower = [(row["length"], row["low"]) for row in sure[::-1]]
        draw.polygons(axes, [upper + lower], colour, opacity=0.16, kind="band")
    elif sure:
        [row] = sure
        draw.line(axes, 2 * [row["length"]], (row["low"], row["high"]), colour, 1)


def _curve(
    axes: "Axes", rows: Sequence[Result], name: str, colour: str, style: dict[str, str]
) -> None:
    lengths, values = [row["length"] for row in rows], [row[name] for row in rows]
    draw.line(axes, lengths, values, colour, 2, gid="curve|", **style)
    for row in rows:
        draw.dot(axes, (row["length"], row[name]), colour, 6)


def maps(results: Sequence[Result]) -> "Figure":
    """Draw a map per model: a column per length, a row per depth, accuracy as colour and number."""
    names = _names(results)
    rows = [row for result in results for row in result["rows"]]
    lengths, depths = (
        sorted({row["length"] for row in rows}),
        sorted({row["depth"] for row in rows}),
    )
    wide, high = _CELL
    block = 30 + high * len(depths) + 40
    spoken = "; ".join(
        f"{model}: {sum(row['accuracy'] for row in result['rows']) / len(result['rows']):.0%} on average"
        for model, result in zip(names, results, strict=True)
        if result["rows"]
    )
    width = max(_LEFT + wide * len(lengths) + 16, 300)
    figure, ground = draw.canvas(
        width, block * len(names) + 14, f"Accuracy by length and depth. {spoken}."
    )
    for at, (model, result) in enumerate(zip(names, results, strict=True)):
        top = block * at + 30
        bottom = top + high * len(depths)
        draw.text(ground, _LEFT, top - 10, model, size=12, strong=True)
        found = {(row["length"], row["depth"]): row for row in result["rows"]}
        for down, depth in enumerate(depths):
            y = top + down * high
            draw.text(
                ground,
                _LEFT - 10,
                y + high / 2 + 4,
                f"{depth:.0%}",
                SOFT,
                "right",
                size=11,
            )
            for over, length in enumerate(lengths):
                _cell(ground, _LEFT + over * wide, y, found.get((length, depth)), model)
        for over, length in enumerate(lengths):
            draw.text(
                ground,
                _LEFT + (over + 0.5) * wide,
                bottom + 16,
                _short(length),
                SOFT,
                "center",
                size=11,
            )
        draw.text(ground, _LEFT, bottom + 32, "length (tokens)", SOFT, size=11)
        draw.text(
            ground,
            18,
            top + high * len(depths) / 2,
            "depth",
            SOFT,
            "center",
            size=11,
            rotation=90,
        )
    return figure


def _cell(ground: "Axes", x: float, y: float, row: Result | None, model: str) -> None:
    """Draw a length and depth of the map: the accuracy as opacity and as a number, or an empty cell if not measured."""
    wide, high = _CELL
    if row is None:
        draw.rectangle(
            ground,
            x + 1,
            y + 1,
            wide - 2,
            high - 2,
            GRID,
            kind="cell",
            title=f"{model}: not measured",
        )
        return
    value = row["accuracy"]
    said = f"{model}, {row['length']:,} tokens, depth {row['depth']:.0%}: {_sure(row)}"
    draw.rectangle(
        ground,
        x + 1,
        y + 1,
        wide - 2,
        high - 2,
        RANK_COLOURS[0],
        opacity=0.06 + 0.94 * value,
        kind="cell",
        title=said,
    )
    # Text is white on a strong colour, in light and dark schemes; on a faint one it has the page's ink.
    colour = "#fffffe" if value >= _DARK_FROM else INK
    draw.text(
        ground,
        x + wide / 2,
        y + high / 2 + 4,
        f"{value:.0%}",
        colour,
        "center",
        size=11,
    )


def _limits(rows: Sequence[Result], name: str) -> tuple[float, float]:
    if name == "accuracy":
        return -0.02, 1.02
    values = [
        value
        for row in rows
        for value in (row[name], row["low"], row["high"])
        if value is not None
    ]
    room = (max(values) - min(values)) / 12 or 0.1
    return min(values) - room, max(values) + room


def _values(
    names: Sequence[str], results: Sequence[Result], name: str, length: int
) -> str:
    return "; ".join(
        f"{model}: {_sure(row, name)}"
        for model, result in zip(names, results, strict=True)
        for row in result["rows"]
        if row["length"] == length
    )


def _sure(row: Result, name: str = "accuracy") -> str:
    interval = (
        ""
        if row["low"] is None
        else f" ({_value(row['low'], name)} to {_value(row['high'], name)})"
    )
    return f"{_value(row[name], name)}{interval}, n = {row['items']}"


def _value(value: float, name: str) -> str:
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4f}"


def _short(length: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if length >= size and length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"
