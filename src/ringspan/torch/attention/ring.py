"""The only ring loop; the schedule supplies layouts, masks and routes as data.

Each hop posts the exchange of the next blocks, then computes on the current one. Blocks are keys and values, or on
the route ``pass-q`` queries, whose partials go to the owner at once. On the route ``ring`` a rank holds at most two
foreign key/value blocks and a copy of what it sends, and in backward two gradient blocks, each for one head group at a
time, so that a group's last gradients travel while the next group computes.
B batch, H query heads, G key/value heads, T local tokens, D head size, E value head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.ranges import Ranges
from ringspan.core.schedule.choice import head_groups
from ringspan.core.schedule.events import MESSAGES_PER_HOP
from ringspan.core.schedule.kernel_launches import KernelLaunch
from ringspan.core.schedule.schedule import Hop, Schedule, Send
from ringspan.torch import kernels
from ringspan.torch.attention.block import Block, GradientBlock, PackedSpec, PartialBlock, RunningSum
from ringspan.torch.attention.calls import calls_of
from ringspan.torch.attention.comm_dtype import decode, encode, sent_as
from ringspan.torch.attention.spec import AttentionSpec
from ringspan.torch.kernels.contract import BackwardInputs
from ringspan.torch.kernels.device import rules_of
from ringspan.torch.kernels.memory import is_in_rows
from ringspan.torch.kernels.score_mod import Scores
from ringspan.torch.transport.clock import now
from ringspan.torch.transport.exchange import COUNTERS, HopRecord, PendingReceive, Transfer
from ringspan.torch.transport.protocol import Transport


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of partials and gradients: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_like(x: Tensor, size: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a result like ``x``, in rows, as in-place kernels need, and in x's dimension order if possible."""
    size = x.shape[-1] if size is None else size
    if size == x.shape[-1] and is_in_rows(x):
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty((*x.shape[:-1], size), dtype=dtype)


