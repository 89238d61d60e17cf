"""Folds hold each token once, and read what their mask shows them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.folds import fold_layouts, folded_layout, folds_read, last_reader
from tests.core.strategies import masks


@given(st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 60), st.integers(1, 4), st.integers(1, 6))
def test_folds_hold_every_token_once_in_order(name, length, ranks, folds):
    layouts, whole = fold_layouts(name, length, ranks, folds), folded_layout(name, length, ranks, folds)
    held = [np.concatenate([layout.positions(rank) for layout in layouts]) for rank in range(ranks)]
    for rank in range(ranks):
        np.testing.assert_array_equal(held[rank], whole.positions(rank))
    tokens = layouts[0].padded_length
    for fold, layout in enumerate(layouts):
        assert sorted(layout.permutation) == [*range(fold * tokens, (fold + 1) * tokens)]
    assert whole.padded_length >= length and whole.padded_length - length < folds * tokens


@given(masks, st.integers(1, 40), st.integers(1, 6))
def test_folds_read_those_that_their_mask_shows(mask, length, folds):
    tokens = -(-length // folds)
    seen = mask.dense(np.arange(folds * tokens), np.arange(folds * tokens))
    blocks = seen.reshape(folds, tokens, folds, tokens).any((1, 3))
    for fold in range(folds):
        expected = tuple(each for each in reversed(range(fold)) if blocks[fold, each])
        assert folds_read(mask.spec, folds * tokens, tokens, fold) == expected
        assert last_reader(mask.spec, folds * tokens, tokens, fold) == max(np.flatnonzero(blocks[:, fold]), default=-1)


def test_layouts_of_many_runs_are_refused():
    with pytest.raises(rs.LayoutError, match="use zigzag or contiguous"):
        fold_layouts("striped", 16, 2, 2)
