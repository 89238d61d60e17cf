"""The systems that Ring Attention descends from, as references to read, beside ours in memory and time.

    python -m benchmarks.ancestors

Causal attention of two ranks, forward and backward, on a contiguous layout (ours: zigzag). B batch, H heads, T tokens
of a rank, D head size. All of them are exact: ``tests/bench/test_ancestors.py`` compares them with dense attention.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from benchmarks.turns import timed_in_turns
from ringspan.measure.machine import allocated_bytes, describe_machine
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "ancestors-cpu.json"
RANKS, HEADS, HEAD_DIM, BLOCK, REPEATS = 2, 4, 64, 512, 3
LENGTHS: Final = (1024, 2048, 4096, 8192, 16_384)
# beyond, the scores of Ring Self-Attention alone are more than 2 GB per rank
STORES_SCORES_UP_TO: Final = 8192


class Shift(torch.autograd.Function):
    """A tensor from the rank before; in backward, its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
        ctx.group, ctx.by = group, by
        return _exchanged(x, group, by)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(dx, ctx.group, -ctx.by), None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    there, here = ((rank + step) % ranks for step in (by, -by))
    messages = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=there),
        dist.P2POp(dist.irecv, received, group=group, group_peer=here),
    ]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    return received


def ring_self_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Li et al. 2021: keys go round and leave all scores, (B, H, T, N T); then values go round. Linear in ranks, but
    still quadratic in the sequence.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    scores: list[Tensor] = []
    for hop in range(ranks):
        owner = (rank - hop) % ranks
        scores.append(
            (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
                _hidden(q, rank, owner), float("-inf")
            )
        )
        k = Shift.apply(k, group, 1) if hop + 1 < ranks else k
    weights = torch.cat(scores, -1).softmax(-1).chunk(ranks, -1)
    out = torch.zeros_like(q)
    for hop in range(ranks):
        out = out + weights[hop] @ v
        v = Shift.apply(v, group, 1) if hop + 1 < ranks else v
    return out


def _hidden(q: Tensor, rank: int, owner: int) -> Tensor:
    """Keys of an owner that are later than a rank's queries."""
    tokens = torch.arange(q.shape[2])
    return (owner * q.shape[2] + tokens)[None, :] > (rank * q.shape[2] + tokens)[
        :, None
    ]


def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feedforward: Callable[[Tensor], Tensor] = lambda x: x,
    block: int = BLOCK,
) -> Tensor:
    """Liu and Abbeel 2023, on one device: a block of queries passes all keys, then its feed-forward, before the next
    one begins. Scores are computed again in backward, so that memory is linear, but all of it is on one device.
    """

    def one(rows: Tensor, first: int) -> Tensor:
        out, lse = (
            torch.zeros_like(rows),
            torch.full((*rows.shape[:3], 1), float("-inf")),
        )
        for start in range(0, first + rows.shape[2], block):  # later blocks see nothing
            keys = slice(start, start + block)
            scores = rows @ k[:, :, keys].mT * rows.shape[-1] ** -0.5
            late = (
                start + torch.arange(scores.shape[-1])[None, :]
                > first + torch.arange(rows.shape[2])[:, None]
            )
            scores = scores.masked_fill(late, float("-inf"))
            new = scores.logsumexp(-1, keepdim=True)
            whole = torch.logaddexp(lse, new)
            out, lse = (
                (lse - whole).exp() * out + (scores - whole).exp() @ v[:, :, keys],
                whole,
            )
        return feedforward(out)

    rows = range(0, q.shape[2], block)
    return torch.cat(
        [checkpoint(one, q[:, :, i : i + block], i, use_reentrant=False) for i in rows],
        2,
    )


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Jacobs et al. 2023: tokens are traded for heads, attention is that of one device, then back."""
    ranks = dist.get_world_size(group)
    q, k, v = (_traded(x, 1, 2, ranks, group) for x in (q, k, v))  # (B, H / N, N T, D)
    return _traded(
        scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1, ranks, group
    )


def _traded(
    x: Tensor, split: int, join: int, ranks: int, group: dist.ProcessGroup
) -> Tensor:
    return torch.cat(
        _AllToAll.apply(group, *(part.contiguous() for part in x.chunk(ranks, split))),
        join,
    )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_to_all(parts, group))

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *_to_all(parts, ctx.group)


def _to_all(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    received = torch.empty(len(parts), *parts[0].shape, dtype=parts[0].dtype)
    dist.all_to_all_single(received, torch.stack(parts), group=group)
    return list(received)


def measure(length: int) -> dict[str, dict[str, float]]:
    """Seconds and most bytes beside the inputs of each, on a rank; blockwise is one process of all threads."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(4)
    ]
    local = [x.chunk(RANKS, 2)[rank].contiguous() for x in whole]
    layout = rs.Layout("zigzag", length=length, ranks=RANKS)
    ring = partial(rs.ring_attention, layout=layout, group=group)
    found: dict[str, Callable[[], Any]] = {"ringspan": partial(_both, ring, local)}
    if length <= STORES_SCORES_UP_TO:
        found["Ring Self-Attention"] = partial(
            _both, partial(ring_self_attention, group=group), local
        )
    found["Ulysses"] = partial(_both, partial(ulysses, group=group), local)
    seconds = {
        name: median(times)
        for name, times in timed_in_turns(found, REPEATS, threads=1).items()
    }
    one = {
        "blockwise, one process": partial(_both, blockwise, whole)
        if rank == 0
        else None
    }
    seconds |= {
        name: median(times)
        for name, times in timed_in_turns(one, REPEATS, threads=RANKS).items()
    }
    held = {name: float(allocated_bytes(function)) for name, function in found.items()}
    if rank == 0:
        held |= {
            name: float(allocated_bytes(function))
            for name, function in one.items()
            if function
        }
    return {
        name: {"seconds": seconds[name], "peak_bytes": each}
        for name, each in held.items()
    }


def _both(function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(function(*leaves), leaves, dout)


def run(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"length": length, "systems": measure(length)} for length in lengths]


if __name__ == "__main__":
    rows = launch(run, RANKS, LENGTHS, threads=1)[0]
    config = {
        "ranks": RANKS,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "block": BLOCK,
        "dtype": "float32",
        "mask": "causal",
    }
    facts = {
        "command": "python -m benchmarks.ancestors",
        "config": config | {"repeats": REPEATS},
    }
    RESULT.write_text(
        json.dumps({**facts, "machine": describe_machine(), "rows": rows}, indent=1)
        + "\n"
    )
    for row in rows:
        print(
            row["length"],
            {
                name: (f"{x['seconds']:.3f} s", f"{x['peak_bytes'] / 1e6:.0f} MB")
                for name, x in row["systems"].items()
            },
        )
