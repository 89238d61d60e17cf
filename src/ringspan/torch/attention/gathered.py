"""Passes that fetch all n keys of their rows at once: a row is computed once, without merges between ranks.

Groups of heads run in turn: the next group's keys travel while this one computes; in backward a group's key gradients
go straight to their owners, in float32 or as ``gradient_comm_dtype`` says.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ringspan.core.schedule.gather import Gathered, Piece
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch import kernels
from ringspan.torch.attention.block import Block, GradientBlock, PackedSpec, PartialBlock, RunningSum
from ringspan.torch.attention.calls import calls_of
from ringspan.torch.attention.comm_dtype import decode, encode, sent_as
from ringspan.torch.attention.part import (
    Coming,
    Ring,
    accumulation_dtype,
    empty_like,
    finish_keys,
    post,
    run_backward,
    run_forward,
    store,
)
from ringspan.torch.transport.clock import now
from ringspan.torch.transport.exchange import COUNTERS, HopRecord

Keys = tuple[Tensor, Tensor]
"""Gathered keys (B, G, n, D) and values (B, G, n, E), in order of position."""


def forward(
    ring: Ring, plan: Gathered, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = empty_like(q, v.shape[-1])
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
        sums = RunningSum.to_be(dq[:, heads], dtype)
        total = GradientBlock.in_transit(PackedSpec.of(((0, plan.num_keys),), *keys, dtype), ring.exchange.empty)
        (calls,) = calls_of(ring.schedule, serving, queries[1], is_backward=True)
        run_backward(ring, calls, ring.schedule.rank, heads, queries, keys, sums, total)
        del keys
        store(sums.finish(), dq[:, heads])
        del sums
        gradients = dk[:, kv_heads], dv[:, kv_heads]
        local = GradientBlock.at_owner(*gradients, dtype)
        returning = _give_back(ring, plan, number, total.finish(), local)
        del total
        if unfinished:
            unfinished.pop()()
        unfinished.append(partial(finish_keys, returning, local, gradients))
        del returning, local
    unfinished.pop()()
    return dq, dk, dv


def _groups(ring: Ring, plan: Gathered, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, slice, slice, Keys]]:
    """Yield the number, query heads, key/value heads and gathered keys of each group."""
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
    for _, start, stop, place in plan.of(owner):
        rows, there = block.rows(start, stop), slice(place, place + stop - start)
        keys[:, :, there].copy_(block.k[:, :, rows])
        values[:, :, there].copy_(block.v[:, :, rows])


def _give_back(ring: Ring, plan: Gathered, number: int, total: Block, local: GradientBlock) -> list[Coming]:
    """Add this rank's own gradients of gathered keys to ``local``, and start sending the others'."""
    hops, dtype = ring.schedule.hops, ring.gradient_dtype(total.k.dtype)
    for piece in plan.of(ring.schedule.rank):
        _, start, stop, _ = piece
        local.add(slice(start, stop), *_of_piece(total, piece))
    sends: list[tuple[int, Block]] = []
    for hop in hops[1:]:
        if hop.gradient_to_owner:
            block = PackedSpec.of(hop.gradient_to_owner, total.k, total.v, dtype)
            packed = block.on(ring.exchange.empty(block.buffer_spec))
            for piece in plan.of(hop.owner):
                _, start, stop, _ = piece
                dk, dv = _of_piece(total, piece)
                packed.k[:, :, packed.rows(start, stop)].copy_(dk)
                packed.v[:, :, packed.rows(start, stop)].copy_(dv)
            sends.append((hop.owner, packed))
    receives = [(peer, PackedSpec.of(r, total.k, total.v, dtype)) for peer, r in (h.from_visitor for h in hops[1:])]
    return post(ring, sends, receives, MESSAGES_PER_HOP * number + 1)


def _of_piece(total: Block, piece: Piece) -> tuple[Tensor, Tensor]:
    rows = slice(piece.place, piece.place + piece.stop - piece.start)
    return total.k[:, :, rows], total.v[:, :, rows]
