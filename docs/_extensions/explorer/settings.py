"""What the explorer shows of each setting: who holds, computes, sends and waits, from core's schedules and events.

A pair of a query and a key takes one unit of time with all heads. Bytes are those of one layer of Llama 3.1 8B in
bfloat16. Every route is one between groups of ranks that have traded tokens for heads: those without Ulysses have
groups of one rank, which trade nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

from ringspan.core.geometry.balanced import balanced
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import (
    Mask,
    causal,
    chunked,
    documents,
    frames,
    full,
    prefix_lm,
    sliding_window,
)
from ringspan.core.geometry.ranges import Ranges, size
from ringspan.core.schedule.choice import splits
from ringspan.core.schedule.events import forward
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.schedule.schedule import Hop, make_schedule
from ringspan.core.schedule.steps import MESSAGES_PER_HOP, Compute, Part, Post
from ringspan.core.schedule.timing import Pass, Speeds, pair_flops, timeline, trade
from ringspan.core.schedule.workspace import Shape
from ringspan.report.drawing import RANK_COLOURS

LENGTH: Final = (
    48  # a multiple of twice each number of ranks, so that nothing is padded
)
SHAPE: Final = Shape(
    batch=1, heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2
)
RANKS: Final = (2, 3, 4, 6, 8)
LAYOUTS: Final = ("zigzag", "striped", "contiguous", "balanced")
ROUTES: Final = (
    "ring",
    "bidirectional",
    "double-ring:2",
    "all-gather",
    "pass-q",
    "ulysses",
    "ulysses:2",
)
# tokens per rank from which a whole block hides behind a full mask
LINKS: Final = (
    2,
    8,
    32,
)
MASKS: Final[dict[str, tuple[str, Mask]]] = {
    "causal": ("causal", causal()),
    "full": ("full", full()),
    "window": ("window of 12", sliding_window(12)),
    "prefix": ("prefix of 16", prefix_lm(16)),
    "chunked": ("chunks of 16", chunked(16, length=LENGTH)),
    "frames": ("frames of 8", frames([8] * 6)),
    "equal": ("documents: 16, 16, 16", documents([16, 16, 16])),
    "mixed": ("documents: 5, 11, 29, 3", documents([5, 11, 29, 3])),
    "long": ("documents: 36, 4, 4, 4", documents([36, 4, 4, 4])),
    "windowed": (
        "documents: 5, 11, 29, 3 in a window of 6",
        documents([5, 11, 29, 3], window=6),
    ),
}


def settings() -> Iterator[tuple[str, str, str, int]]:
    """Names of mask, layout and route, and the ranks, of all settings that there are."""
    for mask, layout, route, ranks in product(MASKS, LAYOUTS, ROUTES, RANKS):
        if _has_route(layout, route, ranks):
            yield mask, layout, route, ranks


def _has_route(layout: str, route: str, ranks: int) -> bool:
    """Whether core can go it, and no other name stands for the same."""
    if route.endswith(":2") and (ranks == 2 or ranks % 2):
        return False
    if not route.startswith("ulysses"):
        return True
    # Balanced is a custom layout, which has no groups.
    return layout != "balanced" and splits(SHAPE, Route.parse(route, ranks).ulysses)


def layout_of(name: str, mask: Mask, ranks: int) -> Layout:
    if name == "balanced":
        return balanced(mask, length=LENGTH, ranks=ranks, chunk_tokens=1)
    return Layout(name, LENGTH, ranks)  # pyright: ignore[reportArgumentType]


def speeds(link: int) -> Speeds:
    """A pair takes a unit of time; a block of ``link`` tokens travels in the ``link`` squared units of its pairs."""
    block_bytes = link * SHAPE.kv_numbers * SHAPE.itemsize
    return Speeds(
        pair_flops(SHAPE, is_backward=False),
        block_bytes / link**2,
        block_bytes / link**2,
        1,
    )


def tables() -> dict[str, Any]:
    """All settings as a browser reads them; what occurs several times is kept once, and named by its number."""
    layouts, hops, sends, waits = _Numbered(), _Numbered(), _Numbered(), _Numbered()
    found: dict[str, list[Any]] = {}
    for mask_name, layout_name, route_name, ranks in settings():
        mask, route = MASKS[mask_name][1], Route.parse(route_name, ranks)
        layout = layout_of(layout_name, mask, ranks)
        groups = layout.grouped(route.ulysses)
        parts = [part_of(groups, mask, route, group) for group in range(groups.ranks)]
        trades = {
            link: trade(layout, layout, SHAPE, route.ulysses, speeds(link))
            for link in LINKS
        }
        rows: list[Any] = [None] * ranks
        for group, part in enumerate(parts):
            steps = [hops.number(each) for each in _steps(part, groups)]
            waited = [
                waits.number(each)
                for each in _waits(part, trades, is_traded=groups.members > 1)
            ]
            for place, rank in enumerate(groups.group_ranks(group)):
                sent = [
                    sends.number(each)
                    for each in _sends(part, groups, place, trades[LINKS[0]])
                ]
                rows[rank] = [steps, sent, waited]
        setting = [layouts.number(_positions(layout)), rows, int(route.passes_queries)]
        if groups.members > 1:
            setting += [
                _members(groups),
                layouts.number(_positions(groups)),
                *_share(parts[0].shape),
            ]
        found["|".join((mask_name, layout_name, route_name, str(ranks)))] = setting
    return {
        "length": LENGTH,
        "heads": SHAPE.heads,
        "blockBytes": SHAPE.kv_numbers * SHAPE.itemsize,
        "colours": RANK_COLOURS,
        "choices": {
            "mask": [[name, label] for name, (label, _) in MASKS.items()],
            "layout": [[name, name] for name in LAYOUTS],
            "route": [[name, name] for name in ROUTES],
            "ranks": [[str(ranks), str(ranks)] for ranks in RANKS],
            "link": [
                [str(link), f"a block hides from {link} tokens on"] for link in LINKS
            ],
        },
        "layouts": layouts.values,
        "hops": hops.values,
        "sends": sends.values,
        "waits": waits.values,
        "settings": found,
    }


class _Numbered:
    """Different values, each once, in the order in which they came."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        number = self._numbers.setdefault(repr(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def part_of(groups: Layout, mask: Mask, route: Route, group: int) -> Part:
    """What every rank of a group does between the groups, with its share of the heads."""
    # A page steps through hops: those of an all-gather are the blocks that it lays out at once.
    schedule = replace(
        make_schedule(groups, mask, group, route=replace(route, ulysses=1)),
        gathered=None,
    )
    share = member_heads(SHAPE.heads, SHAPE.kv_heads, groups.members)[0]
    tokens = groups.tokens_of(group)
    return Part(schedule, SHAPE.of(share), tokens=tokens, key_tokens=tokens)


