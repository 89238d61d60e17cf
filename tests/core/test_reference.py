"""The oracle against finite differences, and the merge rule against the oracle."""

import numpy as np
import pytest
from hypothesis import given

import ringspan as rs
from ringspan.core import reference
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.softmax import merge
from tests.core.strategies import layouts, masks
from tests.fuzz import examples


def random_inputs(seed, num_queries, num_keys, heads=4, groups=2, size=3, value_size=5, batch=2):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, num_queries, size))
    k = rng.standard_normal((batch, groups, num_keys, size))
    v = rng.standard_normal((batch, groups, num_keys, value_size))
    return q, k, v, rng.standard_normal((batch, heads, num_queries, value_size))


def test_gradients_are_those_of_finite_differences():
    q, k, v, dout = random_inputs(0, 5, 6)
    allowed = rs.prefix_lm(2).dense(np.arange(5), np.arange(6))
    gradients = reference.backward(dout, q, k, v, allowed, 0.7)
    for name, array, gradient in zip("qkv", (q, k, v), gradients, strict=True):
        rng = np.random.default_rng(1)
        for _ in range(5):
            where = tuple(rng.integers(0, n) for n in array.shape)
            losses = []
            for step in (1e-5, -1e-5):
                moved = {"q": q, "k": k, "v": v, name: array.copy()}
                moved[name][where] += step
                out, _ = reference.attention(moved["q"], moved["k"], moved["v"], allowed, 0.7)
                losses.append((out * dout).sum())
            assert gradient[where] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-8)


def test_a_row_without_keys_is_zero_and_stays_zero_when_merged():
    q, k, v, dout = random_inputs(2, 3, 4)
    nothing = np.zeros((3, 4), bool)
    out, lse = reference.attention(q, k, v, nothing, 1.0)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert all((g == 0).all() for g in reference.backward(dout, q, k, v, nothing, 1.0))
    merged, merged_lse = merge(out, lse, out, lse)
    assert (merged == 0).all() and np.isneginf(merged_lse).all()


@given(layouts, masks)
@examples(60)
def test_partials_over_the_ring_merge_to_dense_attention(layout, mask):
    length = layout.padded_length
    q, k, v, _ = random_inputs(length, length, length, batch=1)
    everywhere = np.arange(length)
    real = everywhere < layout.length
    expected, expected_lse = reference.attention(
        q, k, v, mask.dense(everywhere, everywhere) & real & real[:, None], 0.5
    )
    for rank in range(layout.ranks):
        mine = layout.positions(rank)
        out, lse = np.zeros_like(q[:, :, mine] @ np.ones((3, 5))), np.full(q[:, :, mine].shape[:3], -np.inf)
        for hop in make_schedule(layout, mask, rank).hops:
            theirs = layout.positions(hop.owner)
            for tile in hop.tiles:
                rows, keys = slice(tile.q0, tile.q1), theirs[tile.k0 : tile.k1]
                i, j = np.mgrid[: tile.num_rows, : tile.num_keys]
                allowed = (i - j >= tile.lo) & (i - j <= tile.hi)
                partial = reference.attention(q[:, :, mine[rows]], k[:, :, keys], v[:, :, keys], allowed, 0.5)
                out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *partial)
        np.testing.assert_allclose(out, expected[:, :, mine], rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse, expected_lse[:, :, mine], rtol=1e-12, atol=1e-12)
