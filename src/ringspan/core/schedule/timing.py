"""Time of one attention on a route from FLOPs, bytes and order, without latency or congestion."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.schedule.events import backward, forward
from ringspan.core.schedule.paths import loads
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.schedule.schedule import Schedule, make_schedule
from ringspan.core.schedule.steps import Compute, Event, Part, Post, Wait
from ringspan.core.schedule.workspace import Shape, head_groups

FORWARD_PRODUCTS: Final = 2  # matrix products of attention: scores and weighted values
# Scores again, and the gradients of weights, queries, keys and values.
BACKWARD_PRODUCTS: Final = 5


@dataclass(frozen=True)
class Speeds:
    """One rank's attention FLOP/s, and bytes/s from a rank of its node and from another node."""

    flops: float
    intra_node_bytes: float
    inter_node_bytes: float
    ranks_per_node: int
    on_cpu: bool = False

    def same_node(self, one: int, other: int) -> bool:
        return one // self.ranks_per_node == other // self.ranks_per_node


class Pass(NamedTuple):
    """One rank's pass: its end, computing time, and what arrives on its links."""

    seconds: float
    compute_seconds: float
    intra_node_bytes: float
    inter_node_bytes: float


def one_after_the_other(*each: Pass) -> Pass:
    return Pass(*map(sum, zip(Pass(0, 0, 0, 0), *each, strict=True)))


def forward_pass(
    layout: Layout, mask: Mask, route: str | Route, shape: Shape, speeds: Speeds, keys: Layout | None = None,
) -> Pass:  # fmt: skip
    """Return the slowest rank's forward pass, see ``passes``."""
    return slowest(
        passes(
            layout,
            mask,
            route,
            shape,
            speeds,
            keys,
            is_backward=False,
        )
    )


def slowest(each: Iterable[Pass]) -> Pass:
    return max(each, key=lambda one: one.seconds)


