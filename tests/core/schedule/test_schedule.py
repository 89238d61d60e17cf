"""Every mask on every layout becomes tiles that compute each allowed pair exactly once, and blocks that carry what is
needed.
"""

import tracemalloc
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.ranges import minus, size, union
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule.schedule import make_schedule
from tests.core.strategies import custom_layouts, layouts, masks
from tests.fuzz import examples


def painted(tile):
    rows, columns = np.mgrid[: tile.num_rows, : tile.num_keys]
    return (rows - columns >= tile.lo) & (rows - columns <= tile.hi)


ROUTES = [
    "ring",
    "bidirectional",
    "double-ring:1",
    "double-ring:2",
    "double-ring:3",
    "all-gather",
    "pass-q",
]


def computed(layout, mask, key_layout=None, route="ring"):
    """Count the computations of each (query, key) pair of positions, over all ranks and hops."""
    keys = key_layout or layout
    ends = [
        max(int(one.positions(rank).max(initial=-1)) for rank in range(one.ranks)) + 1
        for one in (layout, keys)
    ]
    counts = np.zeros(ends, dtype=int)
    for rank in range(layout.ranks):
        for hop in make_schedule(layout, mask, rank, key_layout, route).hops:
            of_queries, of_keys = (
                (hop.owner, rank) if route == "pass-q" else (rank, hop.owner)
            )
            rows, columns = layout.positions(of_queries), keys.positions(of_keys)
            for tile in hop.tiles:
                allowed = painted(tile)
                assert allowed.any(0).all() and allowed.any(1).all(), (
                    "a trimmed tile has no idle row or key"
                )
                assert allowed.sum() == tile.num_pairs
                assert tile.is_full == allowed.all()
                counts[np.ix_(rows[tile.q0 : tile.q1], columns[tile.k0 : tile.k1])] += (
                    allowed
                )
    return counts


@given(layouts, masks, st.sampled_from(ROUTES))
@examples(300)
def test_each_allowed_pair_is_computed_exactly_once(layout, mask, route):
    assume(exists(route, layout.ranks))
    everywhere = np.arange(layout.padded_length)
    expected = (
        mask.dense(everywhere, everywhere)
        & (everywhere < layout.length)
        & (everywhere < layout.length)[:, None]
    )
    assert np.array_equal(computed(layout, mask, route=route), expected)


@given(layouts, masks, st.integers(1, 41), st.sampled_from(["ring", "pass-q"]))
@examples(200)
def test_cross_attention_of_unequal_lengths(layout, mask, num_keys, route):
    keys = rs.Layout(layout.name, num_keys, layout.ranks)
    q, k = np.arange(layout.padded_length), np.arange(keys.padded_length)
    expected = mask.dense(q, k) & (q < layout.length)[:, None] & (k < keys.length)
    assert np.array_equal(computed(layout, mask, keys, route), expected)


@given(
    layouts | st.integers(1, 8).flatmap(custom_layouts), masks, st.sampled_from(ROUTES)
)
@example(rs.Layout("striped", 8, 3), rs.causal(), "bidirectional")
@examples(200)
def test_blocks_carry_needed_keys_and_gradients_arrive_once(layout, mask, route):
    assume(exists(route, layout.ranks))
    schedules = [
        make_schedule(layout, mask, rank, None, route) for rank in range(layout.ranks)
    ]
    tokens = [layout.tokens_of(rank) for rank in range(layout.ranks)]
    returned, added = (np.zeros((layout.ranks, max(tokens)), int) for _ in range(2))
    # of an owner's gradient: one goes around, one more from each rank it sends to
    sums = np.ones(layout.ranks, int)
    messages = received = 0
    for rank, schedule in enumerate(schedules):
        for hop in schedule.hops:
            everything = ((0, tokens[rank]),)
            for (index, onward), straight in zip(hop.sends, hop.straight, strict=True):
                of_block = (
                    hop.owner,
                    onward,
                    hop.arrives.ranges if hop.index else everything,
                )
                for owner, (peer, ranges), held in (
                    of_block,
                    (rank, straight, everything),
                ):
                    there = schedules[peer].hops[index]
                    assert there.owner == owner and not minus(ranges, held)
                    assert not ranges or there.arrives == (rank, ranges)
                    messages += bool(ranges)
                sums[rank] += bool(straight.ranges)
            needed = union(
                (t.q0, t.q1) if route == "pass-q" else (t.k0, t.k1) for t in hop.tiles
            )
            if hop.index == 0:
                assert (
                    hop.gradient
                    == hop.gradient_on.ranges
                    == hop.gradient_to_owner
                    == ()
                )
                continue
            assert (
                sum(
                    hop.index in dict(earlier.sends)
                    for earlier in schedule.hops[: hop.index]
                )
                == 1
            )
            received += bool(hop.arrives.ranges)
            assert not minus(needed, hop.arrives.ranges)
            assert not minus(union(needed, hop.gradient_in.ranges), hop.gradient)
            assert union(hop.gradient_on.ranges, hop.gradient_to_owner) == hop.gradient
            assert size(hop.gradient_on.ranges) + size(hop.gradient_to_owner) == size(
                hop.gradient
            )
            if hop.gradient_on.ranges:
                there = schedules[hop.gradient_on.peer].hops[hop.gradient_next]
                assert there.owner == hop.owner and there.gradient_in == (
                    rank,
                    hop.gradient_on.ranges,
                )
            assert schedules[hop.owner].hops[hop.index].from_visitor == (
                rank,
                hop.gradient_to_owner,
            )
            for start, stop in needed:
                added[hop.owner, start:stop] = 1
            for start, stop in hop.gradient_to_owner:
                returned[hop.owner, start:stop] += 1
    if route in ("ring", "bidirectional"):
        # the others have one for each node or rank
        assert (returned <= sums[:, None]).all()
    assert (returned >= added).all() and messages == received


