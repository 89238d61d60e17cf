"""Work as a function of position, and the stretches of a mask, against dense masks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.pairs import stretches
from tests.core.strategies import lengths, masks
from tests.fuzz import examples


@given(masks, lengths)
@examples(300)
def test_stretches_are_cut_where_no_pair_crosses(mask, length):
    dense = mask.dense(np.arange(length), np.arange(length))
    cut = stretches(mask, length)
    assert [*cut.starts, length] == [0, *cut.stops]
    for stretch, (start, stop) in enumerate(zip(cut.starts, cut.stops, strict=True)):
        inside = dense[start:stop, start:stop]
        assert inside.sum() == dense[start:stop].sum() == dense[:, start:stop].sum() == cut.pairs[stretch]
        counted = [dense[start:position].sum() for position in range(start, stop + 1)]
        assert cut.before(stretch, np.arange(start, stop + 1)).tolist() == counted


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(0, 3))
@examples(50)
def test_documents_are_stretches_and_so_is_what_is_behind_them(lengths, behind):
    cut = stretches(rs.documents(lengths), sum(lengths) + behind)
    assert (cut.stops - cut.starts).tolist() == [*lengths, *([behind] if behind else [])]
