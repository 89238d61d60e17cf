"""The moving figure of README.md, from a schedule: blocks go round while their tiles are computed.

One SVG without a script, light and dark, still where the reader's system asks for less motion.
"""

from math import cos, pi, sin
from typing import Final

import numpy as np

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.ranges import size
from ringspan.core.schedule.schedule import Schedule, make_schedule
from ringspan.report.drawing import RANK_COLOURS

_HOP_SECONDS: Final = 1.6
_HOLD_SECONDS: Final = 2.0  # of the finished picture, before it begins anew
_CENTRE: Final = (172, 165)
_RADIUS: Final = 92
_SQUARE: Final = (400, 34, 264)  # left, top, side
_STYLE: Final = (
    "text{font:14px system-ui,sans-serif;fill:#1b1f24}.soft{fill:#57606a;font-size:12px}.ground{fill:#eef1f4}"
    ".paper{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9da7b3}.ground{fill:#1c232c}.paper{fill:#0d1117}}"
    "@media(prefers-reduced-motion:reduce){*{animation:none!important}.hop,.block{opacity:0}.done{opacity:1!important}}"
)


def moving_picture(layout: Layout, mask: Mask) -> str:
    """Who computes what when, on a ring whose blocks move; an SVG element."""
    plans = [make_schedule(layout, mask, rank) for rank in range(layout.ranks)]
    hops = len(plans[0].hops)
    seconds = hops * _HOP_SECONDS + _HOLD_SECONDS
    style = [_STYLE, f".tile,.block,.hop{{animation:{seconds:g}s linear infinite}}"]
    body = [_matrix(layout), _nodes(layout.ranks)]
    for hop in range(hops):
        start, stop = (100 * (hop + part) * _HOP_SECONDS / seconds for part in (0, 1))
        style.append(
            f"@keyframes tile{hop}{{0%,{start:.1f}%{{opacity:0}}{stop:.1f}%,100%{{opacity:1}}}}"
        )
        last = 100 if hop == hops - 1 else stop
        # Steps without a fade: a caption is there or not.
        style.append(
            f"@keyframes hop{hop}{{0%,{start:.1f}%{{opacity:0}}{start + 0.1:.1f}%,{last - 0.1:.1f}%{{opacity:1}}"
            f"{last:.1f}%,100%{{opacity:0}}}}"
        )
        tiles = "".join(
            f'<path fill="{RANK_COLOURS[plan.rank]}" d="{_cells(layout, plan, hop)}"/>'
            for plan in plans
        )
        body.append(f'<g class="tile" style="animation-name:tile{hop}">{tiles}</g>')
        done = " done" if hop == hops - 1 else ""
        body.append(
            f'<g class="hop{done}" style="animation-name:hop{hop}"><text x="{_CENTRE[0]}" y="{_CENTRE[1] + 5}" '
            f'text-anchor="middle">hop {hop}</text>{_held(plans, hop)}</g>'
        )
    for owner in range(layout.ranks):
        style.append(f"@keyframes block{owner}{{{_way(plans, owner, seconds)}}}")
        body.append(
            f'<circle class="block" style="animation-name:block{owner}" r="13" fill="{RANK_COLOURS[owner]}" '
            f'stroke="#ffffff" transform="translate({_shown(_place(owner, layout.ranks))})"/>'
        )
    label = (
        f"{layout.ranks} ranks in a ring. At each hop every rank computes with the block that it holds, in the rank's "
        "colour, while a copy of the block travels to its neighbour. In the end all pairs of the mask are computed."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 330" role="img" aria-label="{label}">'
        f"<style>{''.join(style)}</style>{''.join(body)}</svg>"
    )


def _way(plans: list[Schedule], owner: int, seconds: float) -> str:
    """Keyframes of a block: at each hop on its way to the next rank, smaller where less of it is still needed."""
    where = [
        (plan.rank, hop)
        for hop in range(len(plans[0].hops))
        for plan in plans
        if plan.hops[hop].owner == owner
    ]
    frames: list[str] = []
    for index, (rank, _) in enumerate(where):
        start = 100 * index * _HOP_SECONDS / seconds
        arrives = where[index + 1] if index + 1 < len(where) else (rank, None)
        is_sent = (
            arrives[1] is not None
            and size(plans[arrives[0]].hops[arrives[1]].arrives.ranges) > 0
        )
        frames.append(f"{start:.1f}%{{{_at(plans, rank, index)}}}")
        if not is_sent:  # nobody needs it any more
            frames.append(
                f"{start + 0.1:.1f}%,100%{{{_at(plans, rank, index)};opacity:0}}"
            )
            break
    return "".join(frames)