@given(
    layouts | st.integers(1, 8).flatmap(custom_layouts), masks, st.sampled_from(ROUTES)
)
@examples(200)
def test_every_rank_computes_with_every_block_that_it_receives(layout, mask, route):
    assume(exists(route, layout.ranks))
    for rank in range(layout.ranks):
        for hop in make_schedule(layout, mask, rank, None, route).hops[1:]:
            assert bool(hop.arrives.ranges) == bool(hop.num_pairs)


def test_what_a_neighbour_has_no_use_for_comes_from_its_owner():
    """Rank 0 shares documents with ranks 1 and 3 of 5, not with rank 2."""
    layout = CustomLayout.of(
        [[(0, 4), (20, 4)], [(4, 4)], [(8, 4)], [(24, 4)], [(12, 8)]], 28
    )
    mask = rs.documents([8, 12, 8])
    first, second, third = (
        make_schedule(layout, mask, rank).hops for rank in (1, 2, 3)
    )
    assert [hop.arrives for hop in first if hop.arrives.ranges] == [(0, ((0, 4),))]
    assert not any(hop.arrives.ranges for hop in second)
    assert [(hop.index, hop.arrives) for hop in third if hop.arrives.ranges] == [
        (3, (0, ((4, 8),)))
    ]
    owner = make_schedule(layout, mask, 0).hops
    assert [send for hop in owner for send in hop.straight if send.ranges] == [
        (3, ((4, 8),))
    ]
    assert owner[3].from_visitor == (3, ((4, 8),)), "and so does its gradient"


@pytest.mark.parametrize(
    ("layout", "messages", "tokens"),
    [("zigzag", 14, 14 * 4095), ("contiguous", 7, 7 * 4095)],
)
def test_a_window_needs_a_message_for_each_cut_of_the_sequence(
    layout, messages, tokens
):
    schedules = [
        make_schedule(rs.Layout(layout, 65_536, 8), rs.sliding_window(4096), rank)
        for rank in range(8)
    ]
    received = [
        hop.arrives.ranges
        for schedule in schedules
        for hop in schedule.hops
        if hop.arrives.ranges
    ]
    assert (len(received), sum(map(size, received))) == (messages, tokens)


def exists(route, ranks):
    _, _, inner = route.partition(":")
    return not inner or ranks % int(inner) == 0


@pytest.mark.parametrize(
    "route", ["ring", "bidirectional", "double-ring:4", "all-gather"]
)
def test_all_routes_move_the_same_keys_and_values(route):
    """Whole blocks to everybody: N - 1 of them leave each rank, whichever way they go."""
    ranks, tokens = 8, 6
    for rank in range(ranks):
        schedule = make_schedule(
            rs.Layout("contiguous", ranks * tokens, ranks), rs.full(), rank, None, route
        )
        assert schedule.sent_tokens == (ranks - 1) * tokens


