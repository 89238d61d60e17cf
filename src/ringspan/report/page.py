"""One self-contained HTML file: text, tables and inline SVG; nothing is fetched, text stays text."""

import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringspan.core.messages.extras import installed, remedy
from ringspan.report.drawing import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CHARACTERS: Final = 300  # longest text; the rest is cut off
# The policy keeps the browser from loading anything outside this file, in case a text ever escapes the escaping.
_HEAD: Final = (
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'{policy}\">"
)
_CSS: Final = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(title: str, *parts: str, style: str = "", has_script: bool = False) -> str:
    """Return a page of a heading and parts; ``style`` is added to the common one."""
    policy = "; script-src 'unsafe-inline'" if has_script else ""
    head = element(
        "head",
        _HEAD.format(policy=policy),
        element("title", escape(title)),
        element("style", _CSS + style),
    )
    body = element("body", element("main", element("h1", escape(title)), *parts))
    return "<!doctype html>\n" + element("html", head, body, lang="en")


def write_whole(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def element(tag: str, *children: str, **attributes: object) -> str:
    """Return an element with its attributes escaped; ``children`` are markup. ``aria_label`` becomes aria-label."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>"


def escaped(value: object, most: int = MAX_CHARACTERS) -> str:
    """Escape any value as text of bounded length; unprintable characters become a mark."""
    said = str(value)
    said = said if len(said) <= most else said[: most - 1] + "…"
    return escape(
        "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in said)
    )


def table(
    rows: Iterable[Sequence[object]],
    heads: Sequence[str] = (),
    caption: str = "",
    class_: str = "",
) -> str:
    """Return a table, the first cell of each row its head; cells are any values."""
    top = (
        element(
            "thead",
            element("tr", *(element("th", each, scope="col") for each in heads)),
        )
        if heads
        else ""
    )
    body = (
        element(
            "tr",
            element("th", escaped(first), scope="row"),
            *(element("td", escaped(cell)) for cell in cells),
        )
        for first, *cells in rows
    )
    title = element("caption", caption) if caption else ""
    return element(
        "div",
        element("table", title, top, element("tbody", *body), class_=class_),
        class_="scroll",
    )


def section(title: str, *parts: str, name: str) -> str:
    heading = element("h2", escape(title), id=f"{name}-title")
    return element("section", heading, *parts, id=name, aria_labelledby=f"{name}-title")


def command(line: str) -> str:
    return section(
        "Command",
        element("pre", element("code", escaped(line, 10_000))),
        name="command",
    )


def picture(draw: "Callable[..., Figure | None]", *arguments: object) -> str:
    """Return a picture as SVG, a line about the missing package, or an empty text without data."""
    if not installed("matplotlib"):
        return element(
            "p", escape(f"The picture needs {remedy('matplotlib')}."), class_="soft"
        )
    figure = draw(*arguments)
    return "" if figure is None else svg(figure)
