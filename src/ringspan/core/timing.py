"""When one attention ends on a route: computing against links, over the schedule that the ring carries out.

The model knows FLOPs, bytes and the order in which a route asks for them, nothing of latency or congestion. It is
deterministic, so that all ranks choose alike. N ranks, H query heads, G key/value heads, D head size, E value head
size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ringspan.core.layout import Layout
from ringspan.core.mask import Mask
from ringspan.core.ranges import size
from ringspan.core.route import Heads, Route, member_heads
from ringspan.core.schedule import Schedule, Send, arrivals, plan

FORWARD_PRODUCTS: Final = 2  # matrix products of attention: scores and weighted values
BACKWARD_PRODUCTS: Final = 5  # scores again, and the gradients of weights, queries, keys and values


@dataclass(frozen=True)
class Speeds:
    """What one rank does a second: attention FLOPs, and bytes from a rank of its node and from one outside of it."""

    flops: float
    intra_node_bytes: float
    inter_node_bytes: float
    ranks_per_node: int

    def same_node(self, one: int, other: int) -> bool:
        return one // self.ranks_per_node == other // self.ranks_per_node


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention that cost time and bytes."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @property
    def sum_itemsize(self) -> int:
        """Bytes of a number of what adds up: log-sum-exps, gradients and partials on their way."""
        return max(self.itemsize, 4)

    @property
    def query_bytes(self) -> int:
        return self.batch * self.heads * self.head_dim * self.itemsize

    @property
    def kv_numbers(self) -> int:
        """Of the key and the value of one token."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim)

    def of(self, heads: Heads) -> "Shape":
        """What is left of it for some heads."""
        return replace(
            self, heads=heads.queries.stop - heads.queries.start, kv_heads=heads.keys.stop - heads.keys.start
        )


class Pass(NamedTuple):
    """A forward or backward pass as one rank sees it: when it ends, what it computes, and what arrives on its links."""

    seconds: float
    compute_seconds: float
    intra_node_bytes: float
    inter_node_bytes: float


def forward_pass(
    layout: Layout, mask: Mask, route: str | Route, shape: Shape, speeds: Speeds, keys: Layout | None = None
) -> Pass:
    """The forward pass of the rank that takes longest, see ``passes``."""
    return slowest(passes(layout, mask, route, shape, speeds, keys, is_backward=False))


def slowest(each: Iterable[Pass]) -> Pass:
    """The one that ends last."""
    return max(each, key=lambda one: one.seconds)


