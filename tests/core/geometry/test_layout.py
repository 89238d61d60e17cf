"""Layouts: every position lives in exactly one place, and the arithmetic agrees with the arrays."""

import numpy as np
import pytest
from hypothesis import given

import ringspan as rs
from tests.core.strategies import layouts


@given(layouts)
def test_every_padded_position_lives_on_exactly_one_rank(layout):
    assert sorted(layout.permutation.tolist()) == list(range(layout.padded_length))
    assert layout.length <= layout.padded_length < layout.length + layout.granularity
    assert {len(layout.positions(rank)) for rank in range(layout.ranks)} == {
        layout.tokens_per_rank
    }


@given(layouts)
def test_inverse_undoes_the_permutation(layout):
    padded = np.arange(layout.padded_length) * 7
    assert np.array_equal(padded[layout.permutation][layout.inverse], padded)


def test_the_three_layouts_of_eight_tokens_on_two_ranks():
    def held(name):
        layout = rs.Layout(name, 8, 2)
        return [layout.positions(rank).tolist() for rank in range(2)]

    assert held("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert held("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_rank_outside_of_the_layout_is_refused():
    with pytest.raises(rs.LayoutError, match="rank 2"):
        rs.Layout("zigzag", 8, 2).spans(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("diagonal", 8, 2),
            "unknown layout 'diagonal'; choose one of contiguous, striped, zigzag",
        ),
        (("zigzag", 0, 2), "length must be at least 1, got 0"),
        (("zigzag", 8, 0), "ranks must be at least 1, got 0"),
        (("zigzag", 8.5, 2), r"length must be an integer, got 8\.5"),
        (("zigzag", True, 2), "length must be an integer, got True"),
        (("zigzag", 8, "2"), "ranks must be an integer, got '2'"),
        (
            (3, 8, 2),
            "a layout's name must be one of contiguous, striped, zigzag, got 3",
        ),
    ],
)
def test_bad_layouts_are_refused_with_their_value(arguments, message):
    with pytest.raises(rs.LayoutError, match=message):
        rs.Layout(*arguments)
