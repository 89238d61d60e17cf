"""Every mask on every layout becomes tiles that compute each allowed pair exactly once, and blocks that carry what is
needed.
"""

from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.layout import LAYOUT_NAMES
from ringspan.core.ranges import minus, size, union
from ringspan.core.schedule import plan
from tests.core.strategies import layouts, masks


def painted(tile):
    rows, columns = np.mgrid[: tile.num_rows, : tile.num_keys]
    return (rows - columns >= tile.lo) & (rows - columns <= tile.hi)


def computed(layout, mask, key_layout=None):
    """How often each (query, key) pair of the padded sequence is computed, over all ranks and hops."""
    keys = key_layout or layout
    counts = np.zeros((layout.padded_length, keys.padded_length), dtype=int)
    for rank in range(layout.ranks):
        for hop in plan(layout, mask, rank, key_layout).hops:
            rows, columns = layout.positions(rank), keys.positions(hop.owner)
            for tile in hop.tiles:
                allowed = painted(tile)
                assert allowed.any(0).all() and allowed.any(1).all(), "a trimmed tile has no idle row or key"
                assert allowed.sum() == tile.num_pairs
                assert tile.is_full == allowed.all()
                counts[np.ix_(rows[tile.q0 : tile.q1], columns[tile.k0 : tile.k1])] += allowed
    return counts


@given(layouts, masks)
@settings(max_examples=400, deadline=None)
def test_each_allowed_pair_is_computed_exactly_once(layout, mask):
    everywhere = np.arange(layout.padded_length)
    expected = mask.dense(everywhere, everywhere) & (everywhere < layout.length) & (everywhere < layout.length)[:, None]
    assert np.array_equal(computed(layout, mask), expected)


@given(layouts, masks, st.integers(1, 41))
@settings(max_examples=100, deadline=None)
def test_cross_attention_of_unequal_lengths(layout, mask, num_keys):
    keys = rs.Layout(layout.name, num_keys, layout.ranks)
    q, k = np.arange(layout.padded_length), np.arange(keys.padded_length)
    expected = mask.dense(q, k) & (q < layout.length)[:, None] & (k < keys.length)
    assert np.array_equal(computed(layout, mask, keys), expected)


@given(layouts, masks)
@settings(max_examples=200, deadline=None)
def test_blocks_carry_what_later_ranks_need_and_gradients_come_home_once(layout, mask):
    schedules = [plan(layout, mask, rank) for rank in range(layout.ranks)]
    for owner, at_home in enumerate(schedules):
        held = ((0, layout.tokens_per_rank),)
        travelling, added = (), np.zeros(layout.tokens_per_rank, int)
        came_home = np.zeros(layout.tokens_per_rank, int)
        for index in range(1, layout.ranks):
            visitor = (owner + at_home.direction * index) % layout.ranks
            hop = schedules[visitor].hops[index]
            before = schedules[(visitor - at_home.direction) % layout.ranks].hops[index - 1]
            assert hop.owner == before.owner == owner
            assert hop.carried == before.passed_on and not minus(hop.carried, held)
            assert hop.gradient_in == before.gradient_on == travelling
            needed = union((tile.k0, tile.k1) for tile in hop.tiles)
            assert not minus(needed, hop.carried) and not minus(union(needed, hop.gradient_in), hop.gradient)
            assert union(hop.gradient_on, hop.gradient_home) == hop.gradient
            assert size(hop.gradient_on) + size(hop.gradient_home) == size(hop.gradient)
            assert at_home.returns[index] == (visitor, hop.gradient_home)
            for start, stop in needed:
                added[start:stop] = 1
            for start, stop in hop.gradient_home:
                came_home[start:stop] += 1
            held, travelling = hop.carried, hop.gradient_on
        assert travelling == ()
        assert (came_home <= 1).all() and (came_home >= added).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_causal_work_is_balanced(layout, ranks):
    length = ranks * 2 * 64
    work = [plan(rs.Layout(layout, length, ranks), rs.causal(), rank).num_pairs for rank in range(ranks)]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) / (sum(work) / ranks) < 1.02


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 34, 100])
def test_a_window_reaches_only_its_neighbours(window):
    chunk, ranks = 16, 8
    schedules = [
        plan(rs.Layout("contiguous", chunk * ranks, ranks), rs.sliding_window(window), r) for r in range(ranks)
    ]
    reached = max(hop.index for schedule in schedules for hop in schedule.hops if hop.carried or hop.tiles)
    assert reached == min(ceil((window - 1) / chunk), ranks - 1)
    sent = sum(schedule.sent_tokens for schedule in schedules)
    assert sent == sum(min(window - 1, first) for first in range(0, chunk * ranks, chunk))


def test_zigzag_sends_a_quarter_less_than_whole_blocks():
    ranks, chunk = 8, 4
    layout = rs.Layout("zigzag", 2 * ranks * chunk, ranks)
    sent = sum(plan(layout, rs.causal(), rank).sent_tokens for rank in range(ranks))
    assert sent == 0.75 * ranks * (ranks - 1) * 2 * chunk


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_causal_hop_is_few_large_tiles(layout):
    for rank in range(4):
        for hop in plan(rs.Layout(layout, 64, 4), rs.causal(), rank).hops:
            assert len(hop.tiles) <= (1 if hop.index == 0 or layout == "contiguous" else 2)
            assert all(tile.is_full or tile.is_causal for tile in hop.tiles)


def test_thousands_of_documents_on_many_ranks_are_planned_quickly():
    schedule = plan(rs.Layout("striped", 60_000, 8), rs.documents([12] * 5_000), 3)
    assert (
        schedule.num_pairs == sum(hop.num_pairs for hop in schedule.hops) and 0 < schedule.num_pairs < 5_000 * 12 * 12
    )


@pytest.mark.parametrize(
    ("layout", "key_layout", "route", "error"),
    [
        (rs.Layout("zigzag", 8, 2), None, "teleport", rs.UnsupportedError),
        (rs.Layout("zigzag", 8, 2), rs.Layout("striped", 8, 2), "ring", rs.LayoutError),
        (rs.Layout("zigzag", 8, 2), rs.Layout("zigzag", 8, 4), "ring", rs.LayoutError),
    ],
)
def test_unsupported_schedules_are_refused(layout, key_layout, route, error):
    with pytest.raises(error):
        plan(layout, rs.causal(), 0, key_layout, route)
