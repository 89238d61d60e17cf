"""The fused merge against the rule in float64, on any device."""

import numpy as np
import torch

from ringspan.core import reference


def check_merge(
    dtype: torch.dtype,
    size: int,
    device: str,
    count: int = 2,
    *,
    has_sinks: bool = False,
) -> None:
    """Rows with and without keys in each partial, in slices of larger tensors; neighbours must be left alone."""
    from ringspan.torch.engine.kernels.partials.triton_merge import merge_many, sum_many

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 301, 3, size, generator=generator).to(device)
    out, lse = (
        wide.transpose(1, 2)[:, :, 1:300],
        torch.randn(2, 3, 299, generator=generator).to(device) * 20,
    )
    partials = [(out, lse)]
    for number in range(1, count):
        values = torch.randn(2, 3, 299, size, generator=generator).to(device, dtype)
        partials.append(
            (values, torch.randn(2, 3, 299, generator=generator).to(device) * 20)
        )
        partials[number][1][:, :, 60 : 120 + number] = -torch.inf
        partials[number][0][:, :, 60 : 120 + number] = 0
    lse[:, :, :90] = -torch.inf  # rows that saw nothing in one partial, and in all
    out[:, :, :90] = 0
    sinks = torch.randn(3, generator=generator).to(device) if has_sinks else None
    before = wide.clone()
    expected, expected_lse = (x.double().cpu().numpy() for x in partials[0])
    for partial in partials[1:]:
        expected, expected_lse = reference.merge(
            expected, expected_lse, *(x.double().cpu().numpy() for x in partial)
        )
    if sinks is not None:
        logits = np.broadcast_to(
            sinks.double().cpu().numpy()[None, :, None], expected_lse.shape
        )
        expected, expected_lse = reference.merge(
            expected, expected_lse, np.zeros_like(expected), logits
        )
    total, plain = (
        torch.empty_like(out),
        torch.stack([one.double().cpu() for one, _ in partials]).sum(0),
    )
    sum_many(total, [one for one, _ in partials])
    assert (total.double().cpu() - plain).norm() < 1e-6 * plain.norm()
    with np.errstate(divide="ignore"):  # of the interpreter
        merge_many(out, lse, partials, sinks)
    merged, lse = out.double().cpu().numpy(), lse.cpu().numpy()
    assert np.linalg.norm(merged - expected) < 1e-6 * np.linalg.norm(expected)
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    assert np.isneginf(lse[:, :, 60:90]).all() != has_sinks
    seen = ~np.isneginf(lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=1e-6, atol=1e-6)
    assert torch.equal(wide[:, [0, 300]], before[:, [0, 300]]), (
        "rows of others are left alone"
    )
