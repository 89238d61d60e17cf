"""A result as one self-contained HTML file: text, tables and inline SVG; no script, nothing fetched."""

import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal
from ringspan.core.messages.extras import installed, remedy
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule.schedule import make_schedule
from ringspan.report.charts import loss_picture, megabytes, memory_picture, number
from ringspan.report.drawing import RANK_COLOURS, svg
from ringspan.report.ring_pictures import ring_picture, travel_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS: Final = 400  # of the long tables; the file stays small enough to send
MAX_CHARACTERS: Final = 300  # of one text
NOT_MEASURED: Final = "not measured"

# The policy makes the browser refuse whatever is not in this file, should a text ever slip through the escaping.
HEAD: Final = (
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
CSS: Final = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --panel: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ground: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --line: #3d444d; --panel: #161b22 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 48px }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 12px }
h2 { font-size: 1.2rem; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line) }
p { margin: 8px 0; max-width: 46rem }
.lead { font-size: 1.15rem }
.soft, caption, figcaption { color: var(--soft); font-size: .9rem }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 24px 40px }
.side > * { min-width: 0 }
figure { margin: 12px 0 }
svg { display: block; width: 100%; height: auto; max-width: 560px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: 4px }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; white-space: nowrap }
th:last-child, td:last-child { padding-right: 0 }
tbody th { font-weight: 400; min-width: 8em; overflow-wrap: anywhere }
td { overflow-wrap: anywhere }
.long { font-size: .85rem; max-height: 28rem; overflow: auto }
.long th, .long td { padding: 3px 14px 3px 0; min-width: 3em }
.long p { position: sticky; left: 0 }
summary { cursor: pointer; padding: 4px 0 }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 12px; overflow-x: auto }
"""


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the report of a run to ``path``, whole or not at all; parts without a measurement say so.

    Args:
        result: the result of ``ringspan demo``, see ``result.json``; any part may be missing or empty.
        path: the HTML file, replaced if it exists; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _page(result))


def write_whole(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _page(result: dict[str, Any]) -> str:
    sections = [
        ("Loss", _loss(result)),
        ("Proof: the ring against one process", _proof(result)),
        ("Memory per rank", _memory(result)),
        ("Who computes what", _ring(result)),
        ("Speed", _speed(result)),
        ("What ran where", _setting(result)),
        ("Command", element("pre", element("code", _text(result.get("command"))))),
    ]
    body = "".join(
        element("section", element("h2", title, id=f"part{index}"), content, aria_labelledby=f"part{index}")
        for index, (title, content) in enumerate(sections)
    )
    head = element("head", HEAD, element("title", "ringspan report"), element("style", CSS))
    headline = element("h1", "ringspan report") + element("p", _headline(result), class_="lead")
    return "<!doctype html>\n" + element("html", head, element("body", element("main", headline, body)), lang="en")


def _headline(result: dict[str, Any]) -> str:
    """Summarize the run and its outcome in one sentence of the available numbers."""
    model, losses, proof = _part(result, "model"), _losses(result), _part(result, "proof")
    ranks, length = number(result.get("ranks")), number(result.get("sequence_length_tokens"))
    subject = f"A {_text(model.get('type'))} model" if model.get("type") else "A model"
    if parameters := number(model.get("parameters")):
        subject += f" of {_millions(parameters)} parameters"
    done = f"trained for {len(losses):,} step{'s' * (len(losses) != 1)}" if losses else "set up"
    if length:
        done += f" on sequences of {length:,.0f} tokens"
    if ranks:
        done += f", each split over {ranks:,.0f} process{'es' * (ranks != 1)}"
    came = []
    if len(losses) > 1:
        came.append(f"its loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    if (difference := number(proof.get("loss_relative_difference"))) is not None:
        came.append(f"the loss of one batch differs from that of a single process by {difference:.1e} (relative)")
    if gradients := _gradients(result):
        worst = gradients[0][2]
        came.append(f"no gradient by more than {worst:.1e}" if isfinite(worst) else "some gradients are not numbers")
    held = {number(row.get("ring")): number(row.get("activation_bytes")) for row in _rows(result, "memory")}
    alone, most = held.get(1), max((ring for ring, measured in held.items() if ring and measured), default=1)
    if alone and most > 1:
        came.append(
            f"activations take {megabytes(held[most] or 0)} per rank on a ring of {most:.0f}, {megabytes(alone)} on one"
        )
    if not (losses or length or came):
        return "Nothing was measured."
    return f"{subject} was {done}{': ' if came else ''}{'; '.join(came)}."


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


def _loss(result: dict[str, Any]) -> str:
    metrics, evaluation = _rows(result, "metrics"), _rows(result, "evaluation")
    picture = _picture(loss_picture, metrics, evaluation) if metrics or evaluation else ""
    if not picture:
        return _missing()
    table = [[_number(row.get(name), form) for name, _, form in _STEP_COLUMNS] for row in metrics]
    heads = [title for _, title, _ in _STEP_COLUMNS]
    points = [[_number(row.get("step")), _number(row.get("eval_loss"), ".4f")] for row in evaluation]
    return (
        element("figure", picture, element("figcaption", "Point at the picture for the value at a step."))
        + (_details("Every step", _long_table(heads, table)) if table else "")
        + (_details("Evaluation", _long_table(("step", "evaluation loss"), points)) if points else "")
    )


def _proof(result: dict[str, Any]) -> str:
    proof, gradients = _part(result, "proof"), _gradients(result)
    if not proof:
        return _missing()
    ranks = _number(proof.get("ranks"))
    rows = [
        ("loss on one process", _number(proof.get("loss_one_process"), ".7f")),
        (f"loss on the ring of {ranks}", _number(proof.get("loss_ring"), ".7f")),
        ("relative difference of the loss", _number(proof.get("loss_relative_difference"), ".1e")),
    ]
    details = ""
    if gradients:
        worst_name, _, worst = gradients[0]
        rows += [
            (f"worst gradient: {_text(worst_name)}", f"{worst:.1e}"),
            (f"median gradient of {len(gradients):,}", f"{gradients[len(gradients) // 2][2]:.1e}"),
        ]
        if (errors := _part(proof, "worst_error")) and {"ring", "one_process"} <= errors.keys():
            rows += [
                ("largest error of a gradient against float64, ring", _number(errors["ring"], ".1e")),
                ("the same, one process", _number(errors["one_process"], ".1e")),
            ]
        table = [[_text(name), _number(norm, ".3e"), f"{difference:.1e}"] for name, norm, difference in gradients]
        heads = ("parameter", "norm", "relative difference")
        details = _details(f"All {len(gradients):,} gradients, the worst first", _long_table(heads, table))
    else:
        rows.append(("gradients", NOT_MEASURED))
    length = _number(proof.get("length"))
    about = (
        f"One batch of {length} tokens through the same weights, once on one process with the model's own attention, "
        f"once on the ring. A difference is the norm of (ring − one process) over the norm of one process. "
        "For scale: rounding a single float32 number changes it by up to 6e-08; a gradient that nearly cancels keeps "
        "more of it, on one process as on the ring, which the errors against float64 tell."
    )
    return element("p", about) + _table(rows, class_="numbers") + details


def _memory(result: dict[str, Any]) -> str:
    rows = _rows(result, "memory")[:16]
    picture = _picture(memory_picture, rows) if rows else ""
    caption = "Activations that one rank holds for the same sequence, by the size of the ring. 1 MB is 1,000,000 bytes."
    return element("figure", picture, element("figcaption", caption)) if picture else _missing()


def _ring(result: dict[str, Any]) -> str:
    """Show the layout that ran and its traffic, next to contiguous chunks: why the layout matters."""
    name, length, ranks = (
        result.get("layout"),
        number(result.get("sequence_length_tokens")),
        number(result.get("ranks")),
    )
    if name not in LAYOUT_NAMES or not length or not ranks or min(length, ranks) < 1:
        return _missing()
    drawn_ranks = min(int(ranks), len(RANK_COLOURS))
    layout = drawn = Layout(name, int(length), drawn_ranks)
    notes = ["A row is a query, a column a key; causal attention computes the coloured part."]
    if drawn_ranks < ranks:
        notes.append(f"Drawn for {drawn_ranks} ranks, run on {ranks:,.0f}.")
    if name == "striped" and drawn_ranks > 1 and length > 8 * drawn_ranks:
        drawn = Layout(name, 8 * drawn_ranks, drawn_ranks)
        pairs = [make_schedule(layout, causal(), rank).num_pairs for rank in range(drawn_ranks)]
        shares = ", ".join(f"{100 * count / sum(pairs):.1f} %" for count in pairs)
        notes.append(
            f"Stripes drawn for {drawn.length} positions; on all {length:,.0f} the ranks do {shares} of the work."
        )
    pictures = [_picture(ring_picture, drawn, causal())]
    if drawn_ranks > 1 and name != "contiguous":
        pictures.append(_picture(ring_picture, Layout("contiguous", int(length), drawn_ranks), causal()))
    pictures.append(_picture(travel_picture, layout, causal()))
    figures = "".join(element("figure", picture) for picture in pictures)
    return element("p", " ".join(notes)) + element("div", figures, class_="side")


def _speed(result: dict[str, Any]) -> str:
    metrics, seconds = _rows(result, "metrics"), _part(result, "seconds")
    if not metrics and not seconds:
        return _missing()
    rows = []
    for title, name, form in (
        ("tokens per second", "tokens_per_second", ",.0f"),
        ("model FLOP/s over the speed of matrix products here", "matmul_utilization", ".1%"),
        ("seconds per step", "seconds", ",.2f"),
    ):
        values = [value for row in metrics if (value := number(row.get(name))) is not None]
        rows.append((title, format(median(values), form) if values else NOT_MEASURED))
    peaks = [value for row in metrics if (value := number(row.get("peak_bytes"))) is not None]
    rows.append(("highest memory of a process", megabytes(max(peaks)) if peaks else NOT_MEASURED))
    stages = [(_text(name), _number(value, ",.1f")) for name, value in _given(seconds)]
    total = sum(value for value in map(number, seconds.values()) if value is not None)
    stages += [("total", f"{total:,.1f}")] if stages else []
    tables = _table(rows, f"Training, median of {len(metrics):,} steps" if metrics else "Training", class_="numbers")
    return element("div", tables, _table(stages, "Seconds by part", class_="numbers") if stages else "", class_="side")


def _setting(result: dict[str, Any]) -> str:
    names = {
        "ranks": "ranks",
        "sequence_length_tokens": "sequence length, tokens",
        "layout": "layout",
        "dtype": "dtype",
    }
    parts = {
        "Model": _part(result, "model"),
        "Data": _part(result, "data"),
        "Run": {title: result[name] for name, title in names.items() if name in result},
        "Machine and versions": _part(result, "machine"),
    }
    tables = []
    for title, part in parts.items():
        rows = [(_text(str(key).replace("_", " ")), _number(value)) for key, value in _given(part)]
        tables.append(_table(rows or [("all", NOT_MEASURED)], title))
    return element("div", *tables, class_="side")


def _picture(draw: "Callable[..., Figure | None]", *arguments: Any) -> str:
    """Return a picture as SVG, a line on what drawing needs, or nothing without data."""
    if not installed("matplotlib"):
        return element("p", escape(f"The picture needs {remedy('matplotlib')}."), class_="soft")
    figure = draw(*arguments)
    return "" if figure is None else svg(figure)


def element(tag: str, *children: str, **attributes: object) -> str:
    """Return one element with its attributes escaped; ``children`` are markup. ``aria_label`` becomes aria-label."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>"


