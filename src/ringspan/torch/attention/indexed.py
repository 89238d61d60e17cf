"""Attention to k of n keys that an index chooses, of a sequence split over a ring: gather, choose, attend.

Each rank fetches what its tokens can see: the index keys, then, while the index computes, the keys of attention. In
backward it fetches the latter again, and float32 gradients go straight to their owners. No gradient reaches the index.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.geometry.ranges import Ranges, size
from ringspan.core.names import LayoutName
from ringspan.core.schedule.schedule import Schedule
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.core.selection import seen_by
from ringspan.torch.attention import op
from ringspan.torch.attention.arguments import check_differentiation
from ringspan.torch.attention.chosen import IndexInputs, all_seen, attend, attend_backward, choose
from ringspan.torch.attention.handler import handled
from ringspan.torch.attention.part import Ring, accumulation_dtype, sink_gradient
from ringspan.torch.attention.request import Request, checked
from ringspan.torch.attention.spec import AttentionSpec
from ringspan.torch.transport.agreement import one_at_a_time
from ringspan.torch.transport.exchange import PendingReceive, TensorSpec, Transfer

INDEX_MESSAGE, KEYS_MESSAGE = 0, MESSAGES_PER_HOP


def indexed_attention(
    q: Tensor,
    kv: Tensor,
    index: IndexInputs | None,
    chosen: Tensor | None,
    *,
    values: slice,
    scale: float,
    mask: Mask,
    layout: LayoutName | Layout,
    group: dist.ProcessGroup,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of local queries to chosen keys of all ranks; differentiable by q, kv and sinks; collective.

    q (B, H, T, D), kv (B, T, C) of all heads: a key is the first D numbers, its value in ``values``. Give an ``index``
    or what it has ``chosen`` for the same sequences; masks are causal or of documents. Returns out (B, H, T, E) in q's
    dtype, and global positions of each query's keys (B, T, k), int32, -1 for none.

    Raises:
        UnsupportedError, LayoutError, PeerMismatch: as ``ring_attention``.
    """
    keys = kv[:, None]
    request = Request(q=q, k=keys, v=keys[..., values], mask=mask, layout=layout, group=group, scale=scale, sinks=sinks)
    q, keys, _, spec = checked(request._replace(route="all-gather"))
    iq, ik, weights, index_scale, topk = index or (None, None, None, 0.0, 0)
    spans = values.start, values.stop
    out, _, found = _forward(q, keys[:, 0], sinks, iq, ik, weights, chosen, index_scale, topk, *spans, str(spec))
    return out, found if chosen is None else chosen


@torch.library.custom_op("ringspan::indexed_attention", mutates_args=(), tags=op.UNSAFE)
def _forward(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    index_q: Tensor | None,
    index_k: Tensor | None,
    index_weights: Tensor | None,
    chosen: Tensor | None,
    index_scale: float,
    topk: int,
    value_start: int,
    value_stop: int,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor]:
    check_differentiation("indexed_attention", q, kv, sinks)
    index = None
    if index_q is not None and index_k is not None and index_weights is not None:
        index = IndexInputs(index_q, index_k, index_weights, index_scale, topk)
    values = slice(value_start, value_stop)
    asked = AttentionSpec.parse(spec)

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        with one_at_a_time(op.group_of(asked.group)), torch.autocast(q.device.type, enabled=False):
            ring, _ = op.prepare("indexed forward", q, kv[:, None], kv[:, None], sinks, None, asked)
            return forward(ring, q, kv, sinks, index, chosen, values)

    return handled(compute)


