"""The ring loop over a schedule's hops, or ``gathered`` passes.

Each hop posts the exchange of the next blocks, then computes. Blocks are keys and values, or on ``pass-q`` queries,
whose partials go to the owner at once. On ``ring`` a rank holds at most two foreign key/value blocks and a copy of what
it sends, in backward also two gradient blocks, of one head group: a group's last gradients travel during the next one.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ringspan.core.geometry.ranges import Ranges
from ringspan.core.schedule.schedule import Hop, Send
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention import gathered
from ringspan.torch.engine.attention.block import (
    Block,
    GradientBlock,
    PackedSpec,
    PartialBlock,
    RunningSum,
)
from ringspan.torch.engine.attention.calls import calls_of
from ringspan.torch.engine.attention.encoding import decode, encode, sent_dtype
from ringspan.torch.engine.attention.part import (
    Coming,
    Ring,
    accumulation_dtype,
    collect,
    empty_like,
    finish_keys,
    post,
    result_for,
    run_backward,
    run_forward,
    store,
)
from ringspan.torch.engine.kernels.cuts import heads_of
from ringspan.torch.engine.transport.exchange import hop_recorded


def hops_and_blocks(ring: Ring, number: int, own: Block) -> Iterator[tuple[Hop, Block]]:
    """Yield each active hop with its block, while the following blocks are in transit."""
    under_way: dict[int, Coming] = {}
    for hop in ring.schedule.active:
        coded = under_way.pop(hop.index).wait() if hop.index in under_way else None
        block, coded = _forms(ring, own, hop, coded)
        _send_on(ring, number, own, hop, coded, under_way)
        del coded
        with hop_recorded(hop.owner, hop.num_pairs, own.k.device):
            yield hop, block
        del block


def _forms(
    ring: Ring, own: Block, hop: Hop, coded: Block | None
) -> tuple[Block, Block | None]:
    """Return a hop's block as it is computed with, and as it is sent on, given what has arrived."""
    if hop.index:
        block = own.nothing if coded is None else decode(coded, own.k.dtype)
        return block, coded
    if any(send.ranges for _, send in hop.sends):
        return own, encode(own, ring.spec.sent_as)
    return own, own


def _send_on(
    ring: Ring,
    number: int,
    own: Block,
    hop: Hop,
    coded: Block | None,
    under_way: dict[int, Coming],
) -> None:
    """Post the hops that follow a hop: parts of its block, and of the own one to ranks that it reaches straight."""
    if not hop.sends:
        return
    hops, codec = ring.schedule.hops, ring.spec.sent_as
    dtype = sent_dtype(codec, own.k.dtype)
    is_straight = any(send.ranges for send in hop.straight)
    mine = encode(own, codec) if is_straight else own
    packed: dict[Ranges, Block] = {}
    for (index, (peer, ranges)), straight in zip(hop.sends, hop.straight, strict=True):
        source, carried = hops[index].arrives
        if not (ranges or straight.ranges or carried):
            continue
        sends: list[tuple[int, Block]] = []
        if ranges:
            assert coded is not None, "what is handed on has arrived"
            if ranges not in packed:
                packed[ranges] = coded.pack(ranges, ring.exchange.empty)
            sends.append((peer, packed[ranges]))
        if straight.ranges:
            sends.append(
                (straight.peer, mine.pack(straight.ranges, ring.exchange.empty))
            )
        spec = PackedSpec.of(carried, own.k, own.v, dtype, codec.is_scaled)
        message = MESSAGES_PER_HOP * (number * len(hops) + index)
        under_way[index], *_ = post(ring, sends, [(source, spec)], message)
        del sends


def forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the local rows of ``softmax(scale q k^T where allowed) v`` over all keys of the ring.

    q (B, H, T, D), k (B, G, T', D), v (B, G, T', E), sinks (H,) -> out (B, H, T, E) like q, lse (B, H, T) float32.
    """
    if ring.schedule.gathered is not None:
        return gathered.forward(ring, q, k, v, sinks)
    dtype = accumulation_dtype(q.dtype)
    out = result_for(q, v)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    q, k, v = kernels.laid_out(serving, q, k, v)
    passes_queries = ring.schedule.passes_queries
    for number, heads, kv_heads in ring.heads(q, k):
        mine = heads_of(q, heads)
        own = (
            Block.whole(mine, mine[..., :0]),
            Block.whole(heads_of(k, kv_heads), heads_of(v, kv_heads)),
        )
        moving, staying = own if passes_queries else reversed(own)
        result = heads_of(out, heads), heads_of(lse, heads).unsqueeze(-1)
        local = PartialBlock(Block.whole(*result))
        returning: list[Coming] = []  # other ranks' partials of this rank's queries
        calls = calls_of(ring.schedule, serving, mine, is_backward=False).calls
        for hop, block in hops_and_blocks(ring, number, moving):
            queries, keys = (block, staying) if passes_queries else (staying, block)
            total, is_sent = local, passes_queries and hop.index > 0
            if is_sent:
                total = PartialBlock.in_transit(
                    PackedSpec.of(hop.gradient_to_owner, *result, dtype),
                    ring.exchange.empty,
                )
            run_forward(
                ring,
                calls[hop.index],
                hop.owner,
                heads,
                queries.k,
                (keys.k, keys.v),
                total,
            )
            if is_sent and (hop.gradient_to_owner or hop.from_visitor.ranges):
                sends = [(hop.owner, total.finish())] if hop.gradient_to_owner else []
                receives = [
                    (
                        hop.from_visitor.peer,
                        PackedSpec.of(hop.from_visitor.ranges, *result, dtype),
                    )
                ]
                message = (
                    MESSAGES_PER_HOP * (number * len(ring.schedule.hops) + hop.index)
                    + 1
                )
                coming = post(ring, sends, receives, message)
                # Merge the previous hop's partials, so that at most two blocks wait.
                collect(returning, local)
                returning += coming
                del sends
            del block, queries, keys, total  # before the next block is waited for
        collect(returning, local)
        local.finish(None if sinks is None else sinks[heads])
    return out, lse


def backward(
    ring: Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute local dq, dk and dv (``kv_dtype``, or the keys') from the GLOBAL out and lse; sums are float32.

    A block's dk and dv follow it one hop later; the last rank that adds to a part sends it to the owner.
    """
    if ring.schedule.gathered is not None:
        return gathered.backward(ring, dout, q, k, v, out, lse, kv_dtype=kv_dtype)
    dq, dk, dv = empty_like(q), empty_like(k, kv_dtype), empty_like(v, kv_dtype)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    dout, q, k, v, out = kernels.laid_out(serving, dout, q, k, v, out)
    unfinished: list[Callable[[], None]] = []
    for number, heads, kv_heads in ring.heads(q, k):
        queries = (
            heads_of(dout, heads),
            heads_of(q, heads),
            heads_of(out, heads),
            heads_of(lse, heads),
        )
        gradients = (
            heads_of(dq, heads),
            heads_of(dk, kv_heads),
            heads_of(dv, kv_heads),
        )
        keys, values = heads_of(k, kv_heads), heads_of(v, kv_heads)
        unfinished.append(
            _backward_of_heads(
                ring,
                serving,
                number,
                heads,
                queries,
                keys,
                values,
                gradients,
                unfinished,
            )
        )
    unfinished.pop()()
    return dq, dk, dv


def _backward_of_heads(
    ring: Ring, serving: tuple[str, ...], number: int, heads: slice, queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor, v: Tensor, gradients: tuple[Tensor, Tensor, Tensor], unfinished: list[Callable[[], None]],
) -> Callable[[], None]:  # fmt: skip
    """Fill dq of some heads, and return a call that finishes dk and dv.

    The call of the heads before, in ``unfinished``, runs after the first hop, while this rank's next blocks travel.
    """
    q = queries[1]
    dq = RunningSum.to_be(gradients[0], accumulation_dtype(q.dtype))
    calls = calls_of(ring.schedule, serving, q, is_backward=True).calls

    def compute(hop: Hop, block: Block, total: GradientBlock) -> None:
        run_backward(
            ring,
            calls[hop.index],
            hop.owner,
            heads,
            queries,
            (block.k, block.v),
            dq,
            total,
        )

    finish = send_gradients(
        ring, number, Block.whole(k, v), gradients[1:], compute, unfinished
    )
    store(dq.finish(), gradients[0])
    return finish


def send_gradients(
    ring: Ring, number: int, own: Block, gradients: tuple[Tensor, Tensor],
    compute: Callable[[Hop, Block, GradientBlock], None], unfinished: list[Callable[[], None]],
) -> Callable[[], None]:  # fmt: skip
    """Send each block's gradients to its owner once ``compute`` has added to them.

    Return a call that waits for the gradients of this rank's own keys and fills dk and dv.
    """
    hops, dtype = ring.schedule.hops, accumulation_dtype(own.k.dtype)
    local = GradientBlock.at_owner(*gradients, dtype)
    sent_dtype = ring.gradient_dtype(own.k.dtype)
    # The gradients of each hop's block, summed over the ranks before this one.
    behind: dict[int, Coming] = {}
    returning: list[Coming] = []  # parts of this rank's own gradient
    for hop, block in hops_and_blocks(ring, number, own):
        total = local
        if hop.index:
            total = GradientBlock.in_transit(
                PackedSpec.of(hop.gradient, own.k, own.v, dtype), ring.exchange.empty
            )
        compute(hop, block, total)
        if hop.index in behind:
            collect([behind.pop(hop.index)], total)
        source, arriving = hops[hop.gradient_next].gradient_in
        leaving = hop.gradient_on.ranges or hop.gradient_to_owner
        if leaving or arriving or hop.from_visitor.ranges:
            sends = [
                (peer, total.finish().pack(ranges, ring.exchange.empty).to(sent_dtype))
                for peer, ranges in (
                    hop.gradient_on,
                    Send(hop.owner, hop.gradient_to_owner),
                )
                if ranges
            ]
            receives = [
                (peer, PackedSpec.of(ranges, own.k, own.v, sent_dtype))
                for peer, ranges in ((source, arriving), hop.from_visitor)
            ]
            message = MESSAGES_PER_HOP * (number * len(hops) + hop.index) + 1
            coming, from_visitor = post(ring, sends, receives, message)
            if hop.gradient_next:
                behind[hop.gradient_next] = coming
            if hop.from_visitor.ranges:
                # Add those of earlier hops, so that at most two blocks wait.
                collect(returning, local)
            returning.append(from_visitor)
            del sends
        del total
        if unfinished and hop.index == 0:
            unfinished.pop()()
    return partial(finish_keys, returning, local, gradients)
