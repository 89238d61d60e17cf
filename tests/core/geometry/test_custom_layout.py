"""Layouts of any runs of positions: the schedule computes each allowed pair once, whoever holds how much of what."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import CustomLayout, Layout, Span
from ringspan.core.geometry.mask import causal
from ringspan.core.schedule.schedule import make_schedule
from tests.core.schedule.test_schedule import ROUTES, computed, exists
from tests.core.strategies import custom_layouts, layouts, masks
from tests.fuzz import examples


def held(layout):
    positions = np.concatenate([layout.positions(rank) for rank in range(layout.ranks)])
    return np.sort(positions[positions < layout.length])


@given(custom_layouts(), st.data(), masks, st.sampled_from(ROUTES))
@examples(200)
def test_each_allowed_pair_is_computed_exactly_once(queries, data, mask, route):
    assume(exists(route, queries.ranks))
    keys = data.draw(st.one_of(st.just(queries), custom_layouts(queries.ranks)))
    counts = computed(queries, mask, keys, route)
    expected = np.zeros_like(counts)
    rows, columns = held(queries), held(keys)
    expected[np.ix_(rows, columns)] = mask.dense(rows, columns)
    assert np.array_equal(counts, expected)


@given(
    layouts.filter(lambda layout: layout.name != "striped"),
    masks,
    st.sampled_from(ROUTES),
)
@examples(200)
def test_a_named_layout_written_out_sends_the_same(layout, mask, route):
    assume(exists(route, layout.ranks))
    parts = [
        [(span.start, span.count) for span in layout.spans(rank)]
        for rank in range(layout.ranks)
    ]
    custom = CustomLayout.of(parts, layout.length)
    assert custom.tokens_per_rank == layout.tokens_per_rank
    for rank in range(layout.ranks):
        one, other = (
            make_schedule(layout, mask, rank, None, route),
            make_schedule(custom, mask, rank, None, route),
        )
        assert one.hops == other.hops


def test_keys_that_nobody_holds_are_seen_by_nobody():
    queries = CustomLayout.of([[(3, 2)]])
    keys = CustomLayout("custom", 5, 1, parts=((),))
    for route in ("ring", "pass-q"):
        assert make_schedule(queries, causal(), 0, keys, route).num_pairs == 0


def test_unequal_shares_are_counted_and_have_no_tokens_per_rank():
    layout = CustomLayout.of([[(0, 3), (10, 2)], [(3, 7)], []])
    assert [layout.tokens_of(rank) for rank in range(3)] == [5, 7, 0]
    assert layout.length == layout.padded_length == 12 and layout.positions(
        0
    ).tolist() == [0, 1, 2, 10, 11]
    with pytest.raises(LayoutError) as raised:
        _ = layout.tokens_per_rank
    assert (
        str(raised.value)
        == "the ranks of this layout hold 0 to 7 tokens; equal ones are needed"
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [[(0, 4)], [(3, 2)]],
            "a custom layout has positions 3 to 3 in two runs; each may be in one",
        ),
        (
            [[(2, 3), (0, 9)]],
            "a custom layout has positions 2 to 4 in two runs; each may be in one",
        ),
        (
            [[(-1, 2)]],
            "a custom layout has a run from -1, which is before the sequence; positions start at 0",
        ),
        (
            [[(4, 0)]],
            "a custom layout has a run of 0 positions at 4; each needs at least one",
        ),
        (
            [[(0, 4, 2)]],
            "a custom layout has a run from 0 in steps of 2; runs are of consecutive positions",
        ),
        ([[(0, 2.5)]], "the count of a run must be an integer, got 2.5 (float)"),
        (
            [(0, 9)],
            "takes a list of runs (start, count) for each rank, as in [[(0, 8)], [(8, 8)]], got [(0, 9)] (list)",
        ),
        ([], "a layout needs at least one rank and one token, got 0 and 0"),
        ([[]], "a layout needs at least one rank and one token, got 1 and 0"),
    ],
)
def test_runs_that_are_none_or_overlap_raise(parts, message):
    with pytest.raises(LayoutError) as raised:
        CustomLayout.of(parts)
    assert str(raised.value).endswith(message) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("parts", "length", "message"),
    [
        ([[(0, 4)], [(8, 4)]], None, "holds 8 of 12"),
        ([[(0, 4)], [(20, 4)]], 8, "holds 8 of 24"),
        ([[(0, 4)], [(4, 4)]], 12, "holds 8 of 12"),
    ],
    ids=["gap", "outside", "too long"],
)
def test_a_layout_that_leaves_out_positions_cannot_be_sharded(parts, length, message):
    layout = CustomLayout.of(parts, length=length)
    for raises in (
        lambda x: rs.shard(x, layout, 0, 0),
        lambda x: rs.unshard(x, layout, None, 0),
    ):
        with pytest.raises(LayoutError) as raised:
            raises(torch.zeros(layout.length))
        expected = f"a custom layout must hold every position to be sharded, this one {message}"
        assert str(raised.value) == expected


def test_runs_in_any_order_are_sharded_and_padded():
    layout = CustomLayout.of([[(4, 2), (0, 2)], [(2, 2), (6, 3)]], length=8)
    parts = [
        rs.shard(torch.arange(8), layout, rank, 0, value=-1).tolist()
        for rank in range(2)
    ]
    assert parts == [[4, 5, 0, 1], [2, 3, 6, 7, -1]]


def test_custom_and_named_layouts_do_not_mix_and_have_no_groups():
    custom = CustomLayout.of([[(0, 2)], [(2, 2)]])
    with pytest.raises(LayoutError, match="make them equal"):
        make_schedule(Layout("contiguous", 4, 2), causal(), 0, custom)
    with pytest.raises(LayoutError, match="Ulysses"):
        custom.grouped(2)
    with pytest.raises(LayoutError, match="in steps of 2"):
        CustomLayout("custom", 4, 1, parts=((Span(0, 4, 2),),))
