"""The only ring loop. Layouts, masks and routes are data in the schedule; this carries it out.

Hop t: post the exchange of block t + 1, compute on block t, wait. A rank holds at most two key/value blocks, and in
backward two gradient blocks. B batch, H query heads, G key/value heads, T local tokens, D head size, E value head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.core.schedule import Hop, Schedule
from ringspan.torch import kernels
from ringspan.torch.block import Block, GradientBlock, RunningSum
from ringspan.torch.exchange import Exchange, Transfer
from ringspan.torch.softmax import Partial

_MESSAGES_PER_HOP = 2  # keys and values before the computation, gradients after it


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Partials and gradients add up in float32, or in float64 when the inputs are float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_like(x: Tensor, size: int, device: str | None = None) -> Tensor:
    """How the operator stores a result for ``x``: with its dtype and, where it has its head size too, its strides."""
    if size == x.shape[-1]:
        return torch.empty_like(x, device=device)
    return x.new_empty((*x.shape[:-1], size), device=device)


def stored_like(result: Tensor, x: Tensor) -> Tensor:
    """A result as ``empty_like`` stores it; itself when it is so already."""
    size = result.shape[-1]
    if result.dtype == x.dtype and result.stride() == empty_like(x, size, "meta").stride():
        return result
    return empty_like(x, size).copy_(result)


def visits(schedule: Schedule, k: Tensor, v: Tensor, exchange: Exchange) -> Iterator[tuple[Hop, Block]]:
    """Each hop with the block that is here for it; while the caller computes, the next block is on its way."""
    block = Block(((0, k.shape[2]),), k, v)
    for hop, following in zip(schedule.hops, (*schedule.hops[1:], None), strict=True):
        coming = Block.empty(following.carried if following else (), k, v)
        sends = _message(schedule.next_rank, block.pack(hop.passed_on))
        receives = _message(schedule.previous_rank, coming)
        transfer = exchange.post(sends, receives, _MESSAGES_PER_HOP * hop.index)
        yield hop, block
        transfer.wait()
        block = coming


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, schedule: Schedule, exchange: Exchange, scale: float
) -> tuple[Tensor, Tensor]:
    """The local queries' part of ``softmax(scale q k^T where allowed) v`` over all keys of the ring.

    Shapes: q (B, H, T, D), k (B, G, T', D), v (B, G, T', E) -> out (B, H, T, E) in q's dtype, lse (B, H, T) in float32.
    """
    partial = Partial(q.shape[:-1] + v.shape[-1:], accumulation_dtype(q.dtype), q.device)
    for hop, block in visits(schedule, k, v, exchange):
        for tile in hop.tiles:
            rows = q[:, :, tile.q0 : tile.q1]
            partial.merge(tile, *kernels.choose(q, v, tile).forward(rows, *block.tile(tile), tile, scale))
    out, lse = partial.finish()
    return stored_like(out, q), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    schedule: Schedule,
    exchange: Exchange,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the local tokens, from the GLOBAL out and lse. Gradients add up in float32 and travel so.

    A block's dk and dv follow it one hop behind; each part goes home from the last rank that adds to it.
    """
    dtype = accumulation_dtype(q.dtype)
    dq = RunningSum(q.shape, dtype, q.device)
    home = GradientBlock(((0, k.shape[2]),), k, v, dtype, travels=False)
    behind: list[tuple[Transfer, Block]] = []  # the sum of earlier visitors of the next hop's block
    returning: list[tuple[Transfer, Block]] = []  # parts of this rank's own gradient
    for hop, block in visits(schedule, k, v, exchange):
        total = home if hop.index == 0 else GradientBlock(hop.gradient, k, v, dtype, travels=True)
        for tile in hop.tiles:
            rows = slice(tile.q0, tile.q1)
            ours = dout[:, :, rows], q[:, :, rows], *block.tile(tile), out[:, :, rows], lse[:, :, rows]
            tile_dq, tile_dk, tile_dv = kernels.choose(q, v, tile).backward(*ours, tile, scale)
            dq.add(rows, tile_dq)
            total.add(tile.k0, tile.k1, tile_dk, tile_dv)
        _collect(behind, total)

        sends: list[tuple[int, Tensor]] = []
        if hop.gradient:
            sends += _message(schedule.next_rank, total.finish().pack(hop.gradient_on))
            sends += _message(hop.owner, total.finish().pack(hop.gradient_home))
        following = schedule.hops[hop.index + 1].gradient_in if hop.index + 1 < schedule.ranks else ()
        coming = Block.empty(following, k, v, dtype)
        returner, part = schedule.returns[hop.index]
        coming_home = Block.empty(part, k, v, dtype)
        receives = [*_message(schedule.previous_rank, coming), *_message(returner, coming_home)]
        transfer = exchange.post(sends, receives, _MESSAGES_PER_HOP * hop.index + 1)
        behind.append((transfer, coming))
        returning.append((transfer, coming_home))
    _collect(behind, home)
    _collect(returning, home)
    gradients = home.finish()
    return stored_like(dq.finish(), q), stored_like(gradients.k, k), stored_like(gradients.v, v)


def _collect(transfers: list[tuple[Transfer, Block]], total: GradientBlock) -> None:
    """Wait for gradients that other ranks sent and add them."""
    for transfer, block in transfers:
        transfer.wait()
        total.add_block(block)
    transfers.clear()


def _message(peer: int, block: Block) -> list[tuple[int, Tensor]]:
    """A packed block as one message; nothing when it holds nothing."""
    return [(peer, block.buffer)] if block.buffer is not None and block.ranges else []