def test_a_double_ring_crosses_nodes_as_rarely_as_it_can():
    """Of N - 1 blocks one a node must come in from another node; the others come from neighbours in the node."""
    ranks, inner = 8, 4
    for rank in range(ranks):
        schedule = make_schedule(
            rs.Layout("contiguous", 64, ranks),
            rs.full(),
            rank,
            None,
            f"double-ring:{inner}",
        )
        crossing = [
            hop.index
            for hop in schedule.hops
            if hop.arrives.peer // inner != rank // inner
        ]
        assert crossing == [4]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize(
    ("ranks", "members"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (3, 1)]
)
def test_a_group_of_ranks_holds_what_its_members_hold(layout, ranks, members):
    whole = rs.Layout(layout, 37, ranks)
    grouped = whole.grouped(members)
    assert grouped.padded_length == whole.padded_length
    ranks_of_groups = [grouped.group_ranks(group) for group in range(grouped.ranks)]
    assert sorted(rank for group in ranks_of_groups for rank in group) == list(
        range(ranks)
    )
    for group, its_ranks in enumerate(ranks_of_groups):
        for member, rank in enumerate(its_ranks):
            held = np.concatenate(
                [grouped.positions(group)[place] for place in grouped.places(member)]
            )
            assert np.array_equal(held, whole.positions(rank))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_causal_work_is_balanced(layout, ranks):
    length = ranks * 2 * 64
    work = [
        make_schedule(rs.Layout(layout, length, ranks), rs.causal(), rank).num_pairs
        for rank in range(ranks)
    ]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) / (sum(work) / ranks) < 1.02


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 34, 100])
def test_a_window_reaches_only_its_neighbours(window):
    chunk, ranks = 16, 8
    schedules = [
        make_schedule(
            rs.Layout("contiguous", chunk * ranks, ranks), rs.sliding_window(window), r
        )
        for r in range(ranks)
    ]
    reached = max(
        hop.index
        for schedule in schedules
        for hop in schedule.hops
        if hop.arrives.ranges or hop.tiles
    )
    assert reached == min(ceil((window - 1) / chunk), ranks - 1)
    sent = sum(schedule.sent_tokens for schedule in schedules)
    assert sent == sum(
        min(window - 1, first) for first in range(0, chunk * ranks, chunk)
    )


def test_zigzag_sends_a_quarter_less_than_whole_blocks():
    ranks, chunk = 8, 4
    layout = rs.Layout("zigzag", 2 * ranks * chunk, ranks)
    sent = sum(
        make_schedule(layout, rs.causal(), rank).sent_tokens for rank in range(ranks)
    )
    assert sent == 0.75 * ranks * (ranks - 1) * 2 * chunk


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_causal_hop_is_few_large_tiles(layout):
    for rank in range(4):
        for hop in make_schedule(rs.Layout(layout, 64, 4), rs.causal(), rank).hops:
            assert len(hop.tiles) <= (
                1 if hop.index == 0 or layout == "contiguous" else 2
            )
            assert all(tile.is_full or tile.is_causal for tile in hop.tiles)


def test_memory_does_not_grow_with_documents_times_ranks():
    mask = rs.documents([60_000] + [60] * 1_000)
    layout = rs.balanced(mask, length=120_000, ranks=16)
    tracemalloc.start()
    schedule = make_schedule(layout, mask, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert schedule.num_pairs and peak < 4e6


@pytest.mark.parametrize(
    ("layout", "key_layout", "route", "error"),
    [
        (rs.Layout("zigzag", 8, 2), None, "teleport", rs.UnsupportedError),
        (rs.Layout("zigzag", 8, 2), None, "ring:2", rs.UnsupportedError),
        (rs.Layout("zigzag", 8, 2), None, "double-ring", rs.UnsupportedError),
        (rs.Layout("zigzag", 8, 2), None, "double-ring:0", rs.UnsupportedError),
        (rs.Layout("zigzag", 12, 3), None, "double-ring:2", rs.UnsupportedError),
        (rs.Layout("zigzag", 12, 4), None, "ulysses:2+ulysses:2", rs.UnsupportedError),
        (rs.Layout("zigzag", 12, 4), None, "ulysses:2", rs.UnsupportedError),
        (rs.Layout("zigzag", 12, 4), None, "ring+ring", rs.UnsupportedError),
        (rs.Layout("zigzag", 8, 2), rs.Layout("striped", 8, 2), "ring", rs.LayoutError),
        (rs.Layout("zigzag", 8, 2), rs.Layout("zigzag", 8, 4), "ring", rs.LayoutError),
    ],
)
def test_unsupported_schedules_are_refused(layout, key_layout, route, error):
    with pytest.raises(error):
        make_schedule(layout, rs.causal(), 0, key_layout, route)