def passes(
    layout: Layout,
    mask: Mask,
    route: str | Route,
    shape: Shape,
    speeds: Speeds,
    keys: Layout | None = None,
    *,
    is_backward: bool,
) -> tuple[Pass, ...]:
    """A forward or backward pass on the ranks of which one takes longest, see ``_slow_ranks``.

    With Ulysses groups: their trade of tokens for heads, which nothing hides, and the pass between the groups.
    """
    keys = keys or layout
    route = Route.parse(route, layout.ranks) if isinstance(route, str) else route
    route = route.backward if is_backward else route
    trade = _Links(0, speeds)
    if route.ulysses > 1:
        shares = member_heads(shape.heads, shape.kv_heads, route.ulysses)
        is_shared = shares[0].keys == shares[1].keys
        num_bytes = _traded_bytes(layout, keys, shape.of(shares[0]), is_backward=is_backward, is_shared=is_shared)
        layout, keys, shape = layout.grouped(route.ulysses), keys.grouped(route.ulysses), shape.of(shares[0])
        for member in layout.group_ranks(0)[1:]:
            trade.bring(member, num_bytes, 0.0)
        layout, keys = _without_members(layout), _without_members(keys)
        # Members of one place in their groups are as far apart as the groups.
        speeds = replace(speeds, ranks_per_node=max(1, speeds.ranks_per_node // route.ulysses))
    between = replace(route, ulysses=1)
    ranks = _slow_ranks(layout, keys, mask, between, speeds)
    schedules = {rank: plan(layout, mask, rank, keys, between) for rank in ranks}
    alone = {rank: _walk(schedule, shape, speeds, is_backward=is_backward) for rank, schedule in schedules.items()}
    return tuple(
        Pass(
            one.seconds + max(trade.free.values()),
            one.compute_seconds,
            one.intra_node_bytes + trade.bytes[True],
            one.inter_node_bytes + trade.bytes[False],
        )
        for one in map(alone.__getitem__, ranks)
    )


def _slow_ranks(layout: Layout, keys: Layout, mask: Mask, route: Route, speeds: Speeds) -> tuple[int, ...]:
    """The first rank, the first of the last node and the last, of which one computes most; and those that get most
    from their node and from outside of it, which depends on the way around that a ring takes.
    """
    sources, tokens = arrivals(layout, mask, keys, route)
    everyone, last = np.arange(layout.ranks), layout.ranks - 1
    inside = sources // speeds.ranks_per_node == everyone // speeds.ranks_per_node
    most = (int((tokens * which).sum(0).argmax()) for which in (inside, ~inside))
    return 0, last // speeds.ranks_per_node * speeds.ranks_per_node, last, *most


def _without_members(layout: Layout) -> Layout:
    """As many ranks as there are groups, where that pads alike: groups of every size then share one schedule."""
    plain = replace(layout, members=1)
    return plain if plain.padded_length == layout.padded_length else layout


def _traded_bytes(layout: Layout, keys: Layout, mine: Shape, *, is_backward: bool, is_shared: bool) -> int:
    """What one member of a Ulysses group gets from another: queries and keys there, and results or gradients back.

    The gradient of keys that several members share is not yet summed when it is sent, so it is in float32.
    """
    rows = mine.batch * mine.heads
    result = rows * (mine.value_dim * mine.itemsize + mine.sum_itemsize)  # out and lse
    keys_and_values = mine.kv_numbers * mine.itemsize
    if not is_backward:
        return layout.tokens_per_rank * (mine.query_bytes + result) + keys.tokens_per_rank * keys_and_values
    queries = 2 * mine.query_bytes + rows * mine.value_dim * mine.itemsize + result  # q, dq, dout
    gradients = mine.kv_numbers * (mine.sum_itemsize if is_shared else mine.itemsize)
    return layout.tokens_per_rank * queries + keys.tokens_per_rank * (keys_and_values + gradients)


def _walk(schedule: Schedule, shape: Shape, speeds: Speeds, *, is_backward: bool) -> Pass:
    """When the last hop has ended and owners have what others made of their blocks. A hop starts when the one before
    has ended and its block is here.

    Blocks are asked for at the start of the hop that posts them. What was made of a block (a gradient, in backward; a
    partial, of queries) is asked for at the end of a hop, and is needed at the end of the hop that adds to it.
    """
    token, made = _token_bytes(schedule, shape, is_backward=is_backward)
    pair = pair_flops(shape, is_backward=is_backward) / speeds.flops
    links = _Links(schedule.rank, speeds)
    arrived = [0.0] * len(schedule.hops)
    behind: dict[int, float] = {}
    end = returned = 0.0
    for hop in schedule.hops:
        start = max(end, arrived[hop.index])
        for later, _ in hop.sends:
            arrived[later] = links.bring_tokens(schedule.hops[later].arrives, token, start)
        end = start + hop.num_pairs * pair
        if not made:
            continue
        end = max(end, behind.pop(hop.index, 0.0))
        if hop.gradient_next:
            coming = schedule.hops[hop.gradient_next].gradient_in
            behind[hop.gradient_next] = links.bring_tokens(coming, made, end)
        returned = max(returned, links.bring_tokens(hop.from_visitor, made, end))
    return Pass(max(end, returned), schedule.num_pairs * pair, links.bytes[True], links.bytes[False])


def pair_flops(shape: Shape, *, is_backward: bool) -> float:
    """FLOPs of one allowed (query, key) pair over all heads: 2 for each number of a head in each matrix product."""
    products = BACKWARD_PRODUCTS if is_backward else FORWARD_PRODUCTS
    return products * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)


def _token_bytes(schedule: Schedule, shape: Shape, *, is_backward: bool) -> tuple[int, int]:
    """Bytes of a token of a block, and of what is made of it."""
    if schedule.passes_queries:
        partial = shape.batch * shape.heads * (shape.value_dim + 1)
        return shape.query_bytes, partial * shape.sum_itemsize
    return shape.kv_numbers * shape.itemsize, shape.kv_numbers * shape.sum_itemsize if is_backward else 0


def sent_bytes(layout: Layout, keys: Layout, mask: Mask, route: str, shape: Shape, ranks: Iterable[int]) -> int:
    """What some ranks send in a forward pass, on a route without groups."""
    schedules = [plan(layout, mask, rank, keys, route) for rank in ranks]
    sizes = [_token_bytes(schedule, shape, is_backward=False) for schedule in schedules]
    return sum(
        schedule.sent_tokens * token + schedule.sent_gradient_tokens * made
        for schedule, (token, made) in zip(schedules, sizes, strict=True)
    )


class _Links:
    """What arrives at one rank: on the link inside of its node, and on that outside, one message after the other."""

    def __init__(self, rank: int, speeds: Speeds) -> None:
        self._rank, self._speeds = rank, speeds
        self.free = {True: 0.0, False: 0.0}  # when a link has nothing left to bring
        self.bytes = {True: 0, False: 0}

    def bring_tokens(self, send: Send, token_bytes: int, asked: float) -> float:
        """When some tokens that are asked for now are here."""
        return self.bring(send.peer, size(send.ranges) * token_bytes, asked)

    def bring(self, peer: int, num_bytes: int, asked: float) -> float:
        """When bytes that are asked for now are here; the link is busy until then. Nothing needs no message."""
        if not num_bytes:
            return asked
        inside = self._speeds.same_node(self._rank, peer)
        bandwidth = self._speeds.intra_node_bytes if inside else self._speeds.inter_node_bytes
        self.bytes[inside] += num_bytes
        self.free[inside] = max(self.free[inside], asked) + num_bytes / bandwidth
        return self.free[inside]
