"""Attention to k of n keys that an index chooses, of a sequence split over a ring: gather, choose, attend.

Each rank fetches what its tokens can see: the index keys, then, while the index computes, the keys of attention. In
backward it fetches the latter again, and float32 gradients go straight to their owners. No gradient reaches the index.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import LayoutName
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch.attention import op
from ringspan.torch.attention.arguments import check_differentiation
from ringspan.torch.attention.chosen import IndexInputs, all_seen, attend, attend_backward, choose
from ringspan.torch.attention.handler import handled
from ringspan.torch.attention.part import Ring, sink_gradient
from ringspan.torch.attention.request import Request, checked
from ringspan.torch.attention.windows import Row, visible
from ringspan.torch.transport.protocol import Transport

INDEX_MESSAGE, KEYS_MESSAGE = 0, MESSAGES_PER_HOP


def indexed_attention(
    q: Tensor, kv: Tensor, index: IndexInputs | None, chosen: Tensor | None, *, values: slice, scale: float, mask: Mask,
    layout: LayoutName | Layout, group: dist.ProcessGroup, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of local queries to chosen keys of all ranks; differentiable by q, kv and sinks; collective.

    q (B, H, T, D), kv (B, T, C) of all heads: a key is the first D numbers, its value in ``values``. Give an ``index``
    or what it has ``chosen`` for the same sequences; masks are causal or of documents. Returns out (B, H, T, E) in q's
    dtype, and global positions of each query's keys (B, T, k), int32, -1 for none.

    Raises:
        UnsupportedError, LayoutError, PeerMismatch: as ``ring_attention``.
    """
    keys = kv[:, None]
    k, v = keys[..., : q.shape[-1]], keys[..., values]
    request = Request(q=q, k=k, v=v, mask=mask, layout=layout, group=group, scale=scale, sinks=sinks)
    q, _, _, spec = checked(request._replace(route="all-gather"))
    out, _, found = _Indexed.apply(q, kv.to(q.dtype), sinks, index, chosen, values, spec)  # pyright: ignore
    return out, found if chosen is None else chosen


class _Indexed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, index: Any, chosen: Any, values: slice, spec: Any
    ) -> tuple[Tensor, ...]:
        check_differentiation("indexed_attention", q, kv, sinks)

        def compute() -> tuple[Tensor, ...]:
            with op.passing("indexed forward", q, kv[:, None], kv[:, None], sinks, None, spec) as (ring, _):
                return forward(ring, q, kv, sinks, index, chosen, values)

        out, lse, found = (x.detach() for x in handled(compute))
        ctx.options = values, spec
        ctx.save_for_backward(q, kv, sinks, found if chosen is None else chosen, out, lse)
        ctx.mark_non_differentiable(lse, found)
        ctx.set_materialize_grads(False)
        return out, lse, found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiation("indexed_attention", gradients[0])
        dout, (q, kv, sinks, chosen, out, lse), (values, spec) = gradients[0], ctx.saved_tensors, ctx.options
        with op.passing("indexed backward", q, kv[:, None], kv[:, None], sinks, None, spec) as (ring, _):
            dq, dkv = backward(ring, dout, q, kv, chosen, values, out, lse)
        return dq, dkv, None if sinks is None else sink_gradient(dout, out, lse, sinks), None, None, None, None


def forward(
    ring: Ring, q: Tensor, kv: Tensor, sinks: Tensor | None, index: IndexInputs | None, chosen: Any, values: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and what is chosen here: nothing if ``chosen`` is given."""
    return attend_fetched(_row_of(ring, q), ring.exchange, q, kv, sinks, index, chosen, values, ring.spec.scale)


def attend_fetched(
    row: Row, exchange: Transport, q: Tensor, kv: Tensor, sinks: Tensor | None, index: IndexInputs | None, chosen: Any,
    values: slice, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ``forward`` of a row's queries here, and of all keys that they see."""
    fetch, first, stop = visible(row)
    columns = index_keys = None
    if chosen is not None:
        columns = fetch.columns(chosen)
    elif index is not None and row.most > index.topk:
        index_keys = fetch.start(index.k, exchange, INDEX_MESSAGE)
    keys = fetch.start(kv, exchange, KEYS_MESSAGE)
    if index is not None and index_keys is not None:
        columns = choose(index._replace(k=index_keys.finish()), first, stop)
    elif index is not None:
        columns = all_seen(first, stop, index.topk).repeat(len(q), 1, 1)
    assert columns is not None, "it is chosen here, or was before"
    out, lse = attend(q, keys.finish(), columns, values, scale, sinks)
    return out, lse, fetch.at(columns) if chosen is None else columns.new_empty(0)


def _row_of(ring: Ring, q: Tensor) -> Row:
    layout, _ = ring.spec.layouts(q.shape[2], q.shape[2], ring.schedule.ranks)
    return Row(ring.spec.mask, layout, ring.schedule.rank, q.device)


def backward(
    ring: Ring, dout: Tensor, q: Tensor, kv: Tensor, chosen: Tensor, values: slice, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    fetch, _, _ = visible(_row_of(ring, q))
    keys = fetch.start(kv, ring.exchange, INDEX_MESSAGE).finish()
    dq, dkeys = attend_backward(dout, q, keys, fetch.columns(chosen), values, ring.spec.scale, out, lse)
    return dq, fetch.start_back(dkeys, q.shape[2], ring.exchange).finish().to(kv.dtype)