def forward(
    ring: Ring,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    index: IndexInputs | None,
    chosen: Tensor | None,
    values: slice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and what is chosen here: nothing if ``chosen`` is given."""
    held = _held_by(ring, q)
    columns = index_keys = None
    if chosen is not None:
        columns = held.columns(chosen)
    elif index is not None and held.most > index.topk:
        index_keys = _fetch(ring, index.k, INDEX_MESSAGE)
    keys = _fetch(ring, kv, KEYS_MESSAGE)
    if index is not None and index_keys is not None:
        columns = choose(index._replace(k=_laid_out(ring, held, index.k, index_keys)), held.first, held.stop)
    elif index is not None:
        columns = all_seen(held.first, held.stop, index.topk).repeat(len(q), 1, 1)
    assert columns is not None, "it is chosen here, or was before"
    out, lse = attend(q, _laid_out(ring, held, kv, keys), columns, values, ring.spec.scale, sinks)
    return out, lse, held.chosen(columns) if chosen is None else columns.new_empty(0)


def backward(
    ring: Ring, dout: Tensor, q: Tensor, kv: Tensor, chosen: Tensor, values: slice, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    held = _held_by(ring, q)
    keys = _laid_out(ring, held, kv, _fetch(ring, kv, INDEX_MESSAGE))
    dq, dkeys = attend_backward(dout, q, keys, held.columns(chosen), values, ring.spec.scale, out, lse)
    return dq, _given_back(ring, held, dkeys).to(kv.dtype)


@torch.library.custom_op("ringspan::indexed_attention_backward", mutates_args=(), tags=op.UNSAFE)
def _backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    chosen: Tensor,
    out: Tensor,
    lse: Tensor,
    value_start: int,
    value_stop: int,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor]:
    asked = AttentionSpec.parse(spec)
    with one_at_a_time(op.group_of(asked.group)), torch.autocast(q.device.type, enabled=False):
        ring, _ = op.prepare("indexed backward", q, kv[:, None], kv[:, None], sinks, None, asked)
        dq, dkv = backward(ring, dout, q, kv, chosen, slice(value_start, value_stop), out, lse)
        return dq, dkv, q.new_empty(0) if sinks is None else sink_gradient(dout, out, lse, sinks)


@_forward.register_fake
def _fake_forward(q: Tensor, kv: Tensor, sinks: Any, iq: Any, ik: Any, weights: Any, chosen: Any, *rest: Any) -> Any:
    _, topk, start, stop, _ = rest

    def made() -> tuple[Tensor, Tensor, Tensor]:
        shape = (0,) if chosen is not None else (len(q), q.shape[2], topk)
        lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
        return q.new_empty(*q.shape[:-1], stop - start), lse, q.new_empty(shape, dtype=torch.int32)

    return handled(made)


@_backward.register_fake
def _fake_backward(dout: Tensor, q: Tensor, kv: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(kv), q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, kv, sinks, *_, chosen, _, _, start, stop, spec = inputs
    ctx.options = start, stop, spec
    ctx.save_for_backward(q, kv, sinks, output[2] if chosen is None else chosen, *output[:2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    check_differentiation("indexed_attention", dout)
    dq, dkv, dsinks = _backward(dout, *ctx.saved_tensors, *ctx.options)
    return dq, dkv, dsinks if ctx.needs_input_grad[2] else None, *[None] * 9


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(op.refuse_again)


class _Held(NamedTuple):
    positions: Tensor
    """Increasing, int32 (n,)."""
    columns_of: dict[int, Tensor]
    """Columns of the tokens that come from each rank, its own included."""
    first: Tensor
    stop: Tensor
    """Columns [first, stop) that each local query sees, int32 (T,)."""
    most: int
    """Keys that any rank's query sees."""

    def columns(self, chosen: Tensor) -> Tensor:
        found = torch.searchsorted(self.positions, chosen, out_int32=True)
        return found.masked_fill_(chosen < 0, -1)

    def chosen(self, columns: Tensor) -> Tensor:
        found = self.positions.index_select(0, columns.clamp(min=0).flatten()).view(columns.shape)
        return found.masked_fill_(columns < 0, -1)


def _held_by(ring: Ring, q: Tensor) -> _Held:
    layout, _ = ring.spec.layouts(q.shape[2], q.shape[2], ring.schedule.ranks)
    return _held(ring.schedule, layout, ring.spec.mask, q.device)


@lru_cache(maxsize=64)
def _held(schedule: Schedule, layout: Layout, mask: str, device: torch.device) -> _Held:
    parts = {schedule.rank: layout.positions(schedule.rank)}
    for hop in schedule.hops[1:]:
        owned = layout.positions(hop.owner)
        if hop.arrives.ranges:
            parts[hop.owner] = np.concatenate([owned[start:stop] for start, stop in hop.arrives.ranges])
    positions = np.sort(np.concatenate([*parts.values()]))
    allowed = Mask.parse(mask)
    seen = seen_by(allowed, parts[schedule.rank], layout.length)
    first, stop = (np.searchsorted(positions, ends).astype(np.int32) for ends in seen)
    return _Held(
        torch.from_numpy(positions.astype(np.int32)).to(device),
        {owner: torch.from_numpy(np.searchsorted(positions, part)).to(device) for owner, part in parts.items()},
        torch.from_numpy(first).to(device),
        torch.from_numpy(stop).to(device),
        int(seen_by(allowed, np.arange(layout.length), layout.length).counts.max()),
    )


def _fetch(ring: Ring, own: Tensor, message: int) -> tuple[Transfer, list[PendingReceive]]:
    hops = ring.schedule.hops
    wanted = [(send.peer, send.ranges) for _, send in hops[0].sends if send.ranges]
    packed: dict[Ranges, Tensor] = {}
    for ranges in dict.fromkeys(ranges for _, ranges in wanted):
        packed[ranges] = ring.exchange.empty(_spec(own, ranges))
        torch.cat([own[:, start:stop] for start, stop in ranges], 1, out=packed[ranges])
    sends = [(peer, packed[ranges]) for peer, ranges in wanted]
    arriving = [hop.arrives for hop in hops[1:] if hop.arrives.ranges]
    return ring.exchange.post(sends, [(peer, _spec(own, ranges)) for peer, ranges in arriving], message)


def _spec(like: Tensor, ranges: Ranges) -> TensorSpec:
    return TensorSpec((len(like), size(ranges), like.shape[-1]), like.dtype, like.device)


def _laid_out(ring: Ring, held: _Held, own: Tensor, coming: tuple[Transfer, list[PendingReceive]]) -> Tensor:
    transfer, pending = coming
    keys = own.new_empty(len(own), len(held.positions), own.shape[-1])
    keys.index_copy_(1, held.columns_of[ring.schedule.rank], own)
    transfer.wait()
    for hop in ring.schedule.hops[1:]:
        if hop.arrives.ranges:
            keys.index_copy_(1, held.columns_of[hop.owner], pending.pop(0).read())
    return keys


def _given_back(ring: Ring, held: _Held, dkeys: Tensor) -> Tensor:
    """Send the gradients (B, n, C) of other ranks' tokens to them; return the sum of this rank's (B, T, C)."""
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, TensorSpec]] = []
    returned: list[Ranges] = []
    for hop in ring.schedule.hops[1:]:
        if hop.arrives.ranges:
            assert hop.gradient_to_owner == hop.arrives.ranges, "a gathered key is seen"
            buffer = ring.exchange.empty(_spec(dkeys, hop.arrives.ranges))
            torch.index_select(dkeys, 1, held.columns_of[hop.owner], out=buffer)
            sends.append((hop.owner, buffer))
        if hop.from_visitor.ranges:
            receives.append((hop.from_visitor.peer, _spec(dkeys, hop.from_visitor.ranges)))
            returned.append(hop.from_visitor.ranges)
    transfer, pending = ring.exchange.post(sends, receives, 1)
    total = dkeys.index_select(1, held.columns_of[ring.schedule.rank])
    transfer.wait()
    for ranges, receive in zip(returned, pending, strict=True):
        parts = receive.read().split([stop - start for start, stop in ranges], 1)
        for (start, stop), part in zip(ranges, parts, strict=True):
            total[:, start:stop] += part
    return total
