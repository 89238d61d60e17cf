"""The only ring loop. Layouts, masks and routes are data in the schedule; this carries it out.

Hop t: post the exchange of block t + 1, compute on block t, wait. A rank holds at most two key/value blocks, and in
backward two gradient blocks; of one group of heads at a time, so that the last gradients of a group come home while the
next one computes. B batch, H query heads, G key/value heads, T local tokens, D head size, E value head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


def empty_like(x: Tensor, size: int) -> Tensor:
    """How the operator stores a result for ``x``: with its dtype and, where it has its head size too, its strides."""
    if size == x.shape[-1]:
        return torch.empty_like(x)
    return x.new_empty((*x.shape[:-1], size))


@dataclass(frozen=True)
class Ring:
    """One rank's way through one attention: whom it meets, how they talk, the factor on the scores, and heads at a
    time.
    """

    schedule: Schedule
    exchange: Exchange
    scale: float
    head_groups: int = 1

    def heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, slice]]:
        """Number, query heads and key/value heads of each group; a key/value head stays with the queries that share
        it.
        """
        for number in range(self.head_groups):
            heads, kv_heads = (
                slice(x.shape[1] * number // self.head_groups, x.shape[1] * (number + 1) // self.head_groups)
                for x in (q, k)
            )
            yield number, heads, kv_heads


def num_head_groups(q: Tensor, k: Tensor) -> int:
    """Up to four groups on CPU, as long as every thread has a head to work on; one on a GPU, which wants large
    launches.
    """
    if q.device.type != "cpu":
        return 1
    heads = q.shape[0] * q.shape[1]
    fitting = (n for n in (4, 3, 2) if k.shape[1] % n == 0 and heads // n >= torch.get_num_threads())
    return next(fitting, 1)


def visits(ring: Ring, number: int, k: Tensor, v: Tensor) -> Iterator[tuple[Hop, Block]]:
    """Each hop with the block that is here for it; while the caller computes, the next block is on its way."""
    schedule = ring.schedule
    block = Block(((0, k.shape[2]),), k, v)
    for hop, following in zip(schedule.hops, (*schedule.hops[1:], None), strict=True):
        coming = Block.empty(following.carried if following else (), k, v)
        sends = _message(schedule.next_rank, block.pack(hop.passed_on))
        receives = _message(schedule.previous_rank, coming)
        transfer = ring.exchange.post(sends, receives, _message_number(ring, number, hop))
        yield hop, block
        transfer.wait()
        block = coming


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The local queries' part of ``softmax(scale q k^T where allowed) v`` over all keys of the ring.

    Shapes: q (B, H, T, D), k (B, G, T', D), v (B, G, T', E) -> out (B, H, T, E) in q's dtype, lse (B, H, T) in float32.
    """
    dtype = accumulation_dtype(q.dtype)
    out = empty_like(q, v.shape[-1])
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for number, heads, kv_heads in ring.heads(q, k):
        q_part, v_part = q[:, heads], v[:, kv_heads]
        partial = Partial(q_part.shape[:-1] + v.shape[-1:], dtype, q.device)
        for hop, block in visits(ring, number, k[:, kv_heads], v_part):
            for tile in hop.tiles:
                rows = q_part[:, :, tile.q0 : tile.q1]
                kernel = kernels.choose(q_part, v_part, tile)
                partial.merge(tile, *kernel.forward(rows, *block.tile(tile), tile, ring.scale))
        out[:, heads], lse[:, heads] = partial.finish()
    return out, lse


def backward(
    ring: Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the local tokens, from the GLOBAL out and lse. Gradients add up in float32 and travel so.

    A block's dk and dv follow it one hop behind; each part goes home from the last rank that adds to it.
    """
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    finish: Callable[[], None] | None = None
    for number, heads, kv_heads in ring.heads(q, k):
        queries = dout[:, heads], q[:, heads], out[:, heads], lse[:, heads]
        gradients = dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]
        following = _backward_of_heads(ring, number, queries, k[:, kv_heads], v[:, kv_heads], gradients)
        if finish:
            finish()
        finish = following
    assert finish is not None, "there is at least one group of heads"
    finish()
    return dq, dk, dv


def _backward_of_heads(
    ring: Ring,
    number: int,
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> Callable[[], None]:
    """Fill dq of some heads, and return a call that waits for what other ranks send home and fills dk and dv."""
    dout, q, out, lse = queries
    schedule, dtype = ring.schedule, accumulation_dtype(q.dtype)
    dq, home = RunningSum.to_be(gradients[0], dtype), GradientBlock.at_home(*gradients[1:], dtype)
    behind: list[tuple[Transfer, Block]] = []  # the sum of earlier visitors of the next hop's block
    returning: list[tuple[Transfer, Block]] = []  # parts of this rank's own gradient
    for hop, block in visits(ring, number, k, v):
        total = home if hop.index == 0 else GradientBlock.travelling(hop.gradient, k, v, dtype)
        for tile in hop.tiles:
            rows = slice(tile.q0, tile.q1)
            ours = dout[:, :, rows], q[:, :, rows], *block.tile(tile), out[:, :, rows], lse[:, :, rows]
            tile_dq, tile_dk, tile_dv = kernels.choose(q, v, tile).backward(*ours, tile, ring.scale)
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
        transfer = ring.exchange.post(sends, receives, _message_number(ring, number, hop) + 1)
        behind.append((transfer, coming))
        returning.append((transfer, coming_home))

    _store(dq.finish(), gradients[0])

    def finish() -> None:
        _collect(returning, home)
        total = home.finish()
        _store(total.k, gradients[1])
        _store(total.v, gradients[2])

    return finish


def _collect(transfers: list[tuple[Transfer, Block]], total: GradientBlock) -> None:
    """Wait for gradients that other ranks sent and add them."""
    for transfer, block in transfers:
        transfer.wait()
        total.add_block(block)
    transfers.clear()


def _store(total: Tensor, gradient: Tensor) -> None:
    if total is not gradient:
        gradient.copy_(total)


def _message(peer: int, block: Block) -> list[tuple[int, Tensor]]:
    """A packed block as one message; nothing when it holds nothing."""
    return [(peer, block.buffer)] if block.buffer is not None and block.ranges else []


def _message_number(ring: Ring, number: int, hop: Hop) -> int:
    return _MESSAGES_PER_HOP * (number * ring.schedule.ranks + hop.index)
