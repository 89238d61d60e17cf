"""What the loop of ``torch/attention/ring.py`` holds in its backward pass, walked over the same schedule.

Every buffer that the loop makes is a number of bytes here, kept alive by the same things: a block in hand, a transfer
that has not been waited for, an arrival that has not been added.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Final

from ringspan.core.layout import Layout
from ringspan.core.mask import causal
from ringspan.core.names import LayoutName
from ringspan.core.ranges import Ranges, size
from ringspan.core.route import Route
from ringspan.core.schedule import Schedule, plan

_FLOAT32: Final = 4
_MOST_NODES: Final = 8  # beyond, what is held grows by the same with each node; of a single ring every rank is one
_TOKENS: Final = 64  # of a rank in the schedule that is walked: what is held grows with them


@dataclass(frozen=True)
class Held:
    """At the highest moment: what is computed with (sums, a tile's gradients), and what is in transit."""

    sums: float
    in_transit: float

    @property
    def total(self) -> float:
        return self.sums + self.in_transit

    def times(self, factor: float) -> "Held":
        return Held(self.sums * factor, self.in_transit * factor)


def loop_bytes(
    layout: LayoutName, ranks: int, route: Route, query_numbers: int, kv_numbers: int, groups: int, number_bytes: int
) -> Held:
    """Bytes for each token of a rank, on the first or the last rank, whichever holds more.

    ``query_numbers`` and ``kv_numbers`` (keys and values together) are those of one token over all heads; ``groups`` of
    heads go through the loop one after the other. A route without Ulysses groups, a causal mask.
    """
    unit = gcd(query_numbers, kv_numbers)
    shares = query_numbers // unit, kv_numbers // unit
    return _share(layout, ranks, route, *shares, min(groups, 2), number_bytes).times(unit / groups)


def tile_pairs(layout: LayoutName, tokens: int) -> int:
    """``Schedule.tile_pairs`` of a causal mask on any number of ranks, above one, of so many tokens."""
    one = plan(Layout(layout, 2 * _TOKENS, 2), causal(), 0).tile_pairs
    return one * tokens**2 // _TOKENS**2


@lru_cache(maxsize=1024)
def _share(
    layout: LayoutName, ranks: int, route: Route, query_numbers: int, kv_numbers: int, groups: int, number_bytes: int
) -> Held:
    """``loop_bytes`` of all heads of one group, of which there are one or more."""
    large, small = _MOST_NODES * route.inner, _MOST_NODES // 2 * route.inner
    if ranks > large:
        most, less = (_share(layout, n, route, query_numbers, kv_numbers, groups, number_bytes) for n in (large, small))
        beyond = (ranks - large) / (large - small)
        sums, in_transit = most.sums - less.sums, most.in_transit - less.in_transit
        return Held(most.sums + sums * beyond, most.in_transit + in_transit * beyond)
    split = Layout(layout, _TOKENS * ranks, ranks)
    walks = (
        _walk(plan(split, causal(), rank, None, route), _TOKENS, query_numbers, kv_numbers, number_bytes, groups)
        for rank in {0, ranks - 1}
    )
    return max(walks, key=lambda held: held.total).times(1 / _TOKENS)


class _Buffer:
    """One allocation."""

    def __init__(self, num_bytes: int, ranges: Ranges) -> None:
        self.num_bytes, self.ranges = num_bytes, ranges


class _Coming:
    """An arrival under way, and the transfer that keeps what is sent with it until it is waited for."""

    def __init__(self, sends: list[_Buffer], arrival: _Buffer) -> None:
        self.sends, self.arrival = sends, arrival

    def wait(self) -> _Buffer:
        self.sends.clear()
        return self.arrival

    @property
    def buffers(self) -> Iterator[_Buffer]:
        yield self.arrival
        yield from self.sends


def _walk(schedule: Schedule, tokens: int, query_numbers: int, kv_numbers: int, number_bytes: int, groups: int) -> Held:
    """``_backward_of_heads``, of one group of heads or of two: the first one's gradients still reach their owner at the
    first hop of the second.
    """
    sums = 0 if number_bytes == _FLOAT32 else _FLOAT32 * tokens  # float32 sums add up in the results
    highest = Held(0, 0)
    last: list[_Coming] = []  # what of the group before is still to be received
    for _ in range(groups):
        returning: list[_Coming] = []
        for made, coming, others in _moments(schedule, tokens, query_numbers, kv_numbers, number_bytes, returning):
            here = {id(b): b for b in (*others, *(b for each in (*coming, *last) for b in each.buffers))}
            own = sums * (query_numbers + kv_numbers * (2 if last else 1))
            held = Held(own + made, sum(buffer.num_bytes for buffer in here.values()))
            highest = max(highest, held, key=lambda each: each.total)
            if returning:
                last = []
        last = returning
    return highest


def _moments(
    schedule: Schedule,
    tokens: int,
    query_numbers: int,
    kv_numbers: int,
    number_bytes: int,
    returning: list[_Coming],
) -> Iterator[tuple[int, list[_Coming], tuple[_Buffer, ...]]]:
    """Bytes of a tile's gradients, what is under way and what else is here, wherever something is made."""
    block = _Buffer(0, ((0, tokens),))  # a rank's own lies in the inputs
    under_way: dict[int, _Coming] = {}
    behind: dict[int, _Coming] = {}

    def buffer(number_bytes: int, ranges: Ranges) -> _Buffer:
        return _Buffer(size(ranges) * kv_numbers * number_bytes, ranges)

    def coming() -> list[_Coming]:
        return [*under_way.values(), *behind.values(), *returning]

    for hop in schedule.hops:
        before = block
        if hop.index:
            block = under_way.pop(hop.index).wait()
        packed: dict[Ranges, _Buffer] = {block.ranges: block} if hop.index else {}
        for index, (_, ranges) in hop.sends:
            if ranges not in packed:
                packed[ranges] = buffer(number_bytes, ranges)
            under_way[index] = _Coming([packed[ranges]], buffer(number_bytes, schedule.hops[index].arrives.ranges))
        yield 0, coming(), (before, block)
        total = buffer(_FLOAT32 if hop.index else 0, hop.gradient)
        for tile in hop.tiles:
            made = number_bytes * (tile.num_rows * query_numbers + tile.num_keys * kv_numbers)
            yield made, coming(), (block, total)
        added = behind.pop(hop.index).wait() if hop.index in behind else total
        yield 0, coming(), (block, total, added)
        sends = [
            total if ranges == total.ranges else buffer(_FLOAT32, ranges)
            for ranges in (hop.gradient_on.ranges, hop.gradient_to_owner)
            if ranges
        ]
        arriving = schedule.hops[hop.gradient_next].gradient_in.ranges
        if hop.gradient_next:
            behind[hop.gradient_next] = _Coming(sends, buffer(_FLOAT32, arriving))
        returning.append(_Coming(sends, buffer(_FLOAT32, hop.from_visitor.ranges)))
        yield 0, coming(), (block, total, added)
        if hop.from_visitor.ranges:
            del returning[:-1]
