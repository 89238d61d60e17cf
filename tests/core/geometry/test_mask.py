"""Masks as regions against boolean matrices written down independently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.mask import Region
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


@pytest.mark.parametrize(
    ("mask", "expected"), EXPECTED, ids=[str(mask) for mask, _ in EXPECTED]
)
def test_masks_are_what_their_docstrings_say(mask, expected):
    assert np.array_equal(dense(mask), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_documents_see_only_themselves(window):
    document = np.repeat([0, 1, 2], [7, 1, 9])
    document = np.concatenate([document, [-1] * (LENGTH - len(document))])
    expected = (
        (document[:, None] == document[None, :]) & (document[:, None] >= 0) & (Q >= K)
    )
    if window:
        expected &= window > Q - K
    assert np.array_equal(dense(rs.documents([7, 1, 9], window=window)), expected)


@pytest.mark.parametrize("window", [None, 1, 2])
def test_frames_see_themselves_and_earlier_ones(window):
    frame = np.repeat([0, 1, 2, 3], [5, 1, 4, 3])
    frame = np.concatenate([frame, [9] * (LENGTH - len(frame))])
    expected = (frame[:, None] >= frame[None, :]) & (frame[:, None] < 9)
    if window:
        expected &= frame[:, None] - frame[None, :] < window
    assert np.array_equal(dense(rs.frames([5, 1, 4, 3], window=window)), expected)


@given(masks, masks)
@examples(150)
def test_and_or_are_the_boolean_ones_and_regions_stay_disjoint(a, b):
    assert np.array_equal(dense(a & b), dense(a) & dense(b))
    assert np.array_equal(dense(a | b), dense(a) | dense(b))


@given(masks)
@examples(100)
def test_spec_reads_back(mask):
    assert rs.Mask.parse(mask.spec) == mask


@given(
    st.sampled_from(
        ["causal", "full", "window:4", "prefix:3", "documents:3,5", "frames:2,2"]
    )
)
def test_short_forms_read_back_by_name(text):
    assert str(rs.Mask.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "casual",
        "window",
        "window:x",
        "window:0",
        "documents:",
        "regions:1,2",
        "causal:3",
    ],
)
def test_unreadable_masks_are_refused(text):
    with pytest.raises(rs.MaskError):
        rs.Mask.parse(text)


numbers = st.integers(0, 12)
regions = st.builds(
    lambda q, k, lo, width: Region(*sorted(q), *sorted(k), lo, lo + width),
    st.tuples(numbers, numbers),
    st.tuples(numbers, numbers),
    st.integers(-12, 3),
    numbers,
)


@given(st.lists(regions, min_size=1, max_size=5))
@examples(300)
def test_exactly_masks_that_count_a_pair_twice_overlap(several):
    listed = rs.Mask(tuple(several))
    far = np.arange(12)
    try:
        listed.dense(far, far)
    except rs.MaskError:
        with pytest.raises(rs.MaskError, match="overlap"):
            rs.Mask.parse(listed.spec)
    else:
        assert rs.Mask.parse(listed.spec) == listed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: rs.documents([4.7, 3.2]),
            r"a document's length must be an integer, got 4\.7",
        ),
        (lambda: rs.documents("35"), "a list of lengths"),
        (lambda: rs.documents(5), "a list of lengths"),
        (
            lambda: rs.documents([3], is_causal="no"),
            "is_causal must be True or False, got 'no'",
        ),
        (lambda: rs.documents([3], window=2.5), "window must be an integer"),
        (lambda: rs.frames([]), "frames need at least one length"),
        (lambda: rs.frames([4, 0]), "each at least one token"),
        (
            lambda: rs.frames([4], window=0),
            "a window of frames must hold at least one, got window=0",
        ),
        (lambda: rs.sliding_window(True), "window must be an integer, got True"),
        (
            lambda: rs.sliding_window(4, global_tokens="1"),
            "global_tokens must be an integer",
        ),
        (lambda: rs.prefix_lm(None), "prefix must be an integer, got None"),
        (lambda: rs.chunked(2.5, length=8), "size must be an integer"),
        (lambda: rs.chunked(2, length="8"), "length must be an integer"),
        (lambda: rs.sliding_window(1 << 61), r"at most 2\*\*60"),
        (lambda: rs.Mask.parse(3), "the text of a mask must be a str, got 3"),
        (
            lambda: rs.Mask.parse("regions:0,99999999999999999999,0,1,,"),
            r"at most 2\*\*60",
        ),
        (lambda: rs.Mask("causal"), "a mask is a tuple of regions, got 'causal'"),
    ],
)
def test_numbers_and_text_of_another_kind_are_refused(make, message):
    with pytest.raises(rs.MaskError, match=message):
        make()


@pytest.mark.parametrize("other", [3, None, "causal"])
def test_masks_combine_with_masks_alone(other):
    with pytest.raises(TypeError, match="unsupported operand"):
        rs.causal() & other
    with pytest.raises(TypeError, match="unsupported operand"):
        rs.causal() | other
