"""Passes that fetch all n keys of their rows at once: a row is computed once, without merges between ranks.

Groups of heads run in turn: the next group's keys travel while this one computes; in backward a group's key gradients
go straight to their owners, in float32 or rounded as the request says.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention.block import (
    Block,
    DeferredSum,
    GradientBlock,
    PackedSpec,
    PartialBlock,
)
from ringspan.torch.engine.attention.calls import Calls, calls_of
from ringspan.torch.engine.attention.encoding import decode, encode, sent_dtype
from ringspan.torch.engine.attention.part import (
    Coming,
    Ring,
    accumulation_dtype,
    empty_like,
    post,
    result_for,
    run_backward,
    run_forward,
)
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.engine.kernels.partials.merge import sum_many
from ringspan.torch.engine.kernels.partials.waiting import Waiting
from ringspan.torch.engine.transport.exchange import Transfer, hop_recorded

Keys = tuple[Tensor, Tensor]
"""Gathered keys (B, G, n, D) and values (B, G, n, E)."""


def forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, E) and lse (B, H, T) of local queries over all keys of the ring, fetched at once.

    Equals ``ring.forward``. Stages before the last one need only this rank's own keys, and overlap the transfer.
    """
    out = result_for(q, v)
    lse = torch.empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype), device=q.device)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    q, k, v = kernels.laid_out(serving, q, k, v)
    ring, calls = _suited(ring, serving, q, k, is_backward=False)
    for _, heads, _, group in _groups(ring, serving, q, k, v):
        mine = q[:, heads]
        total = PartialBlock(Block.whole(out[:, heads], lse[:, heads].unsqueeze(-1)))
        for stage in group.stages(calls):
            run_forward(ring, stage, ring.schedule.rank, heads, mine, group.keys, total)
        del group
        total.finish(None if sinks is None else sinks[heads])
        del total
    return out, lse


