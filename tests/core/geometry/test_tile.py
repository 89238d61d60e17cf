"""Tiles, where stripes meet regions, and stretches of a mask: the pairs of dense masks, each once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.geometry.meetings import stripe_cells, stripe_hulls
from ringspan.core.geometry.pairs import stretches
from ringspan.core.geometry.tile import cut, meet
from tests.core.strategies import lengths, masks
from tests.fuzz import examples


def painted(tile, rows, keys):
    """The tile's pairs on a canvas. Shape (rows, keys)."""
    canvas = np.zeros((rows, keys), int)
    i, j = np.mgrid[: tile.num_rows, : tile.num_keys]
    canvas[tile.q0 : tile.q1, tile.k0 : tile.k1] = (i - j >= tile.lo) & (
        i - j <= tile.hi
    )
    return canvas


bands = st.tuples(
    st.integers(1, 14),
    st.integers(1, 14),
    st.integers(-16, 16),
    st.integers(0, 20),
    st.integers(0, 3),
)


@given(bands)
@examples(400)
def test_a_band_is_split_into_full_causal_and_anticausal_tiles(band):
    rows, keys, lo, width, offset = band
    tile = cut(offset, offset + rows, 2 * offset, 2 * offset + keys, lo, lo + width)
    i, j = np.mgrid[: offset + rows, : 2 * offset + keys]
    expected = (i >= offset) & (j >= 2 * offset) & (i - j >= lo) & (i - j <= lo + width)
    if tile is None:
        assert not expected.any()
        return
    pieces = list(tile.split())
    assert all(
        piece.is_full or piece.is_causal or piece.is_anticausal for piece in pieces
    )
    assert np.array_equal(
        sum(painted(piece, *expected.shape) for piece in pieces), expected
    )
    assert sum(piece.num_pairs for piece in pieces) == tile.num_pairs == expected.sum()


def test_a_window_over_its_own_chunk_is_two_tiles_a_window():
    tile = cut(0, 64, 0, 64, 0, 7)
    assert tile is not None
    pieces = list(tile.split())
    assert len(pieces) == 2 * 64 // 8
    assert max(piece.num_rows for piece in pieces) == 8


@given(bands)
def test_mirroring_twice_changes_nothing(band):
    rows, keys, lo, width, _ = band
    tile = cut(0, rows, 0, keys, lo, lo + width)
    if tile is not None:
        assert tile.mirrored(rows, keys).mirrored(rows, keys) == tile
        assert np.array_equal(
            painted(tile.mirrored(rows, keys), rows, keys),
            painted(tile, rows, keys)[::-1, ::-1],
        )


@given(masks, lengths)
@examples(300)
def test_stretches_are_cut_where_no_pair_crosses(mask, length):
    dense = mask.dense(np.arange(length), np.arange(length))
    cut = stretches(mask, length)
    assert [*cut.starts, length] == [0, *cut.stops]
    for stretch, (start, stop) in enumerate(zip(cut.starts, cut.stops, strict=True)):
        inside = dense[start:stop, start:stop]
        assert (
            inside.sum()
            == dense[start:stop].sum()
            == dense[:, start:stop].sum()
            == cut.pairs[stretch]
        )
        counted = [dense[start:position].sum() for position in range(start, stop + 1)]
        assert cut.before(stretch, np.arange(start, stop + 1)).tolist() == counted


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(0, 3))
@examples(50)
def test_documents_are_stretches_and_so_is_what_is_behind_them(lengths, behind):
    cut = stretches(rs.documents(lengths), sum(lengths) + behind)
    assert (cut.stops - cut.starts).tolist() == [
        *lengths,
        *([behind] if behind else []),
    ]


@given(masks, st.integers(2, 9), st.integers(1, 9), st.integers(1, 9))
@examples(100)
def test_cells_and_hulls_are_those_of_every_pair_of_stripes(
    mask, step, q_count, k_count
):
    regions = mask.table(step * q_count, step * k_count)
    a, b = np.mgrid[:step, :step]
    met = meet(
        a[..., None], q_count, b[..., None], k_count, step, regions.T[:, None, None]
    )
    is_met = met[1] > met[0]
    cells = stripe_cells(step, q_count, k_count, regions)
    for weights, expected in (
        (cells.met[1] - cells.met[0], met[1] - met[0]),
        (cells.met[5] % 97, met[5] % 97),
    ):
        assert np.array_equal(
            cells.summed(weights, step), (expected * is_met).sum((1, 2))
        )
    hulls = stripe_hulls(a.ravel(), b.ravel(), step, q_count, k_count, regions).reshape(
        2, step, step
    )
    seen = is_met.any(-1)
    assert np.array_equal(hulls.sum(0) < 0, seen)
    bounds = [
        np.where(is_met, of, k_count).min(-1, initial=k_count)
        for of in (met[2], -met[3])
    ]
    assert np.array_equal(hulls[:, seen], np.stack(bounds)[:, seen])
    for query in range(step):
        alone = stripe_cells(step, q_count, k_count, regions, query)
        first, stop = alone.keys_of(query)
        assert np.array_equal((stop - first).clip(0).sum(), is_met[query].sum())
