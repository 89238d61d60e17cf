"""Which route takes least time: a model of compute and links over the schedule of one rank.

The model knows FLOPs, bytes and the order in which a route asks for them, nothing of latency or congestion. It is
deterministic, so that all ranks choose alike.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ringspan.core.errors import UnsupportedError
from ringspan.core.layout import Layout
from ringspan.core.mask import Mask
from ringspan.core.ranges import size
from ringspan.core.route import Heads, Route, member_heads
from ringspan.core.schedule import Parcel, Schedule, plan

_WORTH_IT: Final = 0.97  # another route than the ring must save three percent: the model is no better than that


@dataclass(frozen=True)
class Speeds:
    """What one rank does a second: attention FLOPs, and bytes to a rank in its node and to one outside of it."""

    flops: float
    intra_node_bytes: float
    inter_node_bytes: float
    ranks_per_node: int

    def bandwidth(self, one: int, other: int) -> float:
        same = one // self.ranks_per_node == other // self.ranks_per_node
        return self.intra_node_bytes if same else self.inter_node_bytes


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention that cost time and bytes."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int


@dataclass(frozen=True)
class Choice:
    """The route, the forward seconds that the model gives each candidate, and why."""

    route: str
    seconds: tuple[tuple[str, float], ...]

    @property
    def reason(self) -> str:
        timed = ", ".join(f"{route} {seconds:.3g} s" for route, seconds in self.seconds)
        return f"route {self.route}: predicted forward time {timed}"


@lru_cache(maxsize=64)
def choose_route(
    layout: Layout,
    mask: Mask,
    shape: Shape,
    speeds: Speeds,
    keys: Layout | None = None,
    *,
    may_pass_queries: bool = True,
) -> Choice:
    """The quickest route by the model; the one with the smaller messages of two rings unless another is clearly
    quicker.

    The rings are that of keys and values and, where queries, out and lse are fewer bytes, that of queries. Further
    candidates: the double ring when there are several nodes, all-gather, and Ulysses groups of every size that the
    heads allow, with a ring between them. ``keys`` is where the keys live when they are another sequence.
    """
    plain = "ring"
    if may_pass_queries and _sent_bytes(layout, keys, mask, "pass-q", shape) < _sent_bytes(
        layout, keys, mask, "ring", shape
    ):
        plain = "pass-q"
    candidates = ["ring", plain] if plain != "ring" else ["ring"]
    per_node = speeds.ranks_per_node
    if 1 < per_node < layout.ranks and layout.ranks % per_node == 0:
        candidates.append(f"double-ring:{per_node}")
    candidates.append("all-gather")
    for members in range(2, layout.ranks + 1):
        if layout.ranks % members == 0 and _splits(shape, members):
            candidates.append(f"ulysses:{members}")
    seconds = {route: forward_seconds(layout, mask, route, shape, speeds, keys) for route in candidates}
    best = min(seconds, key=lambda route: seconds[route])
    if seconds[best] > _WORTH_IT * seconds[plain]:
        best = plain
    return Choice(best, tuple(seconds.items()))


def forward_seconds(
    layout: Layout, mask: Mask, route: str, shape: Shape, speeds: Speeds, keys: Layout | None = None
) -> float:
    """The time of a forward pass on the slower of the first and the last rank."""
    keys = keys or layout
    parsed = Route.parse(route, layout.ranks)
    members, heads = parsed.ulysses, Heads(slice(0, shape.heads), slice(0, shape.kv_heads))
    trade = 0.0
    if members > 1:
        heads = member_heads(shape.heads, shape.kv_heads, members)[0]
        traded = _count(heads.queries) * (shape.head_dim + shape.value_dim) * layout.tokens_per_rank
        traded += _kv_numbers(heads, shape) * keys.tokens_per_rank
        layout, keys = layout.grouped(members), keys.grouped(members)
        first, last = layout.group_ranks(0)[0], layout.group_ranks(0)[-1]
        trade = (members - 1) * shape.batch * traded * shape.itemsize / speeds.bandwidth(first, last)
    pair = 4 * shape.batch * _count(heads.queries) * (shape.head_dim + shape.value_dim) / 2 / speeds.flops
    between = Route(parsed.name, parsed.inner)
    # Peers of one member are as far apart as the groups.
    spread = Speeds(
        speeds.flops, speeds.intra_node_bytes, speeds.inter_node_bytes, max(1, speeds.ranks_per_node // members)
    )
    sizes = _token_bytes(between, heads, shape)
    ends = {0, layout.ranks - 1}
    return trade + max(_hop_by_hop(plan(layout, mask, r, keys, between), pair, *sizes, spread) for r in ends)


def _sent_bytes(layout: Layout, keys: Layout | None, mask: Mask, route: str, shape: Shape) -> int:
    """What the first and the last rank send on a route without groups, in forward."""
    way, total = Route.parse(route, layout.ranks), 0
    token, partial = _token_bytes(way, Heads(slice(0, shape.heads), slice(0, shape.kv_heads)), shape)
    for rank in (0, layout.ranks - 1):
        schedule = plan(layout, mask, rank, keys, way)
        total += schedule.sent_tokens * token + schedule.sent_gradient_tokens * partial
    return total


def _token_bytes(route: Route, heads: Heads, shape: Shape) -> tuple[int, int]:
    """Bytes of a token of a block, and of the partial (out and lse, at least float32) that goes home in forward."""
    if not route.passes_queries:
        return shape.batch * _kv_numbers(heads, shape) * shape.itemsize, 0
    rows = shape.batch * _count(heads.queries)
    return rows * shape.head_dim * shape.itemsize, rows * (shape.value_dim + 1) * max(shape.itemsize, 4)


def _hop_by_hop(schedule: Schedule, pair: float, token: int, partial: int, speeds: Speeds) -> float:
    """When the last hop ends: a hop starts when the one before has ended and its block is here.

    Blocks of one link come one after the other, each asked for at the start of the hop that posts it; partials that
    come home at the end of the hop that makes them.
    """
    started: list[float] = []
    arrived = [0.0] * len(schedule.hops)
    free = {True: 0.0, False: 0.0}  # when the links inside and outside of the node have nothing left to bring
    end = home = 0.0
    for hop in schedule.hops:
        started.append(max(end, arrived[hop.index]))
        for later, _ in hop.sends:
            arrived[later] = _bring(schedule.hops[later].arrives, token, started[-1], free, schedule.rank, speeds)
        end = started[-1] + hop.num_pairs * pair
        if partial:
            home = max(home, _bring(hop.comes_home, partial, end, free, schedule.rank, speeds))
    return max(end, home)


def _bring(parcel: Parcel, token: int, asked: float, free: dict[bool, float], rank: int, speeds: Speeds) -> float:
    """When a parcel that is asked for now is here; the link that brings it is busy until then."""
    bandwidth = speeds.bandwidth(rank, parcel.peer)
    link = bandwidth == speeds.intra_node_bytes
    free[link] = max(free[link], asked) + size(parcel.ranges) * token / bandwidth
    return free[link]


def _kv_numbers(heads: Heads, shape: Shape) -> int:
    return _count(heads.keys) * (shape.head_dim + shape.value_dim)


def _count(heads: slice) -> int:
    return heads.stop - heads.start


def _splits(shape: Shape, members: int) -> bool:
    try:
        member_heads(shape.heads, shape.kv_heads, members)
    except UnsupportedError:
        return False
    return True
