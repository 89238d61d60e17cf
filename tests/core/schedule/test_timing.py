"""When passes end, where that can be worked out by hand, and what arrives, against what the ring brings."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import ringspan as rs
from ringspan.core.schedule import timing
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.steps import Part
from ringspan.core.schedule.timing import Speeds, forward_pass
from ringspan.core.schedule.workspace import Shape
from ringspan.torch.engine.transport.exchange import COUNTERS

NEAR = Speeds(1e12, 1e9, 1e8, 8)
HEADS = Shape(1, 8, 2, 16, 16, 4)
ROUTES = [
    "ring", "bidirectional", "double-ring:2", "all-gather", "pass-q", "ulysses:2", "ulysses", "ulysses:2+all-gather",
]  # fmt: skip


def backward_pass(*arguments):
    """As ``forward_pass``, which alone the library needs by itself."""
    return timing.slowest(timing.passes(*arguments, is_backward=True))


def received_bytes(mesh, route, shape, tokens, dtype):
    """What arrives at this rank in a forward and in a backward pass."""
    torch.manual_seed(mesh["ring"].get_local_rank())
    sizes = (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.value_dim),
    )
    q, k, v = (
        torch.randn(1, heads, tokens, size, dtype=dtype, requires_grad=True)
        for heads, size in sizes
    )
    COUNTERS.transfers = []
    out = rs.ring_attention(
        q, k, v, mask=rs.full(), group=mesh["ring"].get_group(), route=route
    )
    forward, COUNTERS.transfers = COUNTERS.transfers, []
    out.sum().backward()
    backward, COUNTERS.transfers = COUNTERS.transfers, None
    return [
        sum(transfer.received_bytes for transfer in transfers)
        for transfers in (forward, backward)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", ROUTES)
def test_what_arrives_is_what_the_ring_brings(pool, route, dtype):
    """With a full mask every rank gets as much."""
    layout, speeds = rs.Layout("zigzag", 4 * 6, 4), Speeds(1e12, 1e9, 1e8, 2)
    shape = replace(HEADS, itemsize=dtype.itemsize)
    passes = [
        walk(layout, rs.full(), route, shape, speeds)
        for walk in (forward_pass, backward_pass)
    ]
    expected = [one.intra_node_bytes + one.inter_node_bytes for one in passes]
    for arrived in pool.run(received_bytes, 4, route, HEADS, 6, dtype):
        assert arrived == expected


@pytest.mark.parametrize("route", ROUTES)
def test_without_links_a_pass_is_its_arithmetic(route):
    layout, free = rs.Layout("striped", 4 * 64, 4), Speeds(1e12, 1e30, 1e30, 2)
    pairs = layout.length**2 / 4
    for walk, products in ((forward_pass, 2), (backward_pass, 5)):
        one = walk(layout, rs.full(), route, HEADS, free)
        assert one.seconds == pytest.approx(products * 2 * 16 * 8 * pairs / 1e12)
        assert one.seconds == pytest.approx(one.compute_seconds)


def test_a_slow_link_bounds_backward_by_blocks_and_gradients():
    """Gradients follow one hop behind, so that the last one reaches its owner when nothing else is sent."""
    slow = Speeds(1e30, 1e9, 1e9, 8)
    tokens, kv = 64, 2 * 2 * 16
    one = backward_pass(
        rs.Layout("contiguous", 4 * tokens, 4), rs.full(), "ring", HEADS, slow
    )
    assert one.seconds == pytest.approx(3 * tokens * kv * (4 + 4) / 1e9)
    assert one.compute_seconds == pytest.approx(0, abs=1e-12)


def test_links_between_nodes_carry_what_crosses_them():
    layout, shape = rs.Layout("contiguous", 4 * 64, 4), Shape(1, 2, 2, 16, 16, 2)
    block = 64 * 2 * 2 * 16 * 2
    for route, inter in (("ring", 3), ("double-ring:2", 1), ("all-gather", 2)):
        one = forward_pass(layout, rs.full(), route, shape, Speeds(1e12, 1e9, 1e8, 2))
        assert (one.intra_node_bytes, one.inter_node_bytes) == (
            (3 - inter) * block,
            inter * block,
        )
    grouped = forward_pass(
        layout, rs.full(), "ulysses:2", shape, Speeds(1e12, 1e9, 1e8, 2)
    )
    assert grouped.inter_node_bytes == block  # of twice the tokens and half the heads


def test_a_sum_for_its_owner_waits_for_earlier_sums():
    """Two inner rings of two: over the slow link come two blocks, the gradient of the first and, behind the second, the
    gradient that the last hop adds to; only then can that be sent to its owner, over the fast link.
    """
    slow, fast, tokens = 1e6, 1e9, 64
    layout, block = rs.Layout("contiguous", 4 * tokens, 4), tokens * 2 * 2 * 16 * 4
    one = backward_pass(
        layout, rs.full(), "double-ring:2", HEADS, Speeds(1e30, slow, fast, 2)
    )
    assert one.seconds == pytest.approx(4 * block / slow + block / fast)


def test_half_of_a_backward_pass_hides_behind_the_other():
    """A hop that computes as long as its block travels waits for nothing but what reaches its owner at the end."""
    layout, shape = rs.Layout("contiguous", 4 * 64, 4), Shape(1, 2, 2, 16, 16, 4)
    block = 64 * 2 * 2 * 16 * 4 / 1e9
    # a hop takes as long as a block and a gradient
    flops = 5 * 2 * 2 * 16 * 64 * 64 / (2 * block)
    one = backward_pass(layout, rs.full(), "ring", shape, Speeds(flops, 1e9, 1e9, 8))
    assert one.compute_seconds == pytest.approx(8 * block)
    assert one.seconds == pytest.approx(one.compute_seconds + block)


def test_pass_q_goes_back_by_keys_and_values():
    layout = rs.Layout("zigzag", 4 * 64, 4)
    assert backward_pass(layout, rs.causal(), "pass-q", HEADS, NEAR) == backward_pass(
        layout, rs.causal(), Route("ring"), HEADS, NEAR
    )


@pytest.mark.parametrize(
    ("ranks", "per_node"), [(4, 2), (6, 3), (8, 2), (8, 4), (12, 4)]
)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("mask", [rs.causal(), rs.sliding_window(700)], ids=str)
def test_no_rank_takes_much_longer_than_those_that_are_looked_at(
    layout, ranks, per_node, mask
):
    split = rs.Layout(layout, 512 * ranks, ranks)
    routes = "ring", "bidirectional", "all-gather", "pass-q", f"double-ring:{per_node}"
    for name, flops, is_backward in product(routes, (1e10, 1e12), (False, True)):
        route, speeds = Route.parse(name, ranks), Speeds(flops, 1e9, 1e8, per_node)
        way = route.backward if is_backward else route
        looked_at = timing.passes(
            split, mask, route, HEADS, speeds, is_backward=is_backward
        )
        for rank in range(ranks):
            part = timing._part(
                make_schedule(split, mask, rank, split, way),
                split.tokens_per_rank,
                HEADS,
                speeds,
            )
            one = timing._walk(part, speeds, is_backward=is_backward)
            assert one.seconds < 1.1 * timing.slowest(looked_at).seconds, name


def test_with_a_window_a_middle_rank_is_timed():
    """Where queries travel the first rank gets no results of other ranks, and the last one no queries."""
    layout, mask, speeds = (
        rs.Layout("contiguous", 48, 3),
        rs.sliding_window(12),
        Speeds(1e12, 1e6, 1e6, 8),
    )
    alone = [
        timing._walk(
            Part(make_schedule(layout, mask, rank, None, "pass-q"), HEADS),
            speeds,
            is_backward=False,
        )
        for rank in range(3)
    ]
    assert alone[1].seconds > 1.2 * max(alone[0].seconds, alone[2].seconds)
    assert forward_pass(layout, mask, "pass-q", HEADS, speeds) == alone[1]


def test_with_documents_the_rank_of_the_longest_is_timed():
    layout, mask = (
        rs.Layout("contiguous", 6 * 32, 6),
        rs.documents([8] * 8 + [32] + [8] * 12),
    )
    assert forward_pass(
        layout, mask, "all-gather", HEADS, NEAR
    ).compute_seconds == pytest.approx(
        max(make_schedule(layout, mask, rank).num_pairs for rank in range(6))
        * 4
        * 8
        * 16
        / 1e12
    )


def test_a_ring_over_two_nodes_waits_for_the_busiest_link():
    """Causal zigzag goes down the ring: rank 1 gets blocks 2 and 3 from rank 2, and of block 0 the early chunk."""
    layout, speeds = rs.Layout("zigzag", 4 * 64, 4), Speeds(1e15, 1e9, 1e6, 2)
    block = 64 * HEADS.kv_numbers * HEADS.itemsize
    assert (
        forward_pass(layout, rs.causal(), "ring", HEADS, speeds).inter_node_bytes
        == 2.5 * block
    )
    assert (
        forward_pass(
            layout, rs.causal(), "double-ring:2", HEADS, speeds
        ).inter_node_bytes
        == block
    )