def passes(
    layout: Layout, mask: Mask, route: str | Route, shape: Shape, speeds: Speeds, keys: Layout | None = None, *,
    is_backward: bool,
) -> tuple[Pass, ...]:  # fmt: skip
    """Time a pass on the ranks that may take longest; Ulysses groups add their exchange, never hidden."""
    keys = keys or layout
    route = Route.parse(route, layout.ranks) if isinstance(route, str) else route
    route = route.backward if is_backward else route
    traded = Pass(0, 0, 0, 0)
    if route.ulysses > 1:
        traded = one_after_the_other(
            *trade(layout, keys, shape, route.ulysses, speeds, is_backward=is_backward)
        )
        shape = shape.of(member_heads(shape.heads, shape.kv_heads, route.ulysses)[0])
        layout, keys = (
            _without_members(each.grouped(route.ulysses)) for each in (layout, keys)
        )
        # The route joins the members at the same place of each group, so a node holds one rank per group.
        speeds = replace(
            speeds, ranks_per_node=max(1, speeds.ranks_per_node // route.ulysses)
        )
    between = replace(route, ulysses=1)
    ranks = _slow_ranks(
        layout, keys, mask, between, shape, speeds, is_backward=is_backward
    )
    schedules = {
        rank: make_schedule(layout, mask, rank, keys, between) for rank in ranks
    }
    alone = {
        rank: one_after_the_other(_walk(part, speeds, is_backward=is_backward), traded)
        for rank, schedule in schedules.items()
        for part in [_part(schedule, layout.tokens_per_rank, shape, speeds)]
    }
    return tuple(map(alone.__getitem__, ranks))


def _part(schedule: Schedule, tokens: int, shape: Shape, speeds: Speeds) -> Part:
    """Return a rank's part: all gathers but the first travel meanwhile."""
    groups = 1
    if schedule.gathered:
        groups = head_groups(
            shape.batch * shape.heads,
            shape.kv_heads,
            schedule.ranks,
            schedule.tile_pairs,
            on_cpu=speeds.on_cpu,
            blocks=schedule.blocks,
            rank_pairs=schedule.rank_pairs,
            key_bytes=shape.batch
            * shape.kv_heads
            * shape.head_dim
            * shape.itemsize
            * tokens,
        )
    return Part(schedule, shape, head_groups=groups)


def _slow_ranks(
    layout: Layout,
    keys: Layout,
    mask: Mask,
    route: Route,
    shape: Shape,
    speeds: Speeds,
    *,
    is_backward: bool,
) -> tuple[int, ...]:
    """Return ranks that may be slowest: first, last, last node's first, and those with most work, arrivals, or both."""
    found = loads(layout, mask, keys, route)
    token = shape.kv_numbers * shape.itemsize
    arrivals = [(found.blocks, shape.query_bytes if route.passes_queries else token)]
    if route.passes_queries:
        arrivals.append(
            (
                found.returned,
                shape.batch * shape.heads * shape.sum_itemsize * (shape.value_dim + 1),
            )
        )
    elif is_backward:
        arrivals += [
            (of, shape.kv_numbers * shape.sum_itemsize)
            for of in (found.gradients, found.returned)
        ]
    everyone, last = np.arange(layout.ranks), layout.ranks - 1
    inside, outside = np.zeros((2, layout.ranks))
    for (peers, tokens), num_bytes in arrivals:
        is_inside = peers // speeds.ranks_per_node == everyone // speeds.ranks_per_node
        inside += (tokens * is_inside).sum(0) * num_bytes / speeds.intra_node_bytes
        outside += (tokens * ~is_inside).sum(0) * num_bytes / speeds.inter_node_bytes
    computing = found.pairs * pair_flops(shape, is_backward=is_backward) / speeds.flops
    most = (
        int(of.argmax())
        for of in (computing, inside, outside, computing + inside + outside)
    )
    return 0, last // speeds.ranks_per_node * speeds.ranks_per_node, last, *most


def _without_members(layout: Layout) -> Layout:
    """Return the layout with a rank per group, if padding stays equal: then all group sizes share one schedule."""
    plain = replace(layout, members=1)
    return plain if plain.padded_length == layout.padded_length else layout


def trade(
    layout: Layout,
    keys: Layout,
    shape: Shape,
    members: int,
    speeds: Speeds,
    *,
    is_backward: bool = False,
) -> tuple[Pass, Pass]:
    """Return a Ulysses group's all-to-alls (heads and back) as rank 0 sees them."""
    shares = member_heads(shape.heads, shape.kv_heads, members)
    is_shared = members > 1 and shares[0].keys == shares[1].keys
    there, back = _traded_bytes(
        layout, keys, shape.of(shares[0]), is_backward=is_backward, is_shared=is_shared
    )
    peers = layout.grouped(members).group_ranks(0)[1:]
    return _all_to_all(peers, there, speeds), _all_to_all(peers, back, speeds)


def _all_to_all(peers: Iterable[int], num_bytes: int, speeds: Speeds) -> Pass:
    links = _Links(0, speeds)
    for peer in peers:
        links.bring(peer, num_bytes, 0.0)
    return Pass(max(links.free.values()), 0.0, links.bytes[True], links.bytes[False])


def _traded_bytes(
    layout: Layout, keys: Layout, mine: Shape, *, is_backward: bool, is_shared: bool
) -> tuple[int, int]:
    """Return the bytes between two Ulysses members, to heads and back; gradients of shared keys travel in float32."""
    rows = mine.batch * mine.heads
    result = rows * (mine.value_dim * mine.itemsize + mine.sum_itemsize)  # out and lse
    keys_and_values = mine.kv_numbers * mine.itemsize
    if not is_backward:
        there = (
            layout.tokens_per_rank * mine.query_bytes
            + keys.tokens_per_rank * keys_and_values
        )
        return there, layout.tokens_per_rank * result
    # Backward trades q, dout, out and log-sum-exp.
    queries = mine.query_bytes + rows * mine.value_dim * mine.itemsize + result
    gradients = mine.kv_numbers * (mine.sum_itemsize if is_shared else mine.itemsize)
    there = layout.tokens_per_rank * queries + keys.tokens_per_rank * keys_and_values
    return (
        there,
        layout.tokens_per_rank * mine.query_bytes + keys.tokens_per_rank * gradients,
    )


class Stretch(NamedTuple):
    """Time that a rank computes a hop's tiles, or waits for a transfer, perhaps 0."""

    event: Compute | Wait
    start: float
    stop: float


def timeline(
    part: Part, speeds: Speeds, *, is_backward: bool = False
) -> tuple[Stretch, ...]:
    """Return when one rank computes and waits in a pass."""
    return tuple(
        _of_part(
            part, speeds, _Links(part.schedule.rank, speeds), is_backward=is_backward
        )
    )


def _walk(part: Part, speeds: Speeds, *, is_backward: bool) -> Pass:
    """Return the end of the last event, of launches, messages and the loop's waits."""
    pair = pair_flops(part.shape, is_backward=is_backward) / speeds.flops
    links = _Links(part.schedule.rank, speeds)
    now = 0.0
    for stretch in _of_part(part, speeds, links, is_backward=is_backward):
        now = stretch.stop
    return Pass(
        now, part.schedule.num_pairs * pair, links.bytes[True], links.bytes[False]
    )


def stretched(events: Iterable[Event], pair: float, rank: int, speeds: Speeds) -> Pass:
    """Return a rank's pass of these events, if a pair of a query and a key takes ``pair`` seconds."""
    links = _Links(rank, speeds)
    stretches = [*_stretches(events, pair, links)]
    computing = sum(
        each.stop - each.start for each in stretches if isinstance(each.event, Compute)
    )
    return Pass(stretches[-1].stop, computing, links.bytes[True], links.bytes[False])


def _of_part(
    part: Part, speeds: Speeds, links: "_Links", *, is_backward: bool
) -> Iterator[Stretch]:
    pair = pair_flops(part.group, is_backward=is_backward) / speeds.flops
    return _stretches((backward if is_backward else forward)(part), pair, links)


def _stretches(
    events: Iterable[Event], pair: float, links: "_Links"
) -> Iterator[Stretch]:
    """Yield the times at which a rank computes and waits, given ``pair`` seconds per pair of a query and a key.

    The rank does one thing after the other. A posted transfer occupies the links meanwhile, and a wait ends when it has
    arrived. Sums, conversions and launches take no time.
    """
    arrived: dict[int, float] = {}
    now = 0.0
    for event in events:
        if isinstance(event, Compute):
            start, now = now, now + event.hop.num_pairs * pair
            yield Stretch(event, start, now)
        elif isinstance(event, Post):
            each = [
                links.bring(peer, buffer.num_bytes, now)
                for peer, buffer in event.receives
            ]
            arrived[event.number] = max([arrived.get(event.number, now), *each])
        elif isinstance(event, Wait):
            start, now = now, max(now, arrived[event.number])
            yield Stretch(event, start, now)


def pair_flops(shape: Shape, *, is_backward: bool) -> float:
    """Return the FLOPs of a (query, key) pair: 2 per number of a head and product."""
    products = BACKWARD_PRODUCTS if is_backward else FORWARD_PRODUCTS
    return products * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)


