"""The loop that readers see first is what the operator computes."""

import numpy as np
import pytest
import torch

from ringspan.core import reference_ring
from ringspan.core.geometry.layout import Layout
from ringspan.torch.engine.attention.op import ring_attention

LENGTH = 24


def inputs(layout):
    """Each rank's q, k, v and dout, and its positions, alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, 3, LENGTH, 8, generator=generator, dtype=torch.float64)
        for _ in range(4)
    ]
    positions = [layout.positions(rank) for rank in range(layout.ranks)]
    return [
        [x[:, :, torch.from_numpy(mine)] for mine in positions] for x in whole
    ], positions


def by_operator(mesh, name):
    group = mesh["ring"].get_group()
    layout = Layout(name, LENGTH, group.size())
    parts, _ = inputs(layout)
    q, k, v, dout = (part[group.rank()].contiguous().requires_grad_() for part in parts)
    out = ring_attention(q, k, v, layout=layout, group=group)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_the_operator_computes_the_loop(pool, name):
    parts, positions = inputs(Layout(name, LENGTH, 3))
    q, k, v, dout = ([x.numpy() for x in part] for part in parts)
    out, lse = reference_ring.forward(q, k, v, positions, 8**-0.5)
    gradients = reference_ring.backward(dout, out, lse, q, k, v, positions, 8**-0.5)
    for rank, found in enumerate(pool.run(by_operator, 3, name)):
        for ours, exact in zip(found, (out[rank], *gradients[rank]), strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-11, atol=1e-13)
