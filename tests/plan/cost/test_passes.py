"""Attention's passes from few schedules against those of the ring itself."""

from dataclasses import replace
from itertools import cycle

import pytest

from ringspan.core.codec import codec
from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.geometry.layout import Layout
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.timing import Speeds
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cost import loop, passes
from ringspan.plan.cost.passes import attention_passes, even_passes
from tests.cases import long, pairwise

SIZES = Shape(1, 32, 8, 128, 128, 2)


@pytest.mark.parametrize(
    ("tokens", "layout", "route", "per_node"),
    [
        (2048, "zigzag", "double-ring:8", 8),
        *long(
            *pairwise(
                [1024, 2048, 4096],
                ["zigzag", "contiguous"],
                ["ring", "all-gather", "ulysses:2"],
                [8, 48, 512],
            )
        ),
    ],
)
def test_a_large_ring_is_drawn_on_from_small_ones(
    monkeypatch, tokens, layout, route, per_node
):
    """At 144 ranks, near the balance of computing and sending, where neither hides the other alone."""
    speeds = Speeds(4e14, 3e11, 5e10, per_node)
    drawn = attention_passes(layout, 144 * tokens, 144, CAUSAL, route, SIZES, speeds)
    monkeypatch.setattr(passes, "_LARGEST_SCHEDULE", 144)
    attention_passes.cache_clear()
    walked = attention_passes.__wrapped__(
        layout, 144 * tokens, 144, CAUSAL, route, SIZES, speeds
    )
    attention_passes.cache_clear()
    for one, other in zip(drawn, walked, strict=True):
        assert one == pytest.approx(other, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "nodes"), [("zigzag", 2), *long(("zigzag", 4), ("contiguous", 1))]
)
def test_a_large_inner_ring_is_drawn_on_from_small_ones(monkeypatch, layout, nodes):
    ranks, speeds = nodes * 96, Speeds(4e14, 3e11, 5e10, 96)
    asked = layout, ranks * 2048, ranks, CAUSAL, "double-ring:96", SIZES, speeds
    walked = attention_passes.__wrapped__(*asked)
    attention_passes.cache_clear()
    monkeypatch.setattr(passes, "_MOST_RANKS", ranks // 2)
    drawn = attention_passes.__wrapped__(*asked)
    attention_passes.cache_clear()
    for one, other in zip(drawn, walked, strict=True):
        assert one == pytest.approx(other, rel=0.02)


@pytest.mark.parametrize(
    "route", ["ring", "bidirectional", "all-gather", "double-ring:4", "ulysses:2"]
)
def test_a_communication_dtype_changes_only_what_is_sent(route):
    asked, speeds = (
        ("zigzag", 16 * 4096, 16, CAUSAL, route),
        Speeds(4e14, 3e11, 5e10, 4),
    )
    exact, halved, in_bfloat16 = (
        attention_passes(*asked, replace(SIZES, sent_as=codec(name)), speeds)
        for name in ("exact", "int8", "bfloat16")
    )
    for one, other in zip(exact, halved, strict=True):
        assert (
            other.compute_seconds == one.compute_seconds
            and other.seconds <= one.seconds
        )
    # Forward: the blocks are half as large; the trade of a Ulysses group is not of blocks.
    sent, left = (
        each[0].intra_node_bytes + each[0].inter_node_bytes for each in (exact, halved)
    )
    assert (
        left == pytest.approx(sent / 2, rel=0.001)
        if "ulysses" not in route
        else sent / 2 < left < sent
    )
    assert in_bfloat16 == exact, "which numbers of two bytes are already"


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_attention_computes_the_pairs_of_the_mask(layout, window):
    ranks, length, shape, speeds = (
        5,
        70,
        Shape(1, 3, 3, 16, 16, 2),
        Speeds(1.0, 1e30, 1e30, 8),
    )
    mask = LayerMask(window=window)
    seen = mask.of_document(length)
    schedules = [
        make_schedule(Layout(layout, length, ranks), seen, rank)
        for rank in range(ranks)
    ]
    assert sum(schedule.num_pairs for schedule in schedules) == mask.num_pairs(length)
    forward, backward = attention_passes(
        layout, length, ranks, mask, "ring", shape, speeds
    )
    most = max(schedule.num_pairs for schedule in schedules) * 3 * 16 * 2
    assert most >= forward.compute_seconds / 2 >= 0.8 * most
    assert backward.compute_seconds == pytest.approx(2.5 * forward.compute_seconds)


@pytest.mark.parametrize(
    ("size", "route", "window"),
    pairwise(
        [(8, 2), (8, 320), (16, 5000)],
        ["ring", "bidirectional", "double-ring:8", "all-gather", "pass-q", "ulysses:4"],
        [None, 100, 3000],
    ),
)
def test_nothing_beats_an_even_share_of_the_pairs(size, route, window):
    """By which the planner knows that a route cannot win before it has made its schedules."""
    (ranks, tokens), speeds = size, Speeds(4e14, 3e11, 5e10, 8)
    for layout in ("zigzag", "contiguous", "striped"):
        asked = (layout, ranks * tokens, ranks, LayerMask(window=window), route, SIZES)
        for least, one in zip(
            even_passes(*asked, speeds), attention_passes(*asked, speeds), strict=True
        ):
            assert least.compute_seconds == least.seconds <= one.seconds
    endless = Speeds(4e14, 1e30, 1e30, 8)
    asked = ("zigzag", ranks * 5000, ranks, CAUSAL, "ring", SIZES)
    for least, one in zip(
        even_passes(*asked, endless), attention_passes(*asked, endless), strict=True
    ):
        assert least.seconds == pytest.approx(one.seconds, rel=0.001), (
            "and nearly reached where links are fast"
        )


@pytest.mark.parametrize(
    ("name", "layout"),
    zip(
        ["ring", "bidirectional", "all-gather", "double-ring:2", "double-ring:8"],
        cycle(["zigzag", "contiguous", "striped"]),
    ),
)
def test_a_large_ring_holds_what_is_drawn_on_from_small_ones(monkeypatch, name, layout):
    drawn = loop.loop_bytes(layout, 96, Route.parse(name, 96), 4096, 2048, 2, 2)
    monkeypatch.setattr(loop, "_MOST_NODES", 96)
    loop._share.cache_clear()
    walked = loop.loop_bytes(layout, 96, Route.parse(name, 96), 4096, 2048, 2, 2)
    loop._share.cache_clear()
    assert (drawn.sums, drawn.in_transit) == pytest.approx(
        (walked.sums, walked.in_transit)
    )


@pytest.mark.parametrize(
    ("nodes", "layout"), [(1, "zigzag"), (3, "striped"), (8, "contiguous")]
)
def test_a_large_inner_ring_holds_what_a_small_one_does(monkeypatch, nodes, layout):
    """A node of TPUs has thousands of devices, whose schedule would have millions of entries."""
    asked = (
        layout,
        nodes * 32,
        Route.parse("double-ring:32", nodes * 32),
        4096,
        2048,
        2,
        2,
    )
    walked = loop.loop_bytes(*asked)
    loop._share.cache_clear()
    monkeypatch.setattr(loop, "_MOST_RANKS", nodes * 8)
    drawn = loop.loop_bytes(*asked)
    loop._share.cache_clear()
    assert drawn == walked
