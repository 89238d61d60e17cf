"""Keys gathered in order of position: the pairs of all bands, expanded, are those of the mask, once each."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.schedule.kernel_launches import bands, chains, squares
from ringspan.core.schedule.schedule import make_schedule
from tests.core.strategies import custom_layouts, masks
from tests.fuzz import examples


@given(
    length=st.integers(1, 60),
    keys=st.none() | st.integers(1, 60),
    mask=masks,
    layout=st.sampled_from(["contiguous", "zigzag"])
    | st.integers(2, 6).flatmap(custom_layouts),
    ranks=st.integers(2, 6),
)
@examples(100)
def test_bands_over_gathered_keys_are_the_mask(length, keys, mask, layout, ranks):
    split = layout, layout
    if isinstance(layout, str):
        split = (
            rs.Layout(layout, length, ranks),
            rs.Layout(layout, keys or length, ranks),
        )
    assume(split[0].ranks > 1)
    schedules = [
        make_schedule(split[0], mask, rank, split[1], "all-gather")
        for rank in range(split[0].ranks)
    ]
    allowed = mask.dense(np.arange(split[0].length), np.arange(split[1].length))
    held = np.concatenate(
        [split[1].positions(owner) for owner in range(split[1].ranks)]
    )
    allowed &= np.isin(np.arange(split[1].length), held)  # runs may leave out some
    for schedule in schedules:
        whole, staged = schedule.gathered, schedule.gathered.in_stages
        assert len(whole.stages) == 1 and len(staged.stages) == 2
        for gathered in (whole, staged):
            check(gathered, schedule.rank, split, allowed)
        queries = split[0].positions(schedule.rank)
        for kernel in (bands, squares, chains):
            seen = np.zeros(allowed.shape, np.int64)
            suited = whole.suited(kernel)
            for stage in suited.stages:
                for launch in kernel(stage.bands):
                    tiles = [
                        tile.shifted(launch.q0, launch.k0) for tile in launch.tiles
                    ]
                    expand(tiles, queries, placed(suited, split[1]), seen)
            assert (
                seen[queries[queries < split[0].length]]
                == allowed[queries[queries < split[0].length]]
            ).all()
    for one, other in permutations(schedules, 2):
        for sender, receiver in product(
            (one.gathered, one.gathered.in_stages),
            (other.gathered, other.gathered.in_stages),
        ):
            sent = [
                stretch
                for sends, _ in sender.posts
                for stretch in sends
                if stretch.peer == other.rank
            ]
            came = [
                stretch
                for _, receives in receiver.posts
                for stretch in receives
                if stretch.peer == one.rank
            ]
            here, there = placed(sender, split[1]), placed(receiver, split[1])
            for a, b in zip(sent, came, strict=True):
                assert here[a.places].tolist() == there[b.places].tolist()


def placed(gathered, keys):
    """The positions of gathered keys."""
    positions = np.full(gathered.num_keys, -1)
    for piece in gathered.pieces:
        positions[piece.places] = keys.positions(piece.owner)[piece.start : piece.stop]
    return positions


def expand(tiles, queries, positions, seen):
    for q0, q1, k0, k1, lo, hi in tiles:
        rows, columns = np.mgrid[: q1 - q0, : k1 - k0]
        inside = (lo <= rows - columns) & (rows - columns <= hi)
        np.add.at(
            seen, (queries[q0:q1][rows[inside]], positions[k0:k1][columns[inside]]), 1
        )


def check(gathered, rank, split, allowed):
    """Each allowed pair is there once, the first of two stages needs own keys alone, and all others are received."""
    positions, queries = placed(gathered, split[1]), split[0].positions(rank)
    others = np.ones(gathered.num_keys, bool)
    for piece in gathered.of(rank):
        others[piece.places] = False
    assert (positions >= 0).all() and (np.diff(positions[others]) > 0).all()
    assert len(gathered.stages) == 2 or (np.diff(positions) > 0).all()
    came = np.zeros(gathered.num_keys, int)
    for one in (one for _, receives in gathered.posts for one in receives):
        came[one.places] += 1
    assert (came == others).all()
    seen = np.zeros(allowed.shape, np.int64)
    for stage in gathered.stages:
        if stage is not gathered.stages[-1]:
            assert not any(others[tile.k0 : tile.k1].any() for tile in stage.bands)
        expand(stage.bands, queries, positions, seen)
    mine = queries[queries < split[0].length]
    assert (seen[mine] == allowed[mine]).all() and seen.sum() == sum(
        stage.num_pairs for stage in gathered.stages
    )


@pytest.mark.parametrize(
    ("mask", "launches"),
    [(rs.causal(), 3), (rs.documents([700, 900, 448]), 7)],
    ids=str,
)
def test_squares_are_computed_in_two_stages_and_bands_in_one(mask, launches):
    for rank in range(8):
        gathered = make_schedule(
            rs.Layout("zigzag", 2048, 8), mask, rank, None, "all-gather"
        ).gathered
        assert (
            gathered.suited(squares) is gathered.in_stages
            and gathered.suited(chains) is gathered
        )
        rows = np.zeros(256, int)
        found = [
            one for stage in gathered.in_stages.stages for one in squares(stage.bands)
        ]
        for launch in found:
            rows[launch.q0 : launch.q1] += 1
        assert rows.max() <= 2 and len(found) <= launches
