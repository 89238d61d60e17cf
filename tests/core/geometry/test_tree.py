"""Trees of segments against the rule: a token sees its own segment up to itself, and all that its segment continues."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.tree import Tree
from ringspan.core.schedule.schedule import make_schedule
from tests.fuzz import examples


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    return lengths, [
        draw(st.integers(-1, number - 1)) for number in range(len(lengths))
    ]


@given(
    given_tree=trees(), window=st.none() | st.integers(1, 9), chunk=st.integers(1, 6)
)
@examples(200)
def test_any_tree_is_its_branches(given_tree, window, chunk):
    lengths, parents = given_tree
    whole = Tree(tuple(lengths), tuple(parents))
    in_chunks = np.zeros((sum(lengths), sum(lengths)), np.bool_)
    starts = np.cumsum([0, *lengths]).tolist()
    expected = np.zeros((starts[-1], starts[-1]), np.bool_)
    for number in range(len(lengths)):
        branch, segment = [], number
        while segment >= 0:
            branch = [*range(starts[segment], starts[segment + 1]), *branch]
            segment = parents[segment]
        for place in range(len(branch) - lengths[number], len(branch)):
            expected[branch[place], branch[: place + 1][-(window or place + 1) :]] = (
                True
            )
            in_chunks[branch[place], branch[place - place % chunk : place + 1]] = True
            assert whole.positions(starts[-1] + 2)[branch[place]] == place
            assert whole.before()[branch[place]] == (branch[place - 1] if place else -1)
    mask = rs.tree(lengths, parents, window=window)
    everywhere = np.arange(starts[-1])
    assert (mask.dense(everywhere, everywhere) == expected).all()
    assert (whole.mask(chunk=chunk).dense(everywhere, everywhere) == in_chunks).all()
    assert rs.tree(lengths, [-1] * len(lengths), window=window) == rs.documents(
        lengths, window=window
    )


def test_a_prompt_with_answers_has_a_region_each_and_one_shared():
    assert len(rs.tree([30, 7, 9, 8], [-1, 0, 0, 0]).regions) == 3 + 1
    # Two prompts; each with two turns, each with two answers: eleven branches of a tree of two levels.
    assert len(rs.tree([9, 2, 3, 3, 2, 3, 3], [-1, 0, 1, 1, 0, 4, 4]).regions) == 4 + 3
    assert len(rs.tree([5, 5, 5], [-1, 0, 1]).regions) == 1, "a chain is one document"


def test_a_schedule_of_a_thousand_segments_has_few_tiles():
    mask = rs.tree([8192, *[56] * 999], [-1, *[0] * 999])
    layout = rs.Layout("zigzag", 8192 + 56 * 999, 64)
    tiles = [
        sum(len(hop.bands) for hop in make_schedule(layout, mask, rank).hops)
        for rank in (0, 31, 63)
    ]
    assert max(tiles) < 200


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([3, 4], [-1], "1 parents for 2 segments"),
        ([3, 4], [-1, 1], "segment 1 continues segment 1; give an earlier one"),
        ([3, 4], [0, -1], "segment 0 continues segment 0"),
        ([3, 0], [-1, 0], "at least one token"),
        ([3, 4], [-1, 0.5], "a parent"),
        (7, [-1], "a list of lengths"),
        ([7], 0, "a list of segments|must be a list"),
    ],
)
def test_what_is_no_tree_is_refused(lengths, parents, message):
    with pytest.raises(rs.MaskError, match=message):
        rs.tree(lengths, parents)