def backward(
    ring: Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return local dq, dk and dv, given out and lse over all keys, as ``ring.backward``.

    Keys are fetched again. The gradients of one head group's keys travel to their owners while the next one computes.
    """
    dq, dk, dv = empty_like(q), empty_like(k, kv_dtype), empty_like(v, kv_dtype)
    dtype = accumulation_dtype(q.dtype)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    dout, q, k, v, out = kernels.laid_out(serving, dout, q, k, v, out)
    ring, calls = _suited(ring, serving, q, k, is_backward=True)
    unfinished: list[Callable[[], None]] = []
    for number, heads, kv_heads, group in _groups(ring, serving, q, k, v):
        queries = dout[:, heads], q[:, heads], out[:, heads], lse[:, heads]
        gradients = dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]
        sums = DeferredSum.of(queries[1], dtype, gradients[0])
        total = None
        for stage in group.stages(calls):
            total = total or GradientBlock.deferred(*group.keys, dtype)
            run_backward(
                ring, stage, ring.schedule.rank, heads, queries, group.keys, sums, total
            )
        del group
        assert total is not None, "there is a stage"
        sums.write(slice(0, q.shape[2]), gradients[0])
        del sums
        finish = _give_back(ring, number, total, gradients[1:], dtype)
        del total
        if unfinished:
            unfinished.pop()()
        unfinished.append(finish)
        del finish
    unfinished.pop()()
    return dq, dk, dv


def _suited(
    ring: Ring, serving: tuple[str, ...], q: Tensor, k: Tensor, *, is_backward: bool
) -> tuple[Ring, tuple[Calls, ...]]:
    """Return the ring with its gathered keys arranged for the serving kernel, and the calls of each stage."""
    _, heads, _ = ring.heads(q, k)[0]
    found = calls_of(ring.schedule, serving, q[:, heads], is_backward=is_backward)
    return replace(ring, gathered=found.gathered), found.calls


def _groups(
    ring: Ring, serving: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[int, slice, slice, "_Group"]]:
    """Yield each head group's number, query heads, key heads and keys, after starting to fetch the next group's."""
    groups = ring.heads(q, k)
    fetched = [_Group(ring, serving, 0, k[:, groups[0][2]], v[:, groups[0][2]])]
    for number, heads, kv_heads in groups:
        for following, _, others in groups[number + 1 : number + 2]:
            fetched.append(_Group(ring, serving, following, k[:, others], v[:, others]))
        # Popped, so that the caller's ``del`` frees the keys.
        yield number, heads, kv_heads, fetched.pop(0)


class _Group:
    """Gathered keys and values of some heads; creating a group starts their transfer.

    Exact messages are slices of one buffer, token by token. Coded messages are packed, and so are all messages
    on a CPU: its kernels want a head's keys contiguous, and shared memory has its own message buffers.
    """

    def __init__(
        self, ring: Ring, serving: tuple[str, ...], number: int, k: Tensor, v: Tensor
    ) -> None:
        """Start to fetch the keys of head group ``number``, whose number is part of its messages' numbers."""
        assert ring.gathered is not None, "it is suited to a kernel"
        self._ring, self._serving, self._plan, self._own = (
            ring,
            serving,
            ring.gathered,
            Block.whole(k, v),
        )
        self._keys: Keys | None = None
        self._transfers: list[Transfer] = []
        self._coming: list[Coming] = []
        message = MESSAGES_PER_HOP * number
        has_to_convert = ring.spec.sent_as.converts(k.dtype.itemsize)
        if not has_to_convert and not rules_of(k.device).cuts_for_cores:
            self._exchange(message)
        else:
            self._coming = self._post_packed(message)

    @property
    def keys(self) -> Keys:
        assert self._keys is not None, "a stage has begun"
        # Copies both if only one of them has rows of 16 bytes.
        keys, values = kernels.laid_out(self._serving, *self._keys)
        return keys, values

    def stages(self, calls: tuple[Calls, ...]) -> Iterator[Calls]:
        """Yield the calls of each stage once its keys have arrived."""
        if self._keys is None:
            k, v = self._own.k, self._own.v
            keys, values = (
                x.new_empty(*x.shape[:2], self._plan.num_keys, x.shape[3])
                for x in (k, v)
            )
            self._keys = keys, values
            self._place(self._ring.schedule.rank, self._own)
        for stage, mine in zip(self._plan.stages, calls, strict=True):
            if stage is self._plan.stages[-1]:
                self._wait()
            with hop_recorded(
                self._ring.schedule.rank, stage.num_pairs, self._own.k.device
            ):
                yield mine

    def _exchange(self, message: int) -> None:
        """Copy own keys into one buffer, send slices of it, and receive the other ranks' keys in place."""
        k, v = self._own.k, self._own.v
        batch, heads, _, size = k.shape
        buffer = k.new_empty(self._plan.num_keys, batch * heads * (size + v.shape[3]))
        parts = buffer.split([batch * heads * size, batch * heads * v.shape[3]], 1)
        keys, values = (
            x.unflatten(1, (batch, heads, -1)).permute(1, 2, 0, 3) for x in parts
        )
        self._keys = keys, values
        self._place(self._ring.schedule.rank, self._own)
        for sides in self._plan.posts:
            sends, receives = (
                [(one.peer, buffer[one.places]) for one in side] for side in sides
            )
            transfer, _ = self._ring.exchange.post(sends, receives, message)
            self._transfers.append(transfer)

    def _post_packed(self, message: int) -> list[Coming]:
        """Send other ranks the ranges of own keys that they read, encoded once, and start to receive theirs."""
        ring, own = self._ring, self._own
        hops, codec = ring.schedule.hops, ring.spec.sent_as
        dtype = sent_dtype(codec, own.k.dtype)
        wanted = [(send.peer, send.ranges) for _, send in hops[0].sends if send.ranges]
        coded = encode(own, codec) if wanted else own
        packed = {
            ranges: coded.pack(ranges, ring.exchange.empty)
            for ranges in dict.fromkeys(r for _, r in wanted)
        }
        sends = [(peer, packed[ranges]) for peer, ranges in wanted]
        arrivals = (hop.arrives for hop in hops[1:])
        receives = [
            (peer, PackedSpec.of(ranges, own.k, own.v, dtype, codec.is_scaled))
            for peer, ranges in arrivals
        ]
        return post(ring, sends, receives, message)

    def _wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()
        for hop in self._ring.schedule.hops[1:] if self._coming else ():
            if (block := self._coming.pop(0).wait()) is not None:
                self._place(hop.owner, decode(block, self._own.k.dtype))
            del block

    def _place(self, owner: int, block: Block) -> None:
        assert self._keys is not None
        keys, values = self._keys
        for piece in self._plan.of(owner):
            rows = block.rows(piece.start, piece.stop)
            keys[:, :, piece.places].copy_(block.k[:, :, rows])
            values[:, :, piece.places].copy_(block.v[:, :, rows])


def _give_back(
    ring: Ring, number: int, total: GradientBlock, gradients: tuple[Tensor, Tensor], dtype: torch.dtype,
) -> Callable[[], None]:  # fmt: skip
    """Start to send gradients of gathered keys to their owners; return a call that fills this rank's own."""
    assert ring.gathered is not None
    hops, plan, k, v = ring.schedule.hops, ring.gathered, *gradients
    waiting = Waiting(k.shape[2])
    own = tuple(
        x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in gradients
    )
    for piece in plan.of(ring.schedule.rank):
        rows = slice(piece.start, piece.stop)
        mine = own[0][:, :, rows], own[1][:, :, rows]
        total.write(piece.places, *mine)
        waiting.add(rows, *mine)
    sends: list[tuple[int, Block]] = []
    for hop in hops[1:]:
        if hop.gradient_to_owner:
            spec = PackedSpec.of(
                hop.gradient_to_owner, k, v, ring.gradient_dtype(dtype)
            )
            packed = spec.on(ring.exchange.empty(spec.buffer_spec))
            for piece in plan.of(hop.owner):
                rows = packed.rows(piece.start, piece.stop)
                total.write(piece.places, packed.k[:, :, rows], packed.v[:, :, rows])
            sends.append((hop.owner, packed))
    visitors = (hop.from_visitor for hop in hops[1:])
    receives = [
        (peer, PackedSpec.of(ranges, k, v, ring.gradient_dtype(dtype)))
        for peer, ranges in visitors
    ]
    return partial(
        _finish,
        post(ring, sends, receives, MESSAGES_PER_HOP * number + 1),
        waiting,
        gradients,
    )


def _finish(
    coming: list[Coming], waiting: Waiting, gradients: tuple[Tensor, Tensor]
) -> None:
    """Add other ranks' gradients of this rank's keys to its own, and fill dk and dv."""
    for each in coming:
        if (block := each.wait()) is not None:
            for start, stop in block.ranges:
                rows = block.rows(start, stop)
                waiting.add(
                    slice(start, stop), block.k[:, :, rows], block.v[:, :, rows]
                )
    for rows, values in waiting.of(waiting.everything):
        for number, gradient in enumerate(gradients):
            sum_many(gradient[:, :, rows], [each[number] for each in values])
