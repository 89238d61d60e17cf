"""Pictures by matplotlib: PNG, or SVG that stands alone, with titles on hover and dark colours."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), except that brown and violet replace yellow and black, which vanish on light or dark pages.
RANK_COLOURS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#7A5C3E",
    "#7C3AED",
)
INK, SOFT, GROUND, GRID, PAPER = "#1b1f24", "#57606a", "#eef1f4", "#d0d7de", "#ffffff"
_DARK: Final = {
    INK: "#e6edf3",
    SOFT: "#9da7b3",
    GROUND: "#1c232c",
    GRID: "#3d444d",
    PAPER: "#0d1117",
}

# The style sheet overrides attributes, so that programs without style sheets show the light colours.
_STYLE: Final = (
    ".ringspan *{stroke-linejoin:round;stroke-linecap:butt}"
    ".ringspan .halo text{paint-order:stroke;stroke:#ffffff;stroke-width:3px}"
    ".ringspan .spot path{pointer-events:all}.ringspan .spot:hover path{fill:#8b949e!important;fill-opacity:.3}"
    "@media(prefers-color-scheme:dark){.ringspan .halo text{stroke:#0d1117}"
    + "".join(
        f'.ringspan [style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    + "}"
)

Point = tuple[float, float]


def canvas(width: float, height: float, label: str) -> "tuple[Figure, Axes]":
    """Create an empty picture in pixel coordinates, y downward; ``label`` is for screen readers."""
    from matplotlib.figure import Figure

    # SVG has 72 pixels per inch.
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, label=label)
    return figure, panel(figure, (0, 0), (width, height), (0, width), (height, 0))


def panel(figure: "Figure", corner: Point, size: Point, x: Point, y: Point) -> "Axes":
    """Add bare axes from a corner in pixels from the upper left; ``x`` and ``y``: left, right, bottom, top."""
    width, height = figure.get_size_inches() * 72
    (left, top), (wide, high) = corner, size
    axes = figure.add_axes(
        (left / width, 1 - (top + high) / height, wide / width, high / height),
        xlim=x,
        ylim=y,
    )
    axes.set_axis_off()
    return axes


def text(
    axes: "Axes", x: float, y: float, content: object, colour: str = INK, anchor: str = "left", *, size: float = 13,
    strong: bool = False, halo: bool = False, rotation: float = 0,
) -> None:  # fmt: skip
    """Write words at their baseline; ``anchor`` is left, center or right. A halo keeps them legible."""
    # A dollar in a path or a name is not a formula.
    axes.text(
        x,
        y,
        str(content),
        color=colour,
        ha=anchor,
        va="baseline",
        fontsize=size,
        parse_math=False,
        fontweight="bold" if strong else "normal",
        rotation=rotation,
        rotation_mode="anchor",
        gid="halo|" if halo else None,
    )


def rectangle(
    axes: "Axes", x: float, y: float, width: float, height: float, colour: str, *, edge: str = "none",
    edge_width: float = 1, kind: str = "", title: str = "", opacity: float = 1.0,
) -> None:  # fmt: skip
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    polygons(
        axes,
        [corners],
        colour,
        edge=edge,
        edge_width=edge_width,
        kind=kind,
        title=title,
        opacity=opacity,
    )


def polygons(
    axes: "Axes", shapes: Iterable[Sequence[Point]], colour: str, *, edge: str = "none", edge_width: float = 1,
    kind: str = "", title: str = "", opacity: float = 1.0,
) -> None:  # fmt: skip
    """Draw polygons of one colour as one object of a ``kind`` (a class in the SVG) with ``title`` on hover."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    closed = [Path([*shape, shape[0]], closed=True) for shape in shapes]
    axes.add_patch(
        PathPatch(
            Path.make_compound_path(*closed),
            facecolor=to_rgba(colour, opacity) if colour != "none" else "none",
            edgecolor=edge,
            linewidth=edge_width if edge != "none" else 0,
            clip_on=False,
            gid=f"{kind}|{title}" if kind or title else None,
            in_layout=kind != "spot",  # spots are inside the axes
        )
    )


def line(
    axes: "Axes",
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    width: float = 1,
    **more: Any,
) -> None:
    axes.plot(
        x,
        y,
        color=colour,
        linewidth=width,
        clip_on=False,
        scalex=False,
        scaley=False,
        **more,
    )


def dot(axes: "Axes", at: Point, colour: str, width: float, title: str = "") -> None:
    # A round line end, as SVG draws markers by reference, and ids of several pictures on a page would clash.
    line(
        axes,
        2 * at[:1],
        2 * at[1:],
        colour,
        width,
        solid_capstyle="round",
        gid=f"dot|{title}",
    )


def spots(axes: "Axes", edges: Sequence[float], titles: Iterable[str]) -> None:
    """Draw hover stripes between neighbouring edges, over the axes' full height, otherwise invisible."""
    bottom, top = axes.get_ylim()
    for start, stop, title in zip(edges[:-1], edges[1:], titles, strict=True):
        rectangle(
            axes,
            start,
            bottom,
            stop - start,
            top - bottom,
            "none",
            kind="spot",
            title=title,
        )


def dress(axes: "Axes", x_label: str, y_label: str, size: float = 10) -> None:
    """Style a plot with a baseline and a quiet grid; values beyond the limits show."""
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    # Tick marks have no length: SVG draws them by reference, and ids of several pictures on a page would clash.
    axes.tick_params(length=0, pad=6, labelsize=size, labelcolor=SOFT)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, clip_on=False)
    axes.set_xlabel(x_label, color=SOFT, fontsize=size)
    axes.set_ylabel(y_label, color=SOFT, fontsize=size)


def svg(figure: "Figure") -> str:
    """Return the figure as an SVG element."""
    from matplotlib import rc_context

    written = StringIO()
    # Text stays text, and ids do not change from one drawing to the next.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringspan"}):
        figure.savefig(written, format="svg", dpi=72, transparent=True)
    # Remove matplotlib's style sheet and definitions, since ids of several pictures on a page would clash.
    body = (
        written.getvalue()
        .rpartition("</style>")[2]
        .partition("</defs>")[2]
        .rpartition("</svg>")[0]
    )
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL).replace(
        "; stroke-linejoin: miter", ""
    )
    body = re.sub(r">\s+<", "><", body)
    body = re.sub(r'<g id="[^"]*"/>', "", body)
    body = re.sub(r'<g id="([^"]*)">', _opened, body)
    body = re.sub(r' d="([^"]*)"', lambda found: f' d="{_rounded(found[1])}"', body)
    body = re.sub(
        r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", body
    ).replace("font: bold", "font: 600")
    width, height = figure.get_size_inches() * 72
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" class="ringspan" role="img" '
        f'aria-label="{escape(str(figure.get_label()))}"><style>{_STYLE}</style>{body.strip()}</svg>'
    )


def _opened(found: re.Match[str]) -> str:
    """Open a group with its class and title in place of the id that carried both; drop matplotlib's own ids."""
    kind, bar, title = found[1].partition("|")
    if not bar:
        return "<g>"
    return (f'<g class="{kind}">' if kind else "<g>") + (
        f"<title>{title}</title>" if title else ""
    )


def _rounded(path: str) -> str:
    path = re.sub(
        r"\d+\.\d{2,}",
        lambda found: f"{float(found[0]):.1f}".rstrip("0").rstrip("."),
        path,
    )
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", path)
