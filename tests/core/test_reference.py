"""The oracle against finite differences, and the merge rule against the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core import reference
from ringspan.core.reference import merge
from tests.core.strategies import masks
from tests.fuzz import examples


def random_inputs(
    seed, num_queries, num_keys, heads=4, groups=2, size=3, value_size=5, batch=2
):
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
                out, _ = reference.attention(
                    moved["q"], moved["k"], moved["v"], allowed, 0.7
                )
                losses.append((out * dout).sum())
            assert gradient[where] == pytest.approx(
                (losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-8
            )


def test_a_row_without_keys_is_zero_and_stays_zero_when_merged():
    q, k, v, dout = random_inputs(2, 3, 4)
    nothing = np.zeros((3, 4), bool)
    out, lse = reference.attention(q, k, v, nothing, 1.0)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert all((g == 0).all() for g in reference.backward(dout, q, k, v, nothing, 1.0))
    merged, merged_lse = merge(out, lse, out, lse)
    assert (merged == 0).all() and np.isneginf(merged_lse).all()


@given(masks, st.integers(1, 20), st.integers(0, 20))
@examples(60)
def test_partials_of_some_keys_each_merge_to_dense_attention(mask, keys, cut):
    q, k, v, _ = random_inputs(keys, 9, keys, batch=1)
    allowed = mask.dense(np.arange(9), np.arange(keys))
    partials = [
        reference.attention(q, k[:, :, few], v[:, :, few], allowed[:, few], 0.5)
        for few in (slice(cut), slice(cut, None))
    ]
    out, lse = merge(*partials[0], *partials[1])
    expected, expected_lse = reference.attention(q, k, v, allowed, 0.5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