def _at(plans: list[Schedule], rank: int, index: int) -> str:
    x, y = _place(rank, len(plans))
    return f"transform:translate({x:.0f}px,{y:.0f}px) scale({_scale(plans, rank, index):.2g});opacity:1"


def _scale(plans: list[Schedule], rank: int, index: int) -> float:
    """Of a disc whose area is the share of a block that is here."""
    whole = max(size(plan.hops[1].arrives.ranges) for plan in plans)
    return (
        (size(plans[rank].hops[index].arrives.ranges) / whole) ** 0.5 if index else 1.0
    )


def _held(plans: list[Schedule], index: int) -> str:
    """The blocks that the ranks compute with at a hop."""
    drawn: list[str] = []
    for plan in plans:
        x, y = _place(plan.rank, len(plans))
        radius = 16 * _scale(plans, plan.rank, index)
        drawn.append(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{radius:.1f}" fill="{RANK_COLOURS[plan.hops[index].owner]}"/>'
        )
    return "".join(drawn)


def _place(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * pi * rank / ranks - pi / 2
    return _CENTRE[0] + _RADIUS * cos(angle), _CENTRE[1] + _RADIUS * sin(angle)


def _shown(point: tuple[float, float]) -> str:
    return f"{point[0]:.0f} {point[1]:.0f}"


def _nodes(ranks: int) -> str:
    drawn: list[str] = []
    for rank in range(ranks):
        x, y = _place(rank, ranks)
        beside = (x - _CENTRE[0]) * 0.57, (y - _CENTRE[1]) * 0.46
        drawn.append(
            f'<circle class="paper" cx="{x:.0f}" cy="{y:.0f}" r="23" stroke="{RANK_COLOURS[rank]}" stroke-width="6"/>'
            f'<text x="{x + beside[0]:.0f}" y="{y + beside[1] + 5:.0f}" text-anchor="middle">rank {rank}</text>'
        )
    return "".join(drawn)


def _matrix(layout: Layout) -> str:
    """The empty square, and along its edges whose queries and keys there are."""
    left, top, side = _SQUARE
    cell = side / layout.length
    strips = ""
    for rank in range(layout.ranks):
        cells = "".join(
            f"M{left + p * cell:g} {top - 10}h{cell:g}v6h-{cell:g}zM{left - 10} {top + p * cell:g}h6v{cell:g}h-6z"
            for p in layout.positions(rank).tolist()
        )
        strips += f'<path fill="{RANK_COLOURS[rank]}" d="{cells}"/>'
    middle = top + side / 2
    return (
        f'<text class="soft" x="{left + side / 2:g}" y="{top - 18}" text-anchor="middle">keys</text>'
        f'<text class="soft" transform="translate({left - 18} {middle:g}) rotate(-90)" text-anchor="middle">'
        "queries</text>"
        f'<rect class="ground" x="{left}" y="{top}" width="{side}" height="{side}"/>{strips}'
    )


def _cells(layout: Layout, plan: Schedule, index: int) -> str:
    """What a rank computes at a hop, as strips of neighbouring keys."""
    left, top, side = _SQUARE
    cell = side / layout.length
    hop = plan.hops[index]
    queries, keys = layout.positions(plan.rank), layout.positions(hop.owner)
    strips: list[str] = []
    for band in hop.bands:
        for i in range(band.num_rows):
            j = np.arange(band.num_keys)
            seen = keys[band.k0 + j[(band.lo <= i - j) & (i - j <= band.hi)]]
            for run in np.split(seen, np.flatnonzero(np.diff(seen) != 1) + 1):
                width = len(run) * cell
                x, y = left + run[0] * cell, top + queries[band.q0 + i] * cell
                strips.append(f"M{x:g} {y:g}h{width:g}v{cell:g}h-{width:g}z")
    return "".join(strips)
