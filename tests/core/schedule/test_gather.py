"""Keys gathered in order of position: the pairs of all bands, expanded, are those of the mask, once each."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.schedule.schedule import make_schedule
from tests.core.strategies import custom_layouts, masks
from tests.fuzz import examples


@given(
    length=st.integers(1, 60),
    keys=st.none() | st.integers(1, 60),
    mask=masks,
    layout=st.sampled_from(["contiguous", "zigzag"]) | st.integers(2, 6).flatmap(custom_layouts),
    ranks=st.integers(2, 6),
)
@examples(100)
def test_bands_over_gathered_keys_are_the_mask(length, keys, mask, layout, ranks):
    split = layout, layout
    if isinstance(layout, str):
        split = rs.Layout(layout, length, ranks), rs.Layout(layout, keys or length, ranks)
    assume(split[0].ranks > 1)
    schedules = [make_schedule(split[0], mask, rank, split[1], "all-gather") for rank in range(split[0].ranks)]
    allowed = mask.dense(np.arange(split[0].length), np.arange(split[1].length))
    held = np.concatenate([split[1].positions(owner) for owner in range(split[1].ranks)])
    allowed &= np.isin(np.arange(split[1].length), held)  # runs may leave out some
    for schedule in schedules:
        gathered, rank = schedule.gathered, schedule.rank
        assert gathered is not None
        positions = np.full(gathered.num_keys, -1)
        for owner, start, stop, place in gathered.pieces:
            positions[place : place + stop - start] = split[1].positions(owner)[start:stop]
            sent = [send.ranges for _, send in schedules[owner].hops[0].sends if send.peer == rank]
            assert owner == rank or any(a <= start and stop <= b for ranges in sent for a, b in ranges)
        assert (np.diff(positions) > 0).all() and (positions >= 0).all()
        seen = np.zeros(allowed.shape, np.int64)
        queries = split[0].positions(rank)
        for q0, q1, k0, k1, lo, hi in gathered.bands:
            rows, columns = np.mgrid[: q1 - q0, : k1 - k0]
            inside = (lo <= rows - columns) & (rows - columns <= hi)
            np.add.at(seen, (queries[q0:q1][rows[inside]], positions[k0:k1][columns[inside]]), 1)
        mine = queries[queries < split[0].length]
        assert (seen[mine] == allowed[mine]).all() and seen.sum() == gathered.num_pairs == schedule.num_pairs