def _part(result: dict[str, Any], name: str) -> dict[str, Any]:
    value = result.get(name)
    return value if isinstance(value, dict) else {}


def _given(part: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in part.items() if value is not None][:MAX_ROWS]


def _rows(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = holder.get(name)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, (list, tuple)) else []


def _losses(result: dict[str, Any]) -> list[float]:
    return [loss for row in _rows(result, "metrics") if (loss := number(row.get("loss"))) is not None]


def _gradients(result: dict[str, Any]) -> list[tuple[object, object, float]]:
    """Return name, norm and relative difference of each gradient, worst first; NaN is the worst."""
    rows = _rows(_part(result, "proof"), "gradients")
    read = [(row.get("name"), row.get("norm"), row.get("relative_difference")) for row in rows]
    known = [(name, norm, float(value) if isinstance(value, (int, float)) else nan) for name, norm, value in read]
    return sorted(known, key=lambda row: -inf if isnan(row[2]) else -row[2])


def _text(value: object, limit: int = MAX_CHARACTERS) -> str:
    """Escape any value as text of bounded length; unprintable characters become a mark."""
    if value is None:
        return NOT_MEASURED
    text = str(value)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))


def _number(value: object, form: str = "") -> str:
    """Format a number with separators, in ``form`` if given; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _text(value)
    if form:
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} million" if count >= 1e5 else f"{count:,.0f}"


def _missing() -> str:
    return element("p", NOT_MEASURED.capitalize() + ".", class_="soft")


def _table(rows: Iterable[Sequence[str]], caption: str = "", **more: object) -> str:
    """Return rows of escaped cells, the first of each its head."""
    body = "".join(
        element("tr", element("th", head, scope="row"), *(element("td", cell) for cell in cells))
        for head, *cells in rows
    )
    table = element("table", element("caption", caption) if caption else "", element("tbody", body), **more)
    return element("div", table, class_="scroll")


def _long_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in heads)))
    body = "".join(
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
        for row in rows[:MAX_ROWS]
    )
    more = element("p", f"The first {MAX_ROWS:,} of {len(rows):,}.") if len(rows) > MAX_ROWS else ""
    table = element("table", head, element("tbody", body), class_="numbers")
    return element("div", table, more, class_="long", tabindex=0, role="region", aria_label=f"Table by {heads[0]}")


def _details(title: str, content: str) -> str:
    return element("details", element("summary", title), content)