def _positions(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.ranks)]


def _members(groups: Layout) -> list[tuple[int, ...]]:
    return [groups.group_ranks(group) for group in range(groups.ranks)]


def _share(shape: Shape) -> tuple[int, float]:
    """The heads of one rank, and the time that a pair takes in them."""
    return shape.heads, pair_flops(shape, is_backward=False) / pair_flops(
        SHAPE, is_backward=False
    )


def _steps(part: Part, groups: Layout) -> list[list[Any]]:
    """The hops; where tokens are traded for heads, that comes first and trading back comes last."""
    hops = [_hop(hop, groups) for hop in part.schedule.hops]
    traded = [[part.schedule.rank, 0, 0, []]] if groups.members > 1 else []
    return [*traded, *hops, *traded]


def _hop(hop: Hop, groups: Layout) -> list[Any]:
    """Whose block, how many of its tokens are here, pairs, tiles as (q0, q1, k0, k1, lo, hi).

    Where queries travel, a tile's rows are the owner's, and its columns those of the rank that computes.
    """
    here: Ranges = (
        hop.arrives.ranges if hop.index else ((0, groups.tokens_of(hop.owner)),)
    )
    tiles = [
        [band.q0, band.q1, band.k0, band.k1, band.lo, band.hi] for band in hop.bands
    ]
    return [hop.owner, size(here), hop.num_pairs, tiles]


def _sends(
    part: Part, groups: Layout, place: int, trades: tuple[Pass, Pass]
) -> list[list[list[int]]]:
    """For each step (peer, tokens, bytes, whether they are results), of the rank at a place of its group.

    Blocks leave at a hop's start and results at its end, and go to the rank at the same place of another group.
    """
    sent: list[list[list[int]]] = [[] for _ in part.schedule.hops]
    computed, blocks = 0, list[list[int]]()
    for event in forward(part):
        if isinstance(event, Compute):
            computed = event.hop.index
            sent[computed] += blocks
            blocks = []
        elif isinstance(event, Post):
            is_result = event.number % MESSAGES_PER_HOP
            (sent[computed] if is_result else blocks).extend(
                [
                    groups.group_ranks(peer)[place],
                    size(each.ranges),
                    each.num_bytes,
                    is_result,
                ]
                for peer, each in event.sends
            )
    if groups.members == 1:
        return sent
    there, back = (
        _traded(part, groups, place, each, is_result)
        for is_result, each in enumerate(trades)
    )
    return [there, *sent, back]


def _traded(
    part: Part, groups: Layout, place: int, whole: Pass, is_result: int
) -> list[list[int]]:
    """An all-to-all as what a rank sends: alike to each other rank of its group."""
    ranks = groups.group_ranks(part.schedule.rank)
    peers = [rank for rank in ranks if rank != ranks[place]]
    # A trade is about the rank's own tokens there, and about as many of each peer's back.
    tokens, num_bytes = (
        part.tokens // len(ranks),
        int(whole.inter_node_bytes) // len(peers),
    )
    return [[peer, tokens, num_bytes, is_result] for peer in peers]


def _waits(
    part: Part, trades: dict[int, tuple[Pass, Pass]], *, is_traded: bool
) -> list[list[float]]:
    """For each kind of link the time waited before each step, and after the last one."""
    found: list[list[float]] = []
    for link, (there, back) in trades.items():
        waited, before = [0.0] * (len(part.schedule.hops) + 1), there.seconds
        for stretch in timeline(part, speeds(link)):
            if isinstance(stretch.event, Compute):
                waited[stretch.event.hop.index], before = before, 0.0
            else:
                before += stretch.stop - stretch.start
        waited[-1] = before
        # Nobody waits to trade: what a trade takes is waited for by what comes next.
        found.append(
            [
                round(each, 1)
                for each in ([0.0, *waited, back.seconds] if is_traded else waited)
            ]
        )
    return found
