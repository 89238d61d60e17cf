"""What the cost model chooses where the answer is known, and that it counts what the schedule does."""

from dataclasses import replace

import pytest

import ringspan as rs
from ringspan.core.codec import codec
from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.schedule.choice import choose_route
from ringspan.core.schedule.timing import Speeds, forward_pass
from ringspan.core.schedule.workspace import Shape

NODE = Speeds(
    flops=4e14, intra_node_bytes=3e11, inter_node_bytes=2.5e10, ranks_per_node=8
)
LLAMA = Shape(batch=1, heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)


def test_long_blocks_in_a_node_go_around_the_ring():
    layout = rs.Layout("zigzag", 8 * 131_072, 8)
    choice = choose_route(layout, rs.causal(), LLAMA, NODE)
    assert choice.route == "ring" and "ring" in choice.reason
    pairs = layout.length * (layout.length + 1) / 2 / 8
    assert dict(choice.seconds)["ring"] == pytest.approx(
        pairs * 4 * 32 * 128 / 4e14, rel=1e-3
    )


def test_short_blocks_between_nodes_take_two_rings():
    """Eight ranks share each link out of a node in turn: the inner ring hides what the outer one brings."""
    layout = rs.Layout("zigzag", 32 * 8192, 32)
    choice = choose_route(layout, rs.causal(), Shape(1, 30, 30, 128, 128, 2), NODE)
    assert choice.route == "double-ring:8"


def test_few_tokens_and_many_heads_trade_tokens_for_heads():
    layout = rs.Layout("zigzag", 8 * 512, 8)
    choice = choose_route(layout, rs.full(), Shape(1, 32, 32, 128, 128, 2), NODE)
    assert choice.route.startswith("ulysses")


def test_heads_that_do_not_split_are_no_candidates():
    choice = choose_route(
        rs.Layout("zigzag", 4096, 8), rs.full(), Shape(1, 7, 7, 128, 128, 2), NODE
    )
    assert {route for route, _ in choice.seconds} == {"ring", "all-gather"}
    with pytest.raises(UnsupportedError):
        forward_pass(
            rs.Layout("zigzag", 4096, 8),
            rs.full(),
            "ulysses:8",
            Shape(1, 7, 7, 128, 128, 2),
            NODE,
        )


def test_a_layout_of_any_runs_has_no_groups():
    layout = CustomLayout.of([(rank * 512, 512)] for rank in range(8))
    choice = choose_route(layout, rs.full(), Shape(1, 32, 32, 128, 128, 2), NODE)
    assert {route for route, _ in choice.seconds} == {"ring", "all-gather"}


ODD = Shape(1, 7, 7, 128, 128, 2)  # heads that no group of ranks divides


def test_queries_travel_when_they_are_the_smaller_message():
    """A query and its out and lse are 128 x 2 + 129 x 4 bytes per head, a key and its value 2 x 128 x 2."""
    layout, speeds = rs.Layout("striped", 8 * 512, 8), Speeds(1e30, 1e9, 1e9, 8)
    for tokens, expected in ((771, "ring"), (773, "pass-q")):
        keys = rs.Layout("striped", 8 * tokens, 8)
        choice = choose_route(layout, rs.full(), ODD, speeds, keys)
        assert choice.route == expected
        assert ("pass-q" in dict(choice.seconds)) == (expected == "pass-q")
    assert (
        choose_route(
            layout, rs.full(), replace(ODD, sent_as=codec("bfloat16")), speeds, keys
        ).route
        == "ring"
    )


def test_a_slow_link_bounds_travelling_queries_by_their_bytes():
    layout, keys = (
        rs.Layout("contiguous", 8 * 64, 8),
        rs.Layout("contiguous", 8 * 4096, 8),
    )
    seconds = forward_pass(
        layout, rs.full(), "pass-q", ODD, Speeds(1e30, 1e9, 1e9, 8), keys
    ).seconds
    assert seconds == pytest.approx(7 * 64 * 7 * (128 * 2 + 129 * 4) / 1e9)


def test_few_queries_against_a_long_cache_do_not_move_the_cache():
    layout, keys = rs.Layout("zigzag", 8 * 16, 8), rs.Layout("zigzag", 1 << 20, 8)
    choice = choose_route(layout, rs.full(), LLAMA, NODE, keys)
    assert choice.route == "pass-q" and "pass-q" in choice.reason
