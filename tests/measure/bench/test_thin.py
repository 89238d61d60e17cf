"""Attention of one row in N gives results like those of all rows, and makes a ring of it move as many bytes."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.measure.bench import context
from ringspan.measure.bench.thin import Thinned, ThinnedInPlace, thin_attention
from ringspan.torch.kernels import KERNELS
from ringspan.torch.kernels.contract import BackwardInputs
from ringspan.torch.kernels.score_mod import Scores
from ringspan.torch.transport.exchange import COUNTERS

FULL = Tile.full(0, 37, 0, 50)
CAUSAL = Tile(0, 37, 0, 37, 0, 36)


@pytest.mark.parametrize("tile", [FULL, CAUSAL, CAUSAL.mirrored(37, 37)], ids=["full", "causal", "anticausal"])
@pytest.mark.parametrize("every", [1, 4, 100])
def test_rows_get_the_result_of_the_one_before_them_that_is_computed(tile, every):
    """Of a launch without its band: that is what a row of FULL would get."""
    kernel, launch = KERNELS["cpu"], KernelLaunch.of(Tile.full(0, tile.num_rows, 0, tile.num_keys))
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 2, 4, tile.num_rows, 16, generator=generator).double()
    k, v = torch.randn(2, 2, 2, tile.num_keys, 16, generator=generator).double()
    scores = Scores(scale=0.25)
    thinned = Thinned(kernel, every)
    out, lse = kernel.forward(q, k, v, launch, scores)
    computed = torch.arange(tile.num_rows) // every * every
    gradients = thinned.backward(BackwardInputs(dout, q, k, v, out, lse), KernelLaunch.of(tile), scores)
    whole = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), launch, scores)
    mine = *thinned.forward(q, k, v, KernelLaunch.of(tile), scores), gradients[0]
    torch.testing.assert_close(mine, tuple(x[:, :, computed] for x in (out, lse, whole[0])), rtol=0, atol=1e-6)
    assert [x.shape for x in gradients] == [x.shape for x in whole]


@pytest.mark.parametrize("every", [1, 4, 100])
def test_what_is_added_in_place_is_spread_over_the_rows_too(every):
    kernel, launch = KERNELS["eager"], KernelLaunch.of(Tile.full(0, 37, 0, 50))
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 2, 4, 37, 16, generator=generator).double()
    k, v = torch.randn(2, 2, 2, 50, 16, generator=generator).double()
    scores, computed = Scores(scale=0.25), torch.arange(37) // every * every
    thinned = ThinnedInPlace(kernel, every)
    (out, lse), mine = ((torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)) for _ in range(2))
    kernel.forward_into(q, k, v, launch, scores, out, lse)
    thinned.forward_into(q, k, v, launch, scores, *mine)
    whole, gradients = ([torch.zeros_like(x) for x in (q, k, v)] for _ in range(2))
    given = BackwardInputs(dout, q, k, v, out, lse)
    kernel.backward_into(given, launch, scores, *whole)
    thinned.backward_into(given, launch, scores, *gradients)
    expected = tuple(x[:, :, computed] for x in (out, lse, whole[0]))
    torch.testing.assert_close((*mine, gradients[0]), expected, rtol=0, atol=1e-6)
    assert all(bool(x.abs().sum() > 0) for x in gradients[1:])


def traffic(mesh: DeviceMesh, every: int) -> tuple[int, int]:
    """Messages and bytes that this rank sends for a step of attention; its kernels are put back."""
    before_it = dict(KERNELS)
    before = COUNTERS.num_sends, COUNTERS.sent_bytes
    try:
        thin_attention(every)
        q, k, v = (torch.randn(1, heads, 48, 16, requires_grad=True) for heads in (4, 2, 2))
        rs.ring_attention(q, k, v, group=mesh.get_group("ring")).sum().backward()
        assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
    finally:
        KERNELS.update(before_it)
    return COUNTERS.num_sends - before[0], COUNTERS.sent_bytes - before[1]


def test_a_ring_sends_what_it_sends_for_all_rows(pool):
    whole, thinned = (pool.run(traffic, 2, every) for every in (1, 8))
    assert whole == thinned and whole[0][1] > 0


def test_it_is_refused_where_another_kernel_would_compute(monkeypatch):
    monkeypatch.setattr(context, "local_device", lambda: torch.device("cuda", 0))
    with pytest.raises(rs.ConfigError, match="--rows-in 8"):
        context.run(context.ContextCase(rows_in=8))