def sent_bytes(
    layout: Layout,
    keys: Layout,
    mask: Mask,
    route: str | Route,
    shape: Shape,
    ranks: Iterable[int],
) -> int:
    """Return the bytes that these ranks send in one forward pass."""
    passes = (
        forward(Part(make_schedule(layout, mask, rank, keys, route), shape))
        for rank in ranks
    )
    posts = (event for each in passes for event in each if isinstance(event, Post))
    return sum(buffer.num_bytes for post in posts for _, buffer in post.sends)


class _Links:
    """Links into one rank, inside and outside its node; each carries one message at a time."""

    def __init__(self, rank: int, speeds: Speeds) -> None:
        self._rank, self._speeds = rank, speeds
        # When each link (inside the node or not) is idle again.
        self.free = {True: 0.0, False: 0.0}
        self.bytes = {True: 0, False: 0}

    def bring(self, peer: int, num_bytes: int, asked: float) -> float:
        """Return when bytes asked for now arrive; the link is busy until then."""
        inside = self._speeds.same_node(self._rank, peer)
        bandwidth = (
            self._speeds.intra_node_bytes if inside else self._speeds.inter_node_bytes
        )
        self.bytes[inside] += num_bytes
        self.free[inside] = max(self.free[inside], asked) + num_bytes / bandwidth
        return self.free[inside]
