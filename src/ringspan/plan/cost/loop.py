"""Backward memory of the loop in ``torch/engine/attention/ring.py``, by ``core/schedule/events.py``."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Final

from ringspan.core.codec import EXACT, Codec
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal
from ringspan.core.names import LayoutName
from ringspan.core.schedule.events import backward
from ringspan.core.schedule.kernel_launches import pieces
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.steps import (
    Accumulate,
    Compute,
    Convert,
    Event,
    Free,
    Make,
    Part,
)
from ringspan.core.schedule.workspace import Returning, Shape

# Beyond this number of nodes, each further node adds the same bytes. In a single ring every rank counts as a node.
_MOST_NODES: Final = 8
# A schedule has hops x owners entries, and a TPU's node has thousands of devices. Beyond this number of ranks, nodes
# are walked with fewer ranks each, which hold the same.
_MOST_RANKS: Final = 512
# Tokens per rank of the schedule that is walked; the bytes grow with them.
_TOKENS: Final = 64
# With more tokens the scale factors of a block are negligible, as in training.
_MANY_TOKENS: Final = 1 << 16


@dataclass(frozen=True)
class Held:
    """Bytes at the highest moment: in computation (sums, a tile's gradients) and in transit."""

    sums: float
    in_transit: float

    @property
    def total(self) -> float:
        return self.sums + self.in_transit

    def times(self, factor: float) -> "Held":
        return Held(self.sums * factor, self.in_transit * factor)


def loop_bytes(
    layout: LayoutName,
    ranks: int,
    route: Route,
    query_numbers: int,
    kv_numbers: int,
    groups: int,
    number_bytes: int,
    gradient_bytes: int | None = None,
    sent_as: Codec = EXACT,
    *,
    in_place: bool = True,
) -> Held:
    """Return the bytes per token of the first or last rank, whichever holds more, for a causal mask without Ulysses.

    Numbers of a token over all heads, in ``groups`` that run in turn; keys and values together are sent as
    ``sent_as``, dk and dv have ``gradient_bytes`` if more than ``number_bytes``. ``in_place``: see ``Part``.
    """
    unit = gcd(query_numbers, kv_numbers)
    shares = query_numbers // unit, kv_numbers // unit
    types = number_bytes, gradient_bytes or number_bytes
    # While a group computes, gathered passes also hold the keys of the next and the gradients of the last.
    groups_held = min(groups, 3 if route.name == "all-gather" else 2)
    return _share(
        layout, ranks, route, *shares, groups_held, types, sent_as, in_place
    ).times(unit / groups)


def tile_pairs(layout: LayoutName, tokens: int) -> int:
    """Return ``Schedule.tile_pairs`` of a causal mask on more than one rank."""
    one = make_schedule(Layout(layout, 2 * _TOKENS, 2), causal(), 0).tile_pairs
    return one * tokens**2 // _TOKENS**2


@lru_cache(maxsize=1024)
def _share(
    layout: LayoutName, ranks: int, route: Route, query_numbers: int, kv_numbers: int, groups: int,
    types: tuple[int, int], sent_as: Codec, in_place: bool,
) -> Held:  # fmt: skip
    """Return the bytes per token of a loop whose query and key numbers have no common factor, walked event by event.

    Only few ranks and tokens are walked. Above ``_MOST_NODES`` nodes the result is extrapolated from that number and
    half of it, and a large node is replaced by a smaller one. Of a causal mask the first or the last rank holds most.
    """
    large, small = _MOST_NODES * route.inner, _MOST_NODES // 2 * route.inner
    rest = query_numbers, kv_numbers, groups, types, sent_as, in_place
    if ranks > large:
        most, less = (_share(layout, n, route, *rest) for n in (large, small))
        beyond = (ranks - large) / (large - small)
        sums, in_transit = most.sums - less.sums, most.in_transit - less.in_transit
        return Held(most.sums + sums * beyond, most.in_transit + in_transit * beyond)
    if ranks > _MOST_RANKS:
        nodes = ranks // route.inner
        inner = _MOST_RANKS // nodes
        return _share(layout, nodes * inner, replace(route, inner=inner), *rest)
    tokens = _MANY_TOKENS if sent_as.is_scaled else _TOKENS
    split = Layout(layout, tokens * ranks, ranks)
    shape = Shape(
        1, query_numbers * groups, kv_numbers * groups, 1, 0, types[0], sent_as=sent_as
    )
    parts = (
        Part(
            make_schedule(split, causal(), rank, None, route),
            shape,
            tokens,
            tokens,
            head_groups=groups,
            kv_itemsize=types[1],
            in_place=in_place,
        )
        for rank in {0, ranks - 1}
    )
    walks = (
        backward(replace(part, kernel=Returning(part.group, pieces))) for part in parts
    )
    return most_held(walks).times(1 / tokens)


def most_held(walks: Iterable[Iterable[Event]]) -> Held:
    """Return the highest moment of several ranks' events."""
    return max(map(_highest, walks), key=lambda held: held.total)


def _highest(events: Iterable[Event]) -> Held:
    """Return the moment at which buffers and the running computation, conversion or sum take most bytes."""
    highest, sums, in_transit = Held(0, 0), 0, 0
    for event in events:
        if isinstance(event, Make | Free):
            change = (
                event.buffer.num_bytes
                if isinstance(event, Make)
                else -event.buffer.num_bytes
            )
            sums, in_transit = (
                (sums + change, in_transit)
                if event.buffer.is_sum
                else (sums, in_transit + change)
            )
        taken = (
            event.num_bytes if isinstance(event, Compute | Convert | Accumulate) else 0
        )
        if sums + in_transit + taken > highest.total:
            highest = Held(sums + taken, in_transit)
    return highest
