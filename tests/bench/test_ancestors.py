"""The systems that ours descends from are exact: out and gradients of dense attention."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ancestors import blockwise, ring_self_attention, ulysses
from tests.pool import Pool

LIMIT = 1e-12  # float64


def problem(ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 6, 14 * ranks, 5, generator=generator, dtype=torch.float64)
        for _ in range(4)
    ]


def exact(ranks: int) -> list[Tensor]:
    *inputs, dout = problem(ranks)
    leaves = [x.requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_rank(mesh: DeviceMesh, name: str) -> list[Tensor]:
    group = mesh["ring"].get_group()
    *inputs, dout = (
        x.chunk(group.size(), 2)[group.rank()] for x in problem(group.size())
    )
    leaves = [x.contiguous().requires_grad_() for x in inputs]
    out = {"ring": ring_self_attention, "ulysses": ulysses}[name](*leaves, group=group)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize(
    ("name", "ranks"), [("ring", 2), ("ring", 3), ("ulysses", 2), ("ulysses", 3)]
)
def test_shards_are_those_of_dense_attention(pool: Pool, name: str, ranks: int):
    shards = pool.run(on_rank, ranks, name)
    for found, expected in zip(
        map(list, zip(*shards, strict=True)), exact(ranks), strict=True
    ):
        assert (torch.cat(found, 2) - expected).abs().max() < LIMIT


@pytest.mark.parametrize("block", [1, 5, 28, 64])
def test_blocks_are_dense_attention(block: int):
    *inputs, dout = problem(2)
    leaves = [x.requires_grad_() for x in inputs]
    out = blockwise(*leaves, block=block)
    for found, expected in zip(
        [out, *torch.autograd.grad(out, leaves, dout)], exact(2), strict=True
    ):
        assert (found - expected).abs().max() < LIMIT


def test_feedforwards_are_applied_to_each_block():
    *inputs, _ = problem(2)
    assert torch.equal(
        blockwise(*inputs, feedforward=torch.tanh, block=5),
        blockwise(*inputs, block=5).tanh(),
    )
