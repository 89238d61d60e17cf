"""Passes that fetch all n keys of their rows at once: a row is computed once, without merges between ranks.

Groups of heads run in turn: the next group's keys travel while this one computes; in backward a group's key gradients
go straight to their owners, in float32 or as ``gradient_comm_dtype`` says.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ringspan.core.schedule.gather import Gathered
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch import kernels
from ringspan.torch.attention.block import Block, DeferredSum, GradientBlock, PackedSpec, PartialBlock
from ringspan.torch.attention.calls import calls_of
from ringspan.torch.attention.comm_dtype import decode, encode, sent_as
from ringspan.torch.attention.part import (
    Coming,
    Ring,
    accumulation_dtype,
    empty_like,
    post,
    result_for,
    run_backward,
    run_forward,
)
from ringspan.torch.kernels.partials.merge import sum_many
from ringspan.torch.kernels.partials.waiting import Waiting
from ringspan.torch.transport.clock import now
from ringspan.torch.transport.exchange import COUNTERS, HopRecord

Keys = tuple[Tensor, Tensor]
"""Gathered keys (B, G, n, D) and values (B, G, n, E), in order of position."""


def forward(
    ring: Ring, plan: Gathered, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = result_for(q, v)
    lse = torch.empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype), device=q.device)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    q, k, v = kernels.laid_out(serving, q, k, v)
    for _, heads, _, keys in _groups(ring, plan, q, k, v):
        mine = q[:, heads]
        total = PartialBlock(Block.whole(out[:, heads], lse[:, heads].unsqueeze(-1)))
        (calls,) = calls_of(ring.schedule, serving, mine, is_backward=False)
        run_forward(ring, calls, ring.schedule.rank, heads, mine, keys, total)
        del keys
        total.finish(None if sinks is None else sinks[heads])
        del total
    return out, lse


def backward(
    ring: Ring,
    plan: Gathered,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_like(q), *(empty_like(x, dtype=kv_dtype) for x in (k, v))
    dtype = accumulation_dtype(q.dtype)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    dout, q, k, v, out = kernels.laid_out(serving, dout, q, k, v, out)
    unfinished: list[Callable[[], None]] = []
    for number, heads, kv_heads, keys in _groups(ring, plan, q, k, v):
        queries = dout[:, heads], q[:, heads], out[:, heads], lse[:, heads]
        gradients = dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]
        sums = DeferredSum.of(queries[1], dtype, gradients[0])
        total = GradientBlock.deferred(*keys, dtype)
        (calls,) = calls_of(ring.schedule, serving, queries[1], is_backward=True)
        run_backward(ring, calls, ring.schedule.rank, heads, queries, keys, sums, total)
        del keys
        sums.write(slice(0, q.shape[2]), gradients[0])
        del sums
        finish = _give_back(ring, plan, number, total, gradients[1:], dtype)
        del total
        if unfinished:
            unfinished.pop()()
        unfinished.append(finish)
        del finish
    unfinished.pop()()
    return dq, dk, dv


def _groups(ring: Ring, plan: Gathered, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, slice, slice, Keys]]:
    groups = [*ring.heads(q, k)]
    coming = _fetch(ring, 0, Block.whole(*(x[:, groups[0][2]] for x in (k, v))))
    for number, heads, kv_heads in groups:
        here, coming = coming, []
        if number + 1 < len(groups):
            coming = _fetch(ring, number + 1, Block.whole(*(x[:, groups[number + 1][2]] for x in (k, v))))
        keys = _assembled(ring, plan, Block.whole(k[:, kv_heads], v[:, kv_heads]), here)
        record = None
        if COUNTERS.hops is not None:
            record = HopRecord(ring.schedule.rank, plan.num_pairs, now(k.device))
            COUNTERS.hops.append(record)
        made = [keys]
        del keys
        yield number, heads, kv_heads, made.pop()
        if record:
            record.ended = now(k.device)


def _fetch(ring: Ring, number: int, own: Block) -> list[Coming]:
    hops, comm_dtype = ring.schedule.hops, ring.spec.comm_dtype
    dtype, is_scaled = sent_as(comm_dtype, own.k.dtype)
    wanted = [(send.peer, send.ranges) for _, send in hops[0].sends if send.ranges]
    coded = encode(own, comm_dtype) if wanted else own
    packed = {ranges: coded.pack(ranges, ring.exchange.empty) for ranges in dict.fromkeys(r for _, r in wanted)}
    sends = [(peer, packed[ranges]) for peer, ranges in wanted]
    arrivals = (hop.arrives for hop in hops[1:])
    receives = [(peer, PackedSpec.of(ranges, own.k, own.v, dtype, is_scaled)) for peer, ranges in arrivals]
    return post(ring, sends, receives, MESSAGES_PER_HOP * number)


def _assembled(ring: Ring, plan: Gathered, own: Block, coming: list[Coming]) -> Keys:
    keys, values = (x.new_empty(*x.shape[:2], plan.num_keys, x.shape[3]) for x in (own.k, own.v))
    _place(plan, ring.schedule.rank, own, keys, values)
    for hop in ring.schedule.hops[1:]:
        if (block := coming.pop(0).wait()) is not None:
            _place(plan, hop.owner, decode(block, own.k.dtype), keys, values)
        del block
    return keys, values


def _place(plan: Gathered, owner: int, block: Block, keys: Tensor, values: Tensor) -> None:
    for piece in plan.of(owner):
        rows = block.rows(piece.start, piece.stop)
        keys[:, :, piece.places].copy_(block.k[:, :, rows])
        values[:, :, piece.places].copy_(block.v[:, :, rows])


def _give_back(
    ring: Ring,
    plan: Gathered,
    number: int,
    total: GradientBlock,
    gradients: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Start to send gradients of gathered keys to their owners; return a call that fills this rank's own."""
    hops, k, v = ring.schedule.hops, *gradients
    waiting = Waiting(k.shape[2])
    own = tuple(x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in gradients)
    for piece in plan.of(ring.schedule.rank):
        rows = slice(piece.start, piece.stop)
        mine = own[0][:, :, rows], own[1][:, :, rows]
        total.write(piece.places, *mine)
        waiting.add(rows, *mine)
    sends: list[tuple[int, Block]] = []
    for hop in hops[1:]:
        if hop.gradient_to_owner:
            spec = PackedSpec.of(hop.gradient_to_owner, k, v, ring.gradient_dtype(dtype))
            packed = spec.on(ring.exchange.empty(spec.buffer_spec))
            for piece in plan.of(hop.owner):
                rows = packed.rows(piece.start, piece.stop)
                total.write(piece.places, packed.k[:, :, rows], packed.v[:, :, rows])
            sends.append((hop.owner, packed))
    visitors = (hop.from_visitor for hop in hops[1:])
    receives = [(peer, PackedSpec.of(ranges, k, v, ring.gradient_dtype(dtype))) for peer, ranges in visitors]
    return partial(_finish, post(ring, sends, receives, MESSAGES_PER_HOP * number + 1), waiting, gradients)


def _finish(coming: list[Coming], waiting: Waiting, gradients: tuple[Tensor, Tensor]) -> None:
    """Add other ranks' gradients of this rank's keys to its own, and fill dk and dv."""
    for each in coming:
        if (block := each.wait()) is not None:
            for start, stop in block.ranges:
                rows = block.rows(start, stop)
                waiting.add(slice(start, stop), block.k[:, :, rows], block.v[:, :, rows])
    for rows, values in waiting.of(waiting.everything):
        for number, gradient in enumerate(gradients):
            sum_many(gradient[:, :, rows], [each[number] for each in values])
