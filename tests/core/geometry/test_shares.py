"""The shares of a cache: each position is held exactly once, whatever was split, dealt and cropped, and shares are
level.
"""

from itertools import chain, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringspan.core.geometry.shares import BLOCK_TOKENS, Shares
from tests.fuzz import examples

ways = st.sampled_from(["split", "deal", "crop"])
steps = st.lists(st.tuples(ways, st.integers(1, 200)), min_size=1, max_size=12)


def step(shares: Shares, way: str, number: int) -> None:
    """``number`` new positions, or as many as are to go."""
    if way == "crop":
        shares.crop(max(0, shares.length - number))
    elif way == "split":
        shares.split(max(number, 2 * shares.ranks))
    else:
        shares.deal(number)


def held_by(runs) -> list[list[int]]:
    return [
        [position for start, count in of for position in range(start, start + count)]
        for of in runs
    ]


@given(st.integers(1, 5), steps)
@examples(300)
def test_each_position_is_held_once_and_stays_where_it_is(ranks, steps):
    shares, owners = Shares(ranks), {}
    for way, number in steps:
        length = shares.length
        step(shares, way, number)
        held = held_by(shares.runs())
        assert sorted(chain.from_iterable(held)) == list(range(shares.length))
        assert all(of == sorted(of) for of in held)
        now = {position: rank for rank, of in enumerate(held) for position in of}
        kept = min(length, shares.length)
        assert [owners[position] for position in range(kept)] == [
            now[position] for position in range(kept)
        ]
        owners = now
        for of in shares.runs():
            assert all(count > 0 for _, count in of)
            assert all(
                start + count < after for (start, count), (after, _) in pairwise(of)
            )


@given(st.integers(1, 5), steps)
@examples(300)
def test_the_layout_of_a_step_is_what_it_added(ranks, steps):
    shares = Shares(ranks)
    for way, number in steps:
        before = held_by(shares.runs())
        if way == "crop":
            step(shares, way, number)
            continue
        count = max(number, 2 * ranks) if way == "split" else number
        layout = (shares.split if way == "split" else shares.deal)(count)
        now = held_by(shares.runs())
        added = [new[len(old) :] for old, new in zip(before, now, strict=True)]
        assert [
            layout.positions(rank)[: len(of)].tolist() for rank, of in enumerate(added)
        ] == added
        assert layout.length == shares.length, "what is behind it is padding"


@given(st.integers(1, 5), steps)
@examples(300)
def test_shares_differ_by_at_most_a_block_or_the_crop(ranks, steps):
    shares, allowed = Shares(ranks), BLOCK_TOKENS
    for way, number in steps:
        step(shares, way, number)
        counts = shares.counts()
        spread = max(counts) - min(counts)
        if way == "crop":
            allowed = max(BLOCK_TOKENS, spread)
        assert spread <= allowed


@given(st.integers(1, 5), st.lists(st.integers(10, 200), min_size=1, max_size=9))
@examples(100)
def test_splitting_alone_leaves_shares_that_differ_by_a_token(ranks, counts):
    shares = Shares(ranks)
    for count in counts:
        shares.split(count)
        assert max(shares.counts()) - min(shares.counts()) <= 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_writing_makes_a_cropped_cache_level_again(ranks):
    shares = Shares(ranks)
    shares.split(1000)
    shares.crop(1000 // (2 * ranks) * ranks)  # the middle: of each rank a piece
    shares.crop(1000 // (2 * ranks))  # all that is left is the first rank's
    assert shares.counts()[1:] == (0,) * (ranks - 1)
    for _ in range(1000 * ranks):
        shares.deal(1)
    assert max(shares.counts()) - min(shares.counts()) <= BLOCK_TOKENS


@given(st.integers(1, 5), steps, st.integers(0, 900))
@examples(300)
def test_what_is_held_from_a_position_on(ranks, steps, first):
    shares = Shares(ranks)
    for way, number in steps:
        step(shares, way, number)
    assume(0 < shares.length >= first)
    layout, counts = shares.held(first), shares.counts(first)
    assert layout.length == shares.length
    assert sum(counts) == shares.length - first
    for rank, of in enumerate(held_by(shares.runs())):
        expected = [position for position in of if position >= first]
        assert counts[rank] == len(expected)
        found = layout.positions(rank).tolist()
        if expected:
            assert found == expected
        else:
            assert len(found) == 1 and found[0] >= shares.length, (
                "a rank without any holds one of padding"
            )


def test_a_block_is_written_to_one_rank_over_many_steps():
    shares = Shares(3)
    for _ in range(BLOCK_TOKENS + 1):
        shares.deal(1)
    assert shares.runs() == (((0, BLOCK_TOKENS),), ((BLOCK_TOKENS, 1),), ())
