"""What the ring's loop holds, by its events."""

from itertools import cycle

import pytest

from ringspan.core.schedule.route import Route
from ringspan.plan.cost import loop


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
    assert (drawn.sums, drawn.in_transit) == pytest.approx((walked.sums, walked.in_transit))


@pytest.mark.parametrize(("nodes", "layout"), [(1, "zigzag"), (3, "striped"), (8, "contiguous")])
def test_a_large_inner_ring_holds_what_a_small_one_does(monkeypatch, nodes, layout):
    """A node of TPUs has thousands of devices, whose schedule would have millions of entries."""
    asked = layout, nodes * 32, Route.parse("double-ring:32", nodes * 32), 4096, 2048, 2, 2
    walked = loop.loop_bytes(*asked)
    loop._share.cache_clear()
    monkeypatch.setattr(loop, "_MOST_RANKS", nodes * 8)
    drawn = loop.loop_bytes(*asked)
    loop._share.cache_clear()
    assert drawn == walked
