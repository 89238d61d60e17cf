"""What the explorer shows of each setting: who holds, computes, sends and waits, from core's schedules and events.

A pair of a query and a key takes one unit of time. Bytes are those of one layer of Llama 3.1 8B in bfloat16.
"""

from collections.abc import Iterator
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
from ringspan.core.schedule.events import MESSAGES_PER_HOP, Compute, Part, Post, forward
from ringspan.core.schedule.schedule import Hop, Schedule, make_schedule
from ringspan.core.schedule.timing import Speeds, pair_flops, timeline
from ringspan.core.schedule.workspace import Shape
from ringspan.report.drawing import RANK_COLOURS

LENGTH: Final = 48  # a multiple of twice each number of ranks, so that nothing is padded
SHAPE: Final = Shape(batch=1, heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)
RANKS: Final = (2, 3, 4, 6, 8)
LAYOUTS: Final = ("zigzag", "striped", "contiguous", "balanced")
ROUTES: Final = ("ring", "bidirectional", "double-ring:2", "all-gather", "pass-q")
LINKS: Final = (2, 8, 32)  # tokens per rank from which a whole block hides behind a full mask
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
    "windowed": ("documents: 5, 11, 29, 3 in a window of 6", documents([5, 11, 29, 3], window=6)),
}


def settings() -> Iterator[tuple[str, str, str, int]]:
    """Names of mask, layout and route, and the ranks, of all settings that there are."""
    for mask, layout, route, ranks in product(MASKS, LAYOUTS, ROUTES, RANKS):
        if not route.startswith("double-ring") or (ranks > 2 and ranks % 2 == 0):
            yield mask, layout, route, ranks


def layout_of(name: str, mask: Mask, ranks: int) -> Layout:
    if name == "balanced":
        return balanced(mask, length=LENGTH, ranks=ranks, chunk_tokens=1)
    return Layout(name, LENGTH, ranks)  # pyright: ignore[reportArgumentType]


def speeds(link: int) -> Speeds:
    """A pair takes a unit of time; a block of ``link`` tokens travels in the ``link`` squared units of its pairs."""
    block_bytes = link * SHAPE.kv_numbers * SHAPE.itemsize
    return Speeds(pair_flops(SHAPE, is_backward=False), block_bytes / link**2, block_bytes / link**2, 1)


def tables() -> dict[str, Any]:
    """All settings as a browser reads them; what occurs several times is kept once, and named by its number."""
    layouts, hops, sends, waits = _Numbered(), _Numbered(), _Numbered(), _Numbered()
    found: dict[str, list[Any]] = {}
    for mask_name, layout_name, route, ranks in settings():
        mask = MASKS[mask_name][1]
        layout = layout_of(layout_name, mask, ranks)
        schedules = [make_schedule(layout, mask, rank, route=route) for rank in range(ranks)]
        positions = [layout.positions(rank).tolist() for rank in range(ranks)]
        parts = [_part(schedule, layout) for schedule in schedules]
        found["|".join((mask_name, layout_name, route, str(ranks)))] = [
            layouts.number(positions),
            [
                [
                    [hops.number(_hop(hop, layout)) for hop in schedule.hops],
                    [sends.number(each) for each in _sends(part)],
                    [waits.number(each) for each in _waits(part)],
                ]
                for schedule, part in zip(schedules, parts, strict=True)
            ],
            int(schedules[0].passes_queries),
        ]
    return {
        "length": LENGTH,
        "blockBytes": SHAPE.kv_numbers * SHAPE.itemsize,
        "colours": RANK_COLOURS,
        "choices": {
            "mask": [[name, label] for name, (label, _) in MASKS.items()],
            "layout": [[name, name] for name in LAYOUTS],
            "route": [[name, name] for name in ROUTES],
            "ranks": [[str(ranks), str(ranks)] for ranks in RANKS],
            "link": [[str(link), f"a block hides from {link} tokens on"] for link in LINKS],
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


def _part(schedule: Schedule, layout: Layout) -> Part:
    tokens = layout.tokens_of(schedule.rank)
    return Part(schedule, SHAPE, tokens=tokens, key_tokens=tokens)


def _hop(hop: Hop, layout: Layout) -> list[Any]:
    """Whose block, how many of its tokens are here, pairs, tiles as (q0, q1, k0, k1, lo, hi).

    Where queries travel, a tile's rows are the owner's, and its columns those of the rank that computes.
    """
    here: Ranges = hop.arrives.ranges if hop.index else ((0, layout.tokens_of(hop.owner)),)
    tiles = [[band.q0, band.q1, band.k0, band.k1, band.lo, band.hi] for band in hop.bands]
    return [hop.owner, size(here), hop.num_pairs, tiles]


def _sends(part: Part) -> list[list[list[int]]]:
    """For each hop (peer, tokens, bytes, whether they are results): blocks leave at its start, results at its end."""
    sent: list[list[list[int]]] = [[] for _ in part.schedule.hops]
    computed = 0
    for event in forward(part):
        if isinstance(event, Compute):
            computed += 1
        elif isinstance(event, Post):
            is_result = event.number % MESSAGES_PER_HOP
            hop = computed - is_result
            sent[hop] += [[peer, size(each.ranges), each.num_bytes, is_result] for peer, each in event.sends]
    return sent


def _waits(part: Part) -> list[list[float]]:
    """For each kind of link the time waited before each hop, and after the last one."""
    found: list[list[float]] = []
    for link in LINKS:
        waited = [0.0]
        for stretch in timeline(part, speeds(link)):
            if isinstance(stretch.event, Compute):
                waited.append(0.0)
            else:
                waited[-1] += stretch.stop - stretch.start
        found.append([round(each, 1) for each in waited])
    return found
