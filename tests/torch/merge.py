"""The fused merge against the rule in float64, on any device."""

import numpy as np
import torch

from ringspan.core import softmax


def check_merge(dtype: torch.dtype, size: int, device: str) -> None:
    """Rows with and without keys on either side, in slices of larger tensors; neighbours must be left alone."""
    from ringspan.torch.kernels.partials.triton_merge import merge_into

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 301, 3, size, generator=generator).to(device)
    out, lse = wide.transpose(1, 2)[:, :, 1:300], torch.randn(2, 3, 299, generator=generator).to(device) * 20
    new_out = torch.randn(2, 3, 299, size, generator=generator).to(device, dtype)
    new_lse = torch.randn(2, 3, 299, generator=generator).to(device) * 20
    lse[:, :, :90] = -torch.inf  # rows that saw nothing on one side, and on both
    out[:, :, :90] = 0
    new_lse[:, :, 60:120] = -torch.inf
    new_out[:, :, 60:120] = 0
    before = wide.clone()
    expected, expected_lse = softmax.merge(*(x.double().cpu().numpy() for x in (out, lse, new_out, new_lse)))
    with np.errstate(divide="ignore"):  # of the interpreter
        merge_into(out, lse, new_out, new_lse)
    merged, lse = out.double().cpu().numpy(), lse.cpu().numpy()
    assert np.linalg.norm(merged - expected) < 1e-6 * np.linalg.norm(expected)
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse)) and np.isneginf(lse[:, :, 60:90]).all()
    np.testing.assert_allclose(lse[:, :, 90:], expected_lse[:, :, 90:], rtol=1e-6, atol=1e-6)
    assert torch.equal(wide[:, [0, 300]], before[:, [0, 300]]), "rows of others are left alone"
