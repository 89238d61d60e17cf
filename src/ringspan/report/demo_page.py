"""The page of ``ringspan demo``: what was trained, proved and measured."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal
from ringspan.core.schedule.schedule import make_schedule
from ringspan.report import drawing as draw
from ringspan.report.drawing import INK, RANK_COLOURS, SOFT, Point
from ringspan.report.page import (
    command,
    element,
    escaped,
    page,
    picture,
    section,
    table,
    write_whole,
)
from ringspan.report.ring_pictures import ring_picture, travel_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# rows of a long table, so that the file stays small enough to send
MAX_ROWS: Final = 400


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write a run's report, the object of ``ringspan demo --json``, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        "Loss": _loss(result["metrics"], result["evaluation"]),
        "Proof: the ring against one process": _proof(result["proof"]),
        "Memory per rank": _memory(result["memory"]),
        "Who computes what": _ring(result),
        "Speed": _speed(result),
        "What ran where": _setting(result),
    }
    sections = (
        section(title, part, name=f"part{index}")
        for index, (title, part) in enumerate(parts.items())
    )
    lead = element("p", _headline(result), class_="lead")
    write_whole(
        path, page("ringspan report", lead, *sections, command(result["command"]))
    )


def _headline(result: dict[str, Any]) -> str:
    """Return one paragraph: model, steps, and how far loss, gradients and activations are from one process."""
    model, ranks, steps = result["model"], result["ranks"], result["metrics"]
    worst = _gradients(result["proof"])[0]["relative_difference"]
    held = {row["ring"]: row["activation_bytes"] for row in result["memory"]}
    came = [
        f"its loss went from {_number(steps[0]['loss'], '.3f')} to {_number(steps[-1]['loss'], '.3f')}",
        "the loss of one batch differs from that of a single process by "
        f"{result['proof']['loss_relative_difference']:.1e} (relative)",
        f"no gradient by more than {worst:.1e}"
        if isfinite(worst)
        else "some gradients are not numbers",
    ]
    if max(held) > 1:
        came.append(
            f"activations take {megabytes(held[max(held)])} per rank on a ring of {max(held)}, {megabytes(held[1])} on "
            "one"
        )
    return (
        f"A {escaped(model['type'])} model of {model['parameters'] / 1e6:,.1f} million parameters was trained for "
        f"{len(steps):,} step{'s' * (len(steps) != 1)} on sequences of {result['sequence_length_tokens']:,} tokens, "
        f"each split over {ranks:,} process{'es' * (ranks != 1)}: {'; '.join(came)}."
    )


_STEP_COLUMNS: Final = (
    ("step", "step", ""),
    ("loss", "loss", ".4f"),
    ("grad_norm", "gradient norm", ".3f"),
    ("lr", "learning rate", ".2e"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("matmul_utilization", "of matmul speed", ".1%"),
    ("peak_bytes", "peak bytes", ",.0f"),
    ("seconds", "seconds", ",.2f"),
)


def _loss(metrics: list[dict[str, Any]], evaluation: list[dict[str, Any]]) -> str:
    steps = [
        [_number(row[name], form) for name, _, form in _STEP_COLUMNS] for row in metrics
    ]
    points = [[row["step"], _number(row["eval_loss"], ".4f")] for row in evaluation]
    said = element("figcaption", "Point at the picture for the value at a step.")
    return (
        element("figure", picture(loss_picture, metrics, evaluation), said)
        + _details("Every step", [title for _, title, _ in _STEP_COLUMNS], steps)
        + _details("Evaluation", ("step", "evaluation loss"), points)
    )


def _proof(proof: dict[str, Any]) -> str:
    """Return the comparison of one batch on the ring with one process: losses, gradients, errors against float64."""
    gradients, errors = _gradients(proof), proof["worst_error"]
    worst, middle = gradients[0], gradients[len(gradients) // 2]
    rows = [
        ("loss on one process", f"{proof['loss_one_process']:.7f}"),
        (f"loss on the ring of {proof['ranks']}", f"{proof['loss_ring']:.7f}"),
        ("relative difference of the loss", f"{proof['loss_relative_difference']:.1e}"),
        (f"worst gradient: {worst['name']}", f"{worst['relative_difference']:.1e}"),
        (
            f"median gradient of {len(gradients):,}",
            f"{middle['relative_difference']:.1e}",
        ),
        ("largest error of a gradient against float64, ring", f"{errors['ring']:.1e}"),
        ("the same, one process", f"{errors['one_process']:.1e}"),
    ]
    every = [
        [row["name"], f"{row['norm']:.3e}", f"{row['relative_difference']:.1e}"]
        for row in gradients
    ]
    about = (
        f"One batch of {proof['length']:,} tokens through the same weights, once on one process with the model's own "
        "attention, once on the ring. A difference is the norm of (ring − one process) over the norm of one process. "
        "For scale: rounding a single float32 number changes it by up to 6e-08; a gradient that nearly cancels keeps "
        "more of it, on one process as on the ring, which the errors against float64 tell."
    )
    title = f"All {len(gradients):,} gradients, the worst first"
    details = _details(title, ("parameter", "norm", "relative difference"), every)
    return element("p", about) + table(rows, class_="numbers") + details


def _memory(rows: list[dict[str, Any]]) -> str:
    caption = "Activations that one rank holds for the same sequence, by the size of the ring. 1 MB is 1,000,000 bytes."
    return element(
        "figure", picture(memory_picture, rows), element("figcaption", caption)
    )


def _ring(result: dict[str, Any]) -> str:
    """Return pictures of the work of each rank in this layout and in contiguous chunks, and of what travels.

    Ranks beyond the number of colours are left out. Stripes are drawn for a few positions, with the real shares of
    work.
    """
    name, length, ranks = (
        result["layout"],
        result["sequence_length_tokens"],
        result["ranks"],
    )
    drawn_ranks = min(ranks, len(RANK_COLOURS))
    layout = drawn = Layout(name, length, drawn_ranks)
    notes = [
        "A row is a query, a column a key; causal attention computes the coloured part."
    ]
    if drawn_ranks < ranks:
        notes.append(f"Drawn for {drawn_ranks} ranks, run on {ranks:,}.")
    if name == "striped" and drawn_ranks > 1 and length > 8 * drawn_ranks:
        drawn = Layout(name, 8 * drawn_ranks, drawn_ranks)
        pairs = [
            make_schedule(layout, causal(), rank).num_pairs
            for rank in range(drawn_ranks)
        ]
        shares = ", ".join(f"{100 * count / sum(pairs):.1f} %" for count in pairs)
        notes.append(
            f"Stripes drawn for {drawn.length} positions; on all {length:,} the ranks do {shares} of the work."
        )
    pictures = [picture(ring_picture, drawn, causal())]
    if drawn_ranks > 1 and name != "contiguous":
        pictures.append(
            picture(ring_picture, Layout("contiguous", length, drawn_ranks), causal())
        )
    pictures.append(picture(travel_picture, layout, causal()))
    figures = "".join(element("figure", each) for each in pictures)
    return element("p", " ".join(notes)) + element("div", figures, class_="side")


def _speed(result: dict[str, Any]) -> str:
    """Return tables of the median training speed, the highest memory, and the seconds of each part of the run."""
    metrics, seconds = result["metrics"], result["seconds"]
    rows = [
        (title, format(median(row[name] for row in metrics), form))
        for title, name, form in (
            ("tokens per second", "tokens_per_second", ",.0f"),
            (
                "model FLOP/s over the speed of matrix products here",
                "matmul_utilization",
                ".1%",
            ),
            ("seconds per step", "seconds", ",.2f"),
        )
    ]
    rows.append(
        (
            "highest memory of a process",
            megabytes(max(row["peak_bytes"] for row in metrics)),
        )
    )
    stages = [
        (name, f"{value:,.1f}")
        for name, value in (*seconds.items(), ("total", sum(seconds.values())))
    ]
    training = table(
        rows, caption=f"Training, median of {len(metrics):,} steps", class_="numbers"
    )
    return element(
        "div",
        training,
        table(stages, caption="Seconds by part", class_="numbers"),
        class_="side",
    )


def _setting(result: dict[str, Any]) -> str:
    run = {
        "ranks": result["ranks"],
        "sequence length, tokens": result["sequence_length_tokens"],
        "layout": result["layout"],
        "dtype": result["dtype"],
    }
    parts = {
        "Model": result["model"],
        "Data": result["data"],
        "Run": run,
        "Machine and versions": result["machine"],
    }
    tables = [
        table(
            [
                (key.replace("_", " "), _number(value))
                for key, value in part.items()
                if value is not None
            ],
            (),
            title,
        )
        for title, part in parts.items()
    ]
    return element("div", *tables, class_="side")


def _gradients(proof: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(
        proof["gradients"],
        key=lambda row: (isfinite(d := row["relative_difference"]), -d),
    )


def _number(value: object, form: str = "") -> str:
    if value is None:
        return "not a number"
    return format(
        value,
        form
        or (
            "," if isinstance(value, int) else ".5g" if isinstance(value, float) else ""
        ),
    )


def _details(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    more = (
        element("p", f"The first {MAX_ROWS:,} of {len(rows):,}.")
        if len(rows) > MAX_ROWS
        else ""
    )
    long = {
        "class_": "long",
        "tabindex": 0,
        "role": "region",
        "aria_label": f"Table by {heads[0]}",
    }
    content = element(
        "div", table(rows[:MAX_ROWS], heads, class_="numbers"), more, **long
    )
    return element("details", element("summary", title), content)


def loss_picture(
    metrics: Sequence[dict[str, Any]], evaluation: Sequence[dict[str, Any]] = ()
) -> "Figure | None":
    """Draw loss (nats per token) by step, evaluation loss as dots; None without a finite one."""
    train = [(row["step"], row["loss"]) for row in metrics if row["loss"] is not None]
    evaluated = [
        (row["step"], row["eval_loss"])
        for row in evaluation
        if row["eval_loss"] is not None
    ]
    if not (train or evaluated):
        return None
    from matplotlib.ticker import MaxNLocator

    # The label has the values in words, for screen readers.
    last = [
        (name, series[-1])
        for name, series in (("train", train), ("eval", evaluated))
        if series
    ]
    spoken = "; ".join(
        f"{name} loss {loss:.4f} at step {step:,.0f}" for name, (step, loss) in last
    )
    left, top, right, bottom = 66.0, 16.0, 390.0, 226.0
    figure, page = draw.canvas(516, bottom + 54, f"Loss by step. Last: {spoken}.")
    axes = draw.panel(
        figure, (left, top), (right - left, bottom - top), *_limits(train + evaluated)
    )
    axes.set_axis_on()
    draw.dress(axes, "step", "loss (nats per token)", 13)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,g}")

    # More stripes would be narrower than a pointer.
    if shown := _thin(train, 120):
        middles = [(here + there) / 2 for (here, _), (there, _) in pairwise(shown)]
        edges = [axes.get_xlim()[0], *middles, axes.get_xlim()[1]]
        draw.spots(
            axes, edges, (f"step {step:,.0f}: loss {loss:.4f}" for step, loss in shown)
        )
    curves = (
        ("train", "loss", RANK_COLOURS[0], train, train[-1:], "-"),
        (
            "eval",
            "evaluation loss",
            RANK_COLOURS[5],
            evaluated,
            _thin(evaluated, 120),
            "--",
        ),
    )
    for at, (name, what, colour, series, dots, style) in enumerate(
        curve for curve in curves if curve[3]
    ):
        points, y = _thin(series, 500), top + 12 + 20 * at
        draw.line(
            axes,
            [x for x, _ in points],
            [y for _, y in points],
            colour,
            2,
            linestyle=style,
            gid="curve|",
        )
        for step, loss in dots:
            draw.dot(
                axes, (step, loss), colour, 8, f"step {step:,.0f}: {what} {loss:.4f}"
            )
        draw.line(
            page, (right + 10, right + 26), (y - 4, y - 4), colour, 2, linestyle=style
        )
        draw.text(page, right + 32, y, f"{name} {series[-1][1]:.3f}", strong=True)
    return figure


def _limits(points: Sequence[Point]) -> tuple[Point, Point]:
    low, high = _extent(y for _, y in points)
    # The last point of a good run is the lowest: keep its marker off the axis.
    room = (high - low) / 16
    return _extent(x for x, _ in points), (low - room, high + room)


def memory_picture(memory: Sequence[dict[str, Any]]) -> "Figure":
    """Draw activation megabytes (1e6 bytes) per rank by ring size, the first ring 1, with 1/N of it marked."""
    rows = [
        (row["ring"], row["activation_bytes"], row["tokens_per_rank"]) for row in memory
    ]
    alone = rows[0][1]
    left, width, row_height, top = 64.0, 266.0, 54.0, 8.0
    longest = max(measured for _, measured, _ in rows)
    bottom = top + len(rows) * row_height
    spoken = "; ".join(
        f"ring {ring}: {megabytes(measured)}" for ring, measured, _ in rows
    )
    figure, page = draw.canvas(
        480, bottom + 24, f"Activation memory per rank. {spoken}."
    )
    for index, (ring, measured, tokens) in enumerate(rows):
        y = top + index * row_height
        beside = [f"{tokens:,} tokens per rank"]
        draw.text(page, 4, y + 17, f"ring {ring}")
        draw.rectangle(
            page, left, y, measured / longest * width, 26, RANK_COLOURS[0], kind="bar"
        )
        if ring > 1:
            at = left + alone / ring / longest * width
            draw.line(page, (at, at), (y - 3, y + 29), INK, 2, gid="ideal|")
            beside.append(f"ideal {megabytes(alone / ring)}")
        draw.text(page, left + width + 14, y + 6, megabytes(measured), strong=True)
        for below, said in enumerate(beside, 1):
            draw.text(page, left + width + 14, y + 6 + 15 * below, said, SOFT, size=11)
    draw.line(page, (left + 1, left + 1), (bottom + 2, bottom + 16), INK, 2)
    draw.text(
        page,
        left + 10,
        bottom + 13,
        "ideal: ring 1 divided by the number of ranks",
        SOFT,
        size=11,
    )
    return figure


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _thin(points: list[Point], most: int) -> list[Point]:
    stride = max(1, ceil(len(points) / most))
    return points[::-1][::stride][::-1]


def _extent(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    low, high = min(values), max(values)
    room = 0.0 if high > low else max(0.5, abs(low) / 100)
    return low - room, high + room
