"""Folds hold each token once, and read what their mask shows them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.folds import (
    check_full_folds,
    fold_layouts,
    folded_layout,
    folds_read,
    last_reader,
)
from tests.core.strategies import masks


@given(
    st.sampled_from(["zigzag", "contiguous"]),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_folds_hold_every_token_once_in_order(name, length, ranks, folds):
    layouts, whole = (
        fold_layouts(name, length, ranks, folds),
        folded_layout(name, length, ranks, folds),
    )
    held = [
        np.concatenate([layout.positions(rank) for layout in layouts])
        for rank in range(ranks)
    ]
    for rank in range(ranks):
        np.testing.assert_array_equal(held[rank], whole.positions(rank))
    tokens = layouts[0].padded_length
    for fold, layout in enumerate(layouts):
        assert sorted(layout.permutation) == [
            *range(fold * tokens, (fold + 1) * tokens)
        ]
    assert (
        whole.padded_length >= length and whole.padded_length - length < folds * tokens
    )


@given(masks, st.integers(1, 40), st.integers(1, 6))
def test_folds_read_those_that_their_mask_shows(mask, length, folds):
    tokens = -(-length // folds)
    seen = mask.dense(np.arange(folds * tokens), np.arange(folds * tokens))
    blocks = seen.reshape(folds, tokens, folds, tokens).any((1, 3))
    for fold in range(folds):
        expected = tuple(each for each in reversed(range(fold)) if blocks[fold, each])
        assert folds_read(mask.spec, folds * tokens, tokens, fold) == expected
        assert last_reader(mask.spec, folds * tokens, tokens, fold) == max(
            np.flatnonzero(blocks[:, fold]), default=-1
        )


def test_layouts_of_many_runs_are_refused():
    with pytest.raises(rs.LayoutError, match="use zigzag or contiguous"):
        fold_layouts("striped", 16, 2, 2)


@pytest.mark.parametrize(("name", "most"), [("zigzag", 64), ("contiguous", 128)])
def test_folds_of_padding_alone_are_refused(name, most):
    check_full_folds(name, 256, 2, most)
    with pytest.raises(
        rs.LayoutError,
        match=f"and 256 tokens fill {most} folds with one token in each; use at most",
    ):
        check_full_folds(name, 256, 2, most + 1)


def test_work_has_a_bound_of_more_folds_than_tokens():
    assert batch_layout("zigzag", 9, 2, folds=9).padded_length == 9 * 4
    with pytest.raises(
        rs.LayoutError,
        match="folds=99999999: the sequence has 256 tokens; use at most as many folds",
    ):
        batch_layout("zigzag", 256, 2, folds=99999999)
