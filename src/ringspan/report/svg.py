"""Pieces of drawings as inline SVG.

A drawing is text that stands alone: no script, nothing fetched, light and dark colours inside. Lengths are pixels of
the view box.
"""

from collections.abc import Iterable
from html import escape
from typing import Final

# Okabe and Ito (2008) with a brown and a violet for its yellow and black, which vanish on a light or a dark page.
RANK_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5C3E", "#7C3AED")

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


def svg(width: float, height: float, label: str, *parts: str) -> str:
    return element(
        "svg",
        element("style", _STYLE),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {short(float(width))} {short(float(height))}",
        class_="ringspan",
        role="img",
        aria_label=label,
    )


def element(tag: str, *children: str, **attributes: object) -> str:
    """One element with its attributes escaped; ``children`` are markup. ``fill_opacity`` is written fill-opacity."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(short(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>"


def text(x: float, y: float, content: object, class_: str = "", anchor: str = "start", **more: object) -> str:
    return element("text", escape(str(content)), x=x, y=y, class_=class_, text_anchor=anchor, **more)


def rectangle(x: float, y: float, width: float, height: float, **more: object) -> str:
    return element("rect", x=x, y=y, width=width, height=height, **more)


def line(x1: float, y1: float, x2: float, y2: float, **more: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **more)


def marker(at: Point, title: str, colour: str, *, opacity: int = 1, diamond: bool = False) -> str:
    """A dot or a diamond that says its value when pointed at."""
    x, y = at
    told, look = element("title", escape(title)), {"class_": "edge", "fill": colour, "opacity": opacity}
    if diamond:
        return element("path", told, d=path([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)]), **look)
    return element("circle", told, cx=x, cy=y, r=4.5, **look)


def path(polygon: Iterable[Point]) -> str:
    return "M" + "L".join(f"{short(float(x))} {short(float(y))}" for x, y in polygon) + "Z"


def short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
