"""One HTML file for a task and all its models: pictures, tables, and skipped items."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ringspan.core.messages.extras import installed, remedy
from ringspan.report.demo_page import CSS, HEAD, element, write_whole
from ringspan.report.drawing import svg
from ringspan.report.evaluation_charts import picture, short_names

_MORE_CSS = ".map svg { max-width: 640px } .task { max-width: 60rem }"


def write_page(results: Sequence[dict[str, Any]], path: Path, command: str, about: str = "") -> None:
    """Write the page, whole or not at all.

    Args:
        results: the results of ``ringspan eval`` for one task, one per model.
        path: the HTML file; it is replaced if it exists.
        command: the command line.
        about: the description of the task.
    """
    task = str(results[0]["task"])
    title = f"ringspan eval {task}"
    parts = [
        element("h1", escape(title)),
        element("p", escape(about), class_="lead task") if about else "",
        _drawn(results),
        *(_table(name, result) for name, result in zip(short_names(results), results, strict=True)),
        element("h2", "Command"),
        element("pre", element("code", escape(command))),
    ]
    head = element("head", HEAD, element("title", escape(title)), element("style", CSS + _MORE_CSS))
    body = element("body", element("main", *parts))
    write_whole(path, "<!doctype html>\n" + element("html", head, body, lang="en"))


def _drawn(results: Sequence[dict[str, Any]]) -> str:
    if not installed("matplotlib"):
        return element("p", escape(f"The picture needs {remedy('matplotlib')}."), class_="soft")
    is_map = any("depth" in row for result in results for row in result["rows"])
    said = (
        "Point at a cell for its 95% interval." if is_map else "Bands are 95% intervals. Point at a curve for values."
    )
    return element("figure", svg(picture(results)), element("figcaption", said), class_="map")


def _table(name: str, result: dict[str, Any]) -> str:
    is_loss = any("loss" in row for row in result["rows"])
    heads, cells = loss_cells(result["rows"]) if is_loss else accuracy_cells(result["rows"])
    head = element("thead", element("tr", *(element("th", each, scope="col") for each in heads)))
    body = element(
        "tbody",
        *(
            element("tr", element("th", row[0], scope="row"), *(element("td", each) for each in row[1:]))
            for row in cells
        ),
    )
    skipped = [
        element("p", escape(f"Skipped: {each['length']:,} tokens, {each['why']}."), class_="soft")
        for each in result["skipped"]
    ]
    table = element("div", element("table", head, body, class_="numbers"), class_="scroll")
    where = element("p", escape(f"{result['model']}, seed {result['seed']}"), class_="soft")
    return element("section", element("h2", escape(name)), where, table, *skipped)


def accuracy_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of accuracy by length, and depth if rows have it."""
    has_depth = any("depth" in row for row in rows)
    heads = ["tokens", *(["depth"] if has_depth else []), "accuracy", "95% interval", "items"]
    cells = [
        [
            f"{row['length']:,}",
            *([f"{row['depth']:g}"] if has_depth else []),
            f"{row['accuracy']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            f"{row['items']:,}",
        ]
        for row in rows
    ]
    return heads, cells


def loss_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of loss by position."""
    heads = ["positions", "nats per token", "95% interval", "bits per byte", "documents"]

    def interval(row: dict[str, Any]) -> str:
        return "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"

    cells = [
        [
            f"{row['start']:,} to {row['length'] - 1:,}",
            f"{row['loss']:.4f}",
            interval(row),
            "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}",
            f"{row['items']:,}",
        ]
        for row in rows
    ]
    return heads, cells
