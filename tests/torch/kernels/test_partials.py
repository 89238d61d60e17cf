"""Merging of partials of a 16-bit result, which wait for each other."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.core import softmax
from ringspan.torch.kernels.partials.partial import Deferred, Partial
from tests.fuzz import examples

ROWS = 12
ranges = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(lambda one: (one[0], min(ROWS, sum(one))))
SIZES = ((128,), torch.bfloat16), ((), torch.float32)


@given(
    partials=st.lists(st.tuples(ranges, st.sampled_from(["waits", "float32", "in place"])), max_size=14),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(150)
def test_any_partials_in_any_order_are_merged_and_rounded_once(partials, has_sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    out, lse = torch.full((2, 3, ROWS, 4), torch.nan).bfloat16(), torch.full((2, 3, ROWS), torch.nan)
    total = Partial.of(out, lse)
    assert isinstance(total, Deferred)
    expected = np.zeros((2, 3, ROWS, 4)), np.full((2, 3, ROWS), -np.inf)
    for (start, stop), how in partials:
        rows = slice(start, stop)
        values = torch.randn(2, 3, stop - start, 4, generator=generator).bfloat16()
        logits = torch.randn(2, 3, stop - start, generator=generator) * 5
        logits[:, :, ::3], values[:, :, ::3] = -torch.inf, 0  # rows that saw nothing
        if how == "in place":  # a kernel adds no key
            total.running(rows)
            continue
        total.merge(rows, (values if how == "waits" else values.float(), logits))
        mine = expected[0][:, :, rows], expected[1][:, :, rows]
        merged = softmax.merge(*mine, values.double().numpy(), logits.double().numpy())
        mine[0][:], mine[1][:] = merged
    sinks = torch.randn(3, generator=generator) if has_sinks else None
    total.finish(sinks)
    if sinks is not None:
        logits = np.broadcast_to(sinks.double().numpy()[None, :, None], expected[1].shape)
        expected = softmax.merge(*expected, np.zeros_like(expected[0]), logits)
    rounded = torch.from_numpy(expected[0]).bfloat16()
    # Once to bfloat16: but for ties, what float64 gives.
    assert ((out.double() - torch.from_numpy(expected[0])).abs() <= 2**-8 * rounded.abs() + 1e-6).all()
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-5, atol=1e-5)
