"""The loop that readers see first gives what dense attention gives."""

import numpy as np
import pytest

from ringspan.core import reference, reference_ring
from ringspan.core.geometry.layout import Layout


def problem(layout: str, ranks: int, length: int):
    """Whole q, k, v and dout with value heads of another size, and each rank's part of them and its positions."""
    numbers = np.random.default_rng(ranks)
    q, k, v, dout = (
        numbers.standard_normal((2, 3, length, size)) for size in (4, 4, 5, 5)
    )
    positions = [Layout(layout, length, ranks).positions(rank) for rank in range(ranks)]
    parts = [[x[:, :, mine] for mine in positions] for x in (q, k, v, dout)]
    return (q, k, v, dout), parts, positions


def windowed(queries, keys):
    """Each query sees itself and the two keys before; those of other documents of five tokens are hidden."""
    away = queries[:, None] - keys
    return (away >= 0) & (away < 3) & (queries[:, None] // 5 == keys // 5)


def blind(queries, keys):
    """The first three queries see nothing."""
    return (queries[:, None] >= 3) & (queries[:, None] >= keys)


@pytest.mark.parametrize("allowed", [reference_ring.causal, windowed, blind])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("contiguous", 1), ("contiguous", 3), ("zigzag", 2), ("striped", 4)],
)
def test_the_loop_equals_dense_attention(layout, ranks, allowed):
    length = 8 * ranks
    (q, k, v, dout), (qs, ks, vs, douts), positions = problem(layout, ranks, length)
    everywhere = np.arange(length)
    seen = allowed(everywhere, everywhere)
    expected, expected_lse = reference.attention(q, k, v, seen, 0.5)
    gradients = reference.backward(dout, q, k, v, seen, 0.5)
    out, lse = reference_ring.forward(qs, ks, vs, positions, 0.5, allowed)
    found = reference_ring.backward(
        douts, out, lse, qs, ks, vs, positions, 0.5, allowed
    )
    for rank, mine in enumerate(positions):
        np.testing.assert_allclose(
            out[rank], expected[:, :, mine], rtol=1e-12, atol=1e-14
        )
        np.testing.assert_allclose(lse[rank], expected_lse[:, :, mine], rtol=1e-12)
        for ours, exact in zip(found[rank], gradients, strict=True):
            np.testing.assert_allclose(ours, exact[:, :, mine], rtol=1e-11, atol=1e-13)
