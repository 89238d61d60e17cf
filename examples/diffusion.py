"""Train a diffusion transformer on videos whose tokens are split over a ring, by diffusers' own attention dispatch.

    pip install diffusers
    python examples/diffusion.py                                # one process
    torchrun --nproc-per-node 2 examples/diffusion.py           # a ring of two

A tiny Wan learns to turn noise into moving squares (flow matching). Before the first block each rank takes its part of
the tokens, and of their rotary positions; behind the last one all parts are gathered. In between, self-attention sees
all tokens through ``rs.ring_attention`` with the full mask, forward and backward; the text is short and whole on every
rank, and so is attention to it. The first step's gradients are held to those of one process.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch
from torch import Tensor
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import ringspan as rs


def tiny_wan() -> Any:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=2,
        out_channels=2,
        text_dim=16,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=64,
    )
    torch.nn.init.normal_(model.proj_out.weight, 0, 0.05)
    return model.train()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    _parallel_config: Any = None,
) -> Tensor:
    """What diffusers' dispatch calls, with (batch, tokens, heads, head size).

    Self-attention of a model on a ring says its group in the place of diffusers' own ``parallel_config``; attention to
    a text does not.
    """
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if _parallel_config is None:
        return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    out = rs.ring_attention(
        q,
        k,
        v,
        mask=rs.full(),
        layout="contiguous",
        group=_parallel_config,
        scale=scale,
    )
    return out.transpose(1, 2)


@contextmanager
def ring_backend() -> Iterator[None]:
    """Let diffusers' dispatch call ``attend`` where it would call PyTorch's attention."""
    registry, name = (
        attention_dispatch._AttentionBackendRegistry,
        attention_dispatch.AttentionBackendName.NATIVE,
    )
    before = registry._backends[name], registry._supported_arg_names[name]
    registry.register(name)(attend)
    try:
        yield
    finally:
        registry._backends[name], registry._supported_arg_names[name] = before


class Gathered(torch.autograd.Function):
    """All ranks' parts of the tokens (batch, tokens, size), in order."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        # each rank's loss depends on every part
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), 1)[
            dist.get_rank(ctx.group)
        ], None


def put_on_ring(model: Any, group: dist.ProcessGroup) -> None:
    """Split tokens before the first block, and gather them behind the last one, in order."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def mine(x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] % ranks:
            raise ValueError(
                f"{x.shape[dim]} tokens do not come out even on {ranks} ranks; choose another size"
            )
        return x.chunk(ranks, dim)[rank]

    def split(is_first: bool, _: Any, args: Any) -> Any:
        hidden, text, time, rotary = args
        return (
            (mine(hidden, 1) if is_first else hidden),
            text,
            time,
            tuple(mine(x, 1) for x in rotary),
        )

    for number, block in enumerate(model.blocks):
        block.attn1.processor._parallel_config = group
        block.register_forward_pre_hook(partial(split, number == 0))
    model.blocks[-1].register_forward_hook(
        lambda *call: Gathered.apply(call[-1], group)
    )


def batch_of(count: int, frames: int, seed: int) -> dict[str, Tensor]:
    """Squares that move over a field, the noise they are mixed with, how much of it, and a text for each field."""
    draw = torch.Generator().manual_seed(seed)
    clean = torch.zeros(count, 2, frames, 8, 8)
    start = torch.randint(5, (count, 2), generator=draw)
    for video in range(count):
        for frame in range(frames):
            top, left = ((start[video] + frame) % 5).tolist()
            clean[video, video % 2, frame, top : top + 3, left : left + 3] = 1.0
    noise = torch.randn(clean.shape, generator=draw)
    time = torch.rand(count, generator=draw)
    text = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))[
        torch.arange(count) % 2
    ]
    mixed = clean.lerp(noise, time[:, None, None, None, None])
    return {
        "mixed": mixed,
        "time": time * 1000,
        "text": text,
        "velocity": noise - clean,
    }


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    made = model(batch["mixed"], batch["time"], batch["text"], return_dict=False)[0]
    return mse_loss(made, batch["velocity"])


def gradients_on_ring(
    model: Any, batch: dict[str, Tensor], group: dist.ProcessGroup
) -> float:
    """Gradients of the whole loss, the same on every rank."""
    with ring_backend():
        loss = loss_of(model, batch)
        # Each rank has the whole loss, of which a share is its own: the gradients' sum is then that of one loss.
        (loss / dist.get_world_size(group)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a tiny Wan on moving squares, its tokens on a ring."
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--frames", type=int, default=8)
    given = parser.parse_args()
    group = rs.init_mesh(ring=int(os.environ.get("WORLD_SIZE", "1")))[
        "ring"
    ].get_group()
    model, alone = tiny_wan(), tiny_wan()
    put_on_ring(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(given.steps):
        batch = batch_of(4, given.frames, seed=step)
        losses.append(gradients_on_ring(model, batch, group))
        if step == 0:
            loss_of(alone, batch).backward()
            ours, theirs = (
                torch.cat([p.grad.flatten() for p in each.parameters()])
                for each in (model, alone)
            )
            apart = float((ours - theirs).norm() / theirs.norm())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        last = sum(losses[-5:]) / len(losses[-5:])
        print(
            f"loss {losses[0]:.3f} -> {last:.3f}; gradients within {apart:.0e} of one process"
        )
    dist.barrier()


if __name__ == "__main__":
    main()
