"""Masks as regions against boolean matrices written down independently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from tests.core.strategies import masks
from tests.fuzz import examples

LENGTH = 23
POSITIONS = np.arange(LENGTH)
Q, K = POSITIONS[:, None], POSITIONS[None, :]


def dense(mask):
    return mask.dense(POSITIONS, POSITIONS)


EXPECTED = [
    (rs.full(), np.ones((LENGTH, LENGTH), bool)),
    (rs.causal(), Q >= K),
    (rs.sliding_window(5), (Q >= K) & (Q - K < 5)),
    (rs.sliding_window(5, global_tokens=3), (Q >= K) & ((Q - K < 5) | (K < 3))),
    (rs.prefix_lm(4), (Q >= K) | (K < 4)),
    (rs.prefix_lm(0), Q >= K),
    (rs.chunked(6, length=LENGTH), (Q >= K) & (Q // 6 == K // 6)),
]


@pytest.mark.parametrize(("mask", "expected"), EXPECTED, ids=[str(mask) for mask, _ in EXPECTED])
def test_masks_are_what_their_docstrings_say(mask, expected):
    assert np.array_equal(dense(mask), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_documents_see_only_themselves(window):
    document = np.repeat([0, 1, 2], [7, 1, 9])
    document = np.concatenate([document, [-1] * (LENGTH - len(document))])
    expected = (document[:, None] == document[None, :]) & (document[:, None] >= 0) & (Q >= K)
    if window:
        expected &= window > Q - K
    assert np.array_equal(dense(rs.documents([7, 1, 9], window=window)), expected)


@given(masks, masks)
@examples(150)
def test_and_or_are_the_boolean_ones_and_regions_stay_disjoint(a, b):
    assert np.array_equal(dense(a & b), dense(a) & dense(b))
    assert np.array_equal(dense(a | b), dense(a) | dense(b))


@given(masks)
@examples(100)
def test_spec_reads_back(mask):
    assert rs.Mask.parse(mask.spec) == mask


@given(st.sampled_from(["causal", "full", "window:4", "prefix:3", "documents:3,5"]))
def test_short_forms_read_back_by_name(text):
    assert str(rs.Mask.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "casual", "window", "window:x", "window:0", "documents:", "regions:1,2", "causal:3"]
)
def test_unreadable_masks_are_refused(text):
    with pytest.raises(rs.MaskError):
        rs.Mask.parse(text)


def test_overlapping_regions_are_noticed():
    doubled = rs.Mask(rs.causal().regions * 2)
    with pytest.raises(rs.MaskError, match="overlap"):
        dense(doubled)
