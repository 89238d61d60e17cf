"""Page of a proof: what was tried, how far it is from one process, and the place of a difference."""

from typing import Final

from ringspan.proof.run import Proof, Row
from ringspan.report.page import element, escaped, page, table

_SIDE: Final = 10  # pixels of a position's square
_LABEL: Final = 60  # pixels before a row
_RIGHT, _WRONG = "#0072B2", "#D55E00"
_STYLE: Final = f"""
svg.positions {{ width: 100%; height: auto; }}
svg.positions text {{ fill: currentColor; font-size: {_SIDE}px; }}
td:nth-child(2):not(:last-child) {{ white-space: nowrap; }}
"""


def proof_page(proof: Proof) -> str:
    """Return the page of a proof, with a picture of the positions if it differs."""
    sizes = " x ".join(f"{name} {size}" for name, size in proof.mesh.items())
    options = ", ".join(f"{name}={value}" for name, value in proof.options.items())
    releases = ", ".join(f"{name} {value}" for name, value in proof.versions.items())
    facts = [
        ("layers", f"{proof.layers}, {proof.parameters:,} parameters"),
        ("weights", proof.weights),
        ("mesh", sizes),
        ("options", options or "the defaults"),
        ("releases", releases),
    ]
    parts = [
        element("p", escaped(_verdict(proof))),
        table(facts, caption="What was tried"),
        table(
            [_cells(row) for row in proof.rows],
            ("batch", "dtype", "worst relative error", "bound", "of"),
            "Against plain transformers on one process",
        ),
    ]
    wrong = next((row for row in proof.rows if not row.is_exact), None)
    if wrong is not None:
        parts += _difference(proof, wrong)
    untried = "".join(element("li", escaped(each)) for each in proof.not_tried)
    parts += [element("h2", "Not tried"), element("ul", untried)]
    return page(f"Proof of {proof.model}", *parts, style=_STYLE)


def _verdict(proof: Proof) -> str:
    if proof.is_exact:
        return f"Exact, in {proof.seconds:.0f} s."
    return f"It differs from one process. Found in {proof.seconds:.0f} s."


def _cells(row: Row) -> tuple[str, ...]:
    if row.error is None:
        return row.batch, row.dtype, f"refused: {row.refused}", "", ""
    mark = "" if row.is_exact else ", too far"
    error = f"{row.error:.1e}{mark}"
    return row.batch, row.dtype, error, f"{row.bound:.0e}", row.of


def _difference(proof: Proof, wrong: Row) -> list[str]:
    """Return the first place that differs, the options that it takes, and a picture of known positions."""
    needed = ", ".join(
        f"{name}={value}" for name, value in (proof.smallest or {}).items()
    )
    found = [
        element("h2", "Where it differs"),
        element("p", escaped(f"{wrong.batch}: first at {wrong.place or wrong.of}.")),
        element(
            "p",
            escaped(f"Fewest options with which it does: {needed or 'the defaults'}."),
        ),
    ]
    if wrong.tokens:
        found.append(_picture(wrong))
        said = "A square is a token of a row: blue if it is right, orange with a cross if it is wrong."
        found.append(element("p", said))
    return found


def _picture(wrong: Row) -> str:
    """Draw a square for each token, a line for each row of the batch."""
    height, width = len(wrong.wrong) * _SIDE * 1.6, _LABEL + wrong.tokens * _SIDE
    drawn: list[str] = []
    for number, positions in enumerate(wrong.wrong):
        top = number * _SIDE * 1.6
        drawn.append(element("text", f"row {number}", x=0, y=top + _SIDE - 1))
        for position in range(wrong.tokens):
            is_wrong = position in positions
            drawn.append(_square(_LABEL + position * _SIDE, top, position, is_wrong))
    label = f"{sum(map(len, wrong.wrong))} tokens of {len(wrong.wrong)} rows are wrong"
    return element(
        "svg",
        *drawn,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        class_="positions",
    )


def _square(left: float, top: float, position: int, is_wrong: bool) -> str:
    """Return the square of a position, with a cross if it is wrong, so that colour is not needed to tell."""
    side, colour = _SIDE - 1, _WRONG if is_wrong else _RIGHT
    said = element("title", f"position {position}: {'wrong' if is_wrong else 'right'}")
    parts = [said, element("rect", x=left, y=top, width=side, height=side, fill=colour)]
    if is_wrong:
        low, high = left + 2, left + side - 2
        path = f"M{low} {top + 2}L{high} {top + side - 2}M{high} {top + 2}L{low} {top + side - 2}"
        parts.append(element("path", d=path, stroke="#ffffff"))
    return element("g", *parts)