@dataclass(frozen=True)
class Ring:
    """One rank's part in an attention: schedule, communication, scores and number of heads at a time.

    ``positions`` are each rank's query and key positions, where ``scores`` needs them; ``spec`` is of the whole
    attention.
    """

    schedule: Schedule
    exchange: Transport
    scores: Scores
    spec: AttentionSpec
    head_groups: int = 1
    positions: tuple[Callable[[int], Tensor], Callable[[int], Tensor]] | None = None

    def heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, slice]]:
        """Yield each group's number, query heads and key/value heads; queries stay with their key/value head."""
        for number in range(self.head_groups):
            heads, kv_heads = (
                slice(x.shape[1] * number // self.head_groups, x.shape[1] * (number + 1) // self.head_groups)
                for x in (q, k)
            )
            yield number, heads, kv_heads

    def scores_of(self, launch: KernelLaunch, owner: int, heads: slice) -> Scores:
        """Return the scores of a launch."""
        if self.positions is None:
            return self.scores
        queries, keys = self.positions
        here = self.schedule.rank
        of_queries, of_keys = (owner, here) if self.schedule.passes_queries else (here, owner)
        return replace(
            self.scores.heads(heads),
            query_positions=queries(of_queries)[launch.q0 : launch.q1],
            key_positions=keys(of_keys)[launch.k0 : launch.k1],
        )

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.spec.gradient_comm_dtype == "bfloat16" else accumulation_dtype(dtype)


def num_head_groups(q: Tensor, k: Tensor, schedule: Schedule, blocks: int = 2) -> int:
    """Return the number of head groups to process in turn (``core.choice.head_groups``)."""
    on_cpu = rules_of(q.device).cuts_for_cores
    return head_groups(
        q.shape[0] * q.shape[1],
        k.shape[1],
        schedule.ranks,
        schedule.tile_pairs,
        on_cpu=on_cpu,
        blocks=blocks,
        at_once=torch.get_num_threads() if on_cpu else 1,
    )


class _Coming(NamedTuple):
    """A transfer, and the block that it brings to this rank, if any."""

    spec: PackedSpec
    transfer: Transfer
    receive: PendingReceive | None

    def wait(self) -> Block | None:
        """Wait for the whole transfer and return the block."""
        self.transfer.wait()
        return None if self.receive is None else self.spec.on(self.receive.read())


def hops_and_blocks(ring: Ring, number: int, own: Block) -> Iterator[tuple[Hop, Block]]:
    """Yield each hop that does something with its block, while the following blocks are in transit."""
    hops, comm_dtype = ring.schedule.hops, ring.spec.comm_dtype
    dtype, is_scaled = sent_as(comm_dtype, own.k.dtype)
    under_way: dict[int, _Coming] = {}
    for hop in ring.schedule.active:
        coded = under_way.pop(hop.index).wait() if hop.index in under_way else None
        if hop.index:
            block = own.nothing if coded is None else decode(coded, own.k.dtype)
        else:
            block, coded = own, encode(own, comm_dtype) if any(send.ranges for _, send in hop.sends) else own
        mine = encode(own, comm_dtype) if any(send.ranges for send in hop.straight) else own
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
                sends.append((straight.peer, mine.pack(straight.ranges, ring.exchange.empty)))
            spec = PackedSpec.of(carried, own.k, own.v, dtype, is_scaled)
            message = MESSAGES_PER_HOP * (number * len(hops) + index)
            under_way[index], *_ = _post(ring, sends, [(source, spec)], message)
            del sends
        del coded, mine, packed
        record = None
        if COUNTERS.hops is not None:
            record = HopRecord(hop.owner, hop.num_pairs, now(own.k.device))
            COUNTERS.hops.append(record)
        yield hop, block
        if record:
            record.ended = now(own.k.device)
        del block


def _post(
    ring: Ring, sends: Sequence[tuple[int, Block]], receives: Sequence[tuple[int, PackedSpec]], message: int
) -> list[_Coming]:
    """Start sending packed blocks and receiving others; empty blocks send no message."""
    transfer, pending = ring.exchange.post(
        [(peer, block.buffer) for peer, block in sends if block.buffer is not None],
        [(peer, spec.buffer_spec) for peer, spec in receives if spec.ranges],
        message,
    )
    arrived = iter(pending)
    return [_Coming(spec, transfer, next(arrived) if spec.ranges else None) for _, spec in receives]


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the local rows of ``softmax(scale q k^T where allowed) v`` over all keys of the ring.

    q (B, H, T, D), k (B, G, T', D), v (B, G, T', E), sinks (H,) -> out (B, H, T, E) in q's dtype, lse (B, H, T)
    float32.
    """
    dtype = accumulation_dtype(q.dtype)
    out = empty_like(q, v.shape[-1])
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    q, k, v = kernels.laid_out(serving, q, k, v)
    passes_queries = ring.schedule.passes_queries
    for number, heads, kv_heads in ring.heads(q, k):
        mine = q[:, heads]
        own = Block.whole(mine, mine[..., :0]), Block.whole(k[:, kv_heads], v[:, kv_heads])
        moving, staying = own if passes_queries else reversed(own)
        partial = out[:, heads], lse[:, heads].unsqueeze(-1)
        local = PartialBlock(Block.whole(*partial))
        returning: list[_Coming] = []  # what other ranks made of this rank's queries
        calls = calls_of(ring.schedule, serving, mine, is_backward=False)
        for hop, block in hops_and_blocks(ring, number, moving):
            queries, keys = (block, staying) if passes_queries else (staying, block)
            total, is_sent = local, passes_queries and hop.index > 0
            if is_sent:
                total = PartialBlock.in_transit(
                    PackedSpec.of(hop.gradient_to_owner, *partial, dtype), ring.exchange.empty
                )
            kernel, launches = calls[hop.index]
            for launch, rows, columns, sums in launches:
                here, there = queries.k[:, :, rows], (keys.k[:, :, columns], keys.v[:, :, columns])
                scores = ring.scores_of(launch, hop.owner, heads)
                if kernel.adds_in_place is True:
                    kernel.forward_into(here, *there, launch, scores, *total.running(sums))
                else:
                    total.add(sums, *kernel.forward(here, *there, launch, scores))
                del here, there
            if is_sent and (hop.gradient_to_owner or hop.from_visitor.ranges):
                sends = [(hop.owner, total.finish())] if hop.gradient_to_owner else []
                receives = [(hop.from_visitor.peer, PackedSpec.of(hop.from_visitor.ranges, *partial, dtype))]
                message = MESSAGES_PER_HOP * (number * len(ring.schedule.hops) + hop.index) + 1
                coming = _post(ring, sends, receives, message)
                _collect(returning, local)  # of the hop before: no more than two wait
                returning += coming
                del sends
            del block, queries, keys, total  # before the next block is waited for
        _collect(returning, local)
        local.finish(None if sinks is None else sinks[heads])
    return out, lse


def backward(
    ring: Ring,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute local dq, dk and dv from the GLOBAL out and lse; gradients add up and travel in float32.

    A block's dk and dv follow it one hop later; the last rank that adds to a part sends it to the owner. They are
    returned in ``kv_dtype``, the keys' dtype if None.
    """
    dq, dk, dv = empty_like(q), *(empty_like(x, dtype=kv_dtype) for x in (k, v))
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    dout, q, k, v, out = kernels.laid_out(serving, dout, q, k, v, out)
    unfinished: list[Callable[[], None]] = []
    for number, heads, kv_heads in ring.heads(q, k):
        queries = dout[:, heads], q[:, heads], out[:, heads], lse[:, heads]
        gradients = dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]
        keys, values = k[:, kv_heads], v[:, kv_heads]
        unfinished.append(
            _backward_of_heads(ring, serving, number, heads, queries, keys, values, gradients, unfinished)
        )
    unfinished.pop()()
    return dq, dk, dv


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the local ``-sum(exp(sink - lse) sum(dout * out))``, of shape (H,)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    delta = delta.masked_fill_((out == 0).all(-1), 0)  # rows without keys: padding, whose dout may be anything
    base = lse.masked_fill(lse == -torch.inf, 0)  # a row without keys whose sink is -inf has no share to give
    return -((sinks.to(lse.dtype)[:, None] - base).exp_() * delta).sum((0, 2)).to(sinks.dtype)


