"""Pictures of docs/understand beside who computes what: partials, times, traded heads, a cache's shares, states.

All of them are drawn from what the library computes with: masks and its float64 attention, timelines, shares, scans.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from ringspan.core import reference
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal, full
from ringspan.core.geometry.shares import Shares
from ringspan.core.recurrence.spans import links_of, places_of, scan_rounds
from ringspan.core.schedule.route import member_heads
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.steps import Compute, Part
from ringspan.core.schedule.timing import Speeds, pair_flops, timeline
from ringspan.core.schedule.workspace import Shape
from ringspan.report.drawing import (
    GRID,
    INK,
    PAPER,
    RANK_COLOURS,
    SOFT,
    canvas,
    line,
    rectangle,
    text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHAPE: Final = Shape(
    batch=1, heads=1, kv_heads=1, head_dim=64, value_dim=64, itemsize=2
)
_RANKS: Final = 4
_LSE: Final = "\u2113"  # as formulas write it


def partials_picture() -> "Figure":
    """One query and 32 keys in four blocks: attention over each block alone, and over all of them by their merge."""
    layout, query = Layout("contiguous", 32, _RANKS), np.array([20])
    random = np.random.default_rng(43)
    q, k = (
        random.standard_normal((1, 1, 1, 16)),
        random.standard_normal((1, 1, layout.length, 16)),
    )

    def attention(keys: np.ndarray) -> tuple[np.ndarray, float]:
        """Values are one-hot, so that the result is what each key weighs; and the log-sum-exp."""
        values = np.eye(layout.length)[keys][None, None]
        out, lse = reference.attention(
            q, k[:, :, keys], values, causal().dense(query, keys), 1 / 6
        )
        return out[0, 0, 0], lse.item()

    whole, lse = attention(np.arange(layout.length))
    figure, page = canvas(
        640,
        300,
        "Attention over four blocks alone, each times its weight, is attention over all.",
    )
    text(page, 20, 18, "attention of query 20 over each block alone", strong=True)
    text(
        page,
        20,
        174,
        f"times e^({_LSE} of the block \u2212 {_LSE} of all): attention over all keys",
        strong=True,
    )
    for rank in range(_RANKS):
        keys, left = layout.positions(rank), 20 + rank * 152
        out, block_lse = attention(keys)
        weight = float(np.exp(block_lse - lse))
        assert np.allclose(weight * out[keys], whole[keys])
        for floor, heights in ((112, out[keys]), (268, weight * out[keys])):
            line(page, (left, left + 144), (floor, floor), GRID, 1)
            _bars(page, left, floor, heights, RANK_COLOURS[rank])
        number = (
            f"{block_lse:.2f}" if np.isfinite(block_lse) else "\u2212∞: it sees no key"
        )
        text(page, left + 72, 132, f"{_LSE} = {number}", anchor="center", size=11)
        text(page, left + 72, 194, f"× {weight:.2f}", anchor="center", size=11)
        text(
            page,
            left + 72,
            288,
            f"keys {keys[0]} to {keys[-1]}",
            SOFT,
            "center",
            size=11,
        )
    return figure


def _bars(
    page: "Axes", left: float, floor: float, heights: np.ndarray, colour: str
) -> None:
    for at, height in enumerate(heights.tolist()):
        if height:
            # the last bits of a sum differ between machines
            tall = round(220 * height, 1)
            rectangle(
                page,
                left + at * 18 + 1,
                floor - tall,
                16,
                tall,
                colour,
                title=f"{height:.3f}",
            )


def overlap_picture() -> "Figure":
    """Four ranks, a full mask: blocks half as long, three quarters as long, and as long as the law asks for."""
    figure, page = canvas(
        640,
        330,
        "When ranks compute and wait, for blocks of half of, three quarters of, and all of F / B.",
    )
    crossing = 512
    for number, (factor, title) in enumerate(
        (
            (0.5, "c is half of F / B"),
            (0.75, "c is three quarters of F / B"),
            (1.0, "c = F / B: nobody waits"),
        )
    ):
        top = 26 + number * 98
        text(page, 4, top - 8, title, strong=True)
        layout = Layout("contiguous", int(crossing * factor) * _RANKS, _RANKS)
        # A block of `crossing` tokens travels as long as it is computed with.
        bandwidth = _SHAPE.kv_numbers * _SHAPE.itemsize / crossing
        speeds = Speeds(pair_flops(_SHAPE, is_backward=False), bandwidth, bandwidth, 1)
        for rank in range(_RANKS):
            schedule = make_schedule(layout, full(), rank)
            stretches = timeline(Part(schedule, _SHAPE), speeds)
            scale = 560 / (layout.tokens_per_rank**2 * _RANKS * 1.75)
            _times(page, rank, stretches, top + rank * 18, scale)
    rectangle(page, 76, 312, 14, 11, "none", edge=SOFT)
    text(page, 96, 322, "waits for the block", SOFT, size=11)
    text(
        page,
        226,
        322,
        "filled: computes, in the colour of the block's owner",
        SOFT,
        size=11,
    )
    return figure


def _times(page: "Axes", rank: int, stretches: tuple, y: float, scale: float) -> None:
    text(page, 4, y + 11, f"rank {rank}", size=11)
    for stretch in stretches:
        x, width = 64 + stretch.start * scale, (stretch.stop - stretch.start) * scale
        if isinstance(stretch.event, Compute):
            owner = stretch.event.hop.owner
            rectangle(
                page,
                x,
                y,
                width,
                13,
                RANK_COLOURS[owner],
                edge=PAPER,
                title=f"block of rank {owner}",
            )
        elif width > 0:
            rectangle(page, x, y, width, 13, "none", edge=SOFT, title="waits")


def ulysses_picture() -> "Figure":
    """Tokens x heads: who holds what before the trade, and after it."""
    figure, page = canvas(
        640,
        268,
        "Ulysses: each rank has all heads of its tokens, then all tokens of its heads.",
    )
    layout, heads = Layout("contiguous", 8, _RANKS), 8
    owners = {
        p: rank for rank in range(_RANKS) for p in layout.positions(rank).tolist()
    }
    computing = {
        head: rank
        for rank, share in enumerate(member_heads(heads, heads, _RANKS))
        for head in range(share.queries.start, share.queries.stop)
    }
    for left, title, owner in (
        (70, "before: a rank has its tokens", lambda token, head: owners[token]),
        (400, "after: a rank has its heads", lambda token, head: computing[head]),
    ):
        text(page, left, 22, title, strong=True)
        text(page, left + 100, 42, "heads", SOFT, "center", size=11)
        text(page, left - 10, 150, "tokens", SOFT, "center", size=11, rotation=90)
        for token in range(layout.length):
            for head in range(heads):
                rank = owner(token, head)
                rectangle(
                    page,
                    left + head * 25,
                    50 + token * 25,
                    25,
                    25,
                    RANK_COLOURS[rank],
                    edge=PAPER,
                    title=f"token {token}, head {head}: rank {rank}",
                )
    line(page, (292, 368), (150, 150), INK, 2)
    line(page, (358, 368, 358), (143, 150, 157), INK, 2)
    text(page, 330, 136, "all to all", SOFT, "center", size=11)
    return figure


def cache_picture() -> "Figure":
    """Which rank keeps which position: a prompt in two chunks, and tokens that were written after it."""
    figure, page = canvas(
        640,
        128,
        "A cache that is split: a prompt in zigzag chunks, then written tokens in blocks.",
    )
    shares = Shares(_RANKS)
    shares.split(1200)
    shares.split(800)
    for _ in range(500):
        shares.deal(1)
    scale = 600 / shares.length
    for rank, runs in enumerate(shares.runs()):
        for start, count in runs:
            rectangle(
                page,
                20 + start * scale,
                44,
                count * scale,
                30,
                RANK_COLOURS[rank],
                edge=PAPER,
                title=f"positions {start} to {start + count - 1}: rank {rank}",
            )
    for start, stop, title in (
        (0, 1200, "prompt, first chunk"),
        (1200, 2000, "second chunk"),
        (2000, 2500, "written"),
    ):
        line(page, (20 + start * scale + 2, 20 + stop * scale - 2), (36, 36), SOFT, 1)
        text(page, 20 + (start + stop) / 2 * scale, 28, title, SOFT, "center", size=11)
    for rank, count in enumerate(shares.counts()):
        rectangle(page, 20 + rank * 150, 96, 14, 11, RANK_COLOURS[rank])
        text(page, 40 + rank * 150, 106, f"rank {rank}: {count} positions", size=11)
    return figure


def states_picture() -> "Figure":
    """Spans of a zigzag ring of four in the order of their positions, and the states that go from one to the next."""
    layout = Layout("zigzag", 4096, _RANKS)
    places = places_of(layout)
    rounds = scan_rounds(links_of(places, [[0]]))
    figure, page = canvas(
        640,
        150,
        f"{len(places)} spans of four ranks; {len(rounds)} rounds, a state each.",
    )
    scale = 600 / layout.length
    centres: list[float] = []
    for place in places:
        x, width = 20 + place.start * scale, place.tokens * scale
        rectangle(
            page,
            x,
            60,
            width,
            34,
            RANK_COLOURS[place.rank],
            edge=PAPER,
            title=f"rank {place.rank}",
        )
        text(page, x + width / 2, 112, f"rank {place.rank}", anchor="center", size=11)
        centres.append(x + width / 2)
    text(page, 20, 20, "a state of fixed size goes from span to span", strong=True)
    for number, messages in enumerate(rounds):
        for message in messages:
            here, there = centres[message.source] + 4, centres[message.target] - 4
            arc = [(here, 58), (here + 6, 46), (there - 6, 46), (there, 58)]
            for one, other in pairwise(arc):
                line(page, (one[0], other[0]), (one[1], other[1]), INK, 1.5)
            line(page, (there - 7, there, there + 1), (53, 58, 50), INK, 1.5)
            text(page, (here + there) / 2, 40, number, SOFT, "center", size=11)
    text(
        page,
        20,
        138,
        "numbers: rounds; what takes long is computed before, for all spans at the same time",
        SOFT,
        size=11,
    )
    line(page, (20, 620), (98, 98), GRID, 1)
    return figure
