"""Splitting tiles into what flash kernels run: the same pairs, each once, for every band on every rectangle."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core.geometry.tile import cut
from tests.fuzz import examples


def painted(tile, rows, keys):
    """The tile's pairs on a canvas. Shape (rows, keys)."""
    canvas = np.zeros((rows, keys), int)
    i, j = np.mgrid[: tile.num_rows, : tile.num_keys]
    canvas[tile.q0 : tile.q1, tile.k0 : tile.k1] = (i - j >= tile.lo) & (i - j <= tile.hi)
    return canvas


bands = st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(-16, 16), st.integers(0, 20), st.integers(0, 3))


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
    assert all(piece.is_full or piece.is_causal or piece.is_anticausal for piece in pieces)
    assert np.array_equal(sum(painted(piece, *expected.shape) for piece in pieces), expected)
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
        assert np.array_equal(painted(tile.mirrored(rows, keys), rows, keys), painted(tile, rows, keys)[::-1, ::-1])