def _backward_of_heads(
    ring: Ring,
    serving: tuple[str, ...],
    number: int,
    heads: slice,
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    unfinished: list[Callable[[], None]],
) -> Callable[[], None]:
    """Fill dq of some heads; return a call that awaits other ranks' contributions and fills dk and dv.

    ``unfinished`` is that call for the previous heads; it runs after the first hop, which frees their sums early.
    """
    dout, q, out, lse = queries
    hops, dtype = ring.schedule.hops, accumulation_dtype(q.dtype)
    dq, local = RunningSum.to_be(gradients[0], dtype), GradientBlock.at_owner(*gradients[1:], dtype)
    sent_dtype = ring.gradient_dtype(q.dtype)
    behind: dict[int, _Coming] = {}  # by hop, the sum over the earlier ranks of its block
    returning: list[_Coming] = []  # parts of this rank's own gradient
    calls = calls_of(ring.schedule, serving, q, is_backward=True)
    for hop, block in hops_and_blocks(ring, number, Block.whole(k, v)):
        total = local
        if hop.index:
            total = GradientBlock.in_transit(PackedSpec.of(hop.gradient, k, v, dtype), ring.exchange.empty)
        kernel, launches = calls[hop.index]
        for launch, rows, columns, sums in launches:
            keys = block.k[:, :, columns], block.v[:, :, columns]
            ours = BackwardInputs(dout[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], lse[:, :, rows])
            scores = ring.scores_of(launch, hop.owner, heads)
            if kernel.adds_in_place is True:
                running = dq.running(rows), *total.running(sums)
                kernel.backward_into(ours, launch, scores, *running)
                del ours, keys, running
                continue
            new_dq, new_dk, new_dv = kernel.backward(ours, launch, scores)
            dq.add(rows, new_dq)
            total.add(sums, new_dk, new_dv)
            del ours, keys, new_dq, new_dk, new_dv  # before the next ones are made
        if hop.index in behind:
            _collect([behind.pop(hop.index)], total)
        sends = [
            (peer, total.finish().pack(ranges, ring.exchange.empty).to(sent_dtype))
            for peer, ranges in (hop.gradient_on, Send(hop.owner, hop.gradient_to_owner))
            if ranges
        ]
        source, arriving = hops[hop.gradient_next].gradient_in
        receives = [
            (peer, PackedSpec.of(ranges, k, v, sent_dtype)) for peer, ranges in ((source, arriving), hop.from_visitor)
        ]
        if sends or arriving or hop.from_visitor.ranges:
            message = MESSAGES_PER_HOP * (number * len(hops) + hop.index) + 1
            coming, from_visitor = _post(ring, sends, receives, message)
            if hop.gradient_next:
                behind[hop.gradient_next] = coming
            if hop.from_visitor.ranges:
                _collect(returning, local)  # of the hops before: no more than two wait
            returning.append(from_visitor)
        del total, sends
        if unfinished and hop.index == 0:
            unfinished.pop()()

    _store(dq.finish(), gradients[0])

    def finish() -> None:
        _collect(returning, local)
        total = local.finish()
        _store(total.k, gradients[1])
        _store(total.v, gradients[2])

    return finish


def _collect(coming: list[_Coming], total: GradientBlock | PartialBlock) -> None:
    """Wait for gradients or partials from other ranks and add them."""
    while coming:
        if (block := coming.pop(0).wait()) is not None:
            total.add_block(block)


def _store(total: Tensor, gradient: Tensor) -> None:
    if total is not gradient:
        gradient.copy_(total)
