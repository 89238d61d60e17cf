"""Attention to k of n keys that an index chooses, of a sequence split over a ring: gather, choose, attend.

Each rank fetches what its tokens can see: the index keys, then, while the index computes, the keys of attention. In
backward it fetches the latter again, and float32 gradients go straight to their owners. No gradient reaches the index,
except the one of its divergence from attention, if it learns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import LayoutName
from ringspan.core.schedule.steps import MESSAGES_PER_HOP
from ringspan.torch.engine.attention import op
from ringspan.torch.engine.attention.arguments import check_differentiation
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.engine.attention.part import Ring, sink_gradient
from ringspan.torch.engine.attention.request import Request, checked
from ringspan.torch.engine.transport.protocol import Transport
from ringspan.torch.mechanisms.chosen_keys.chosen import (
    IndexInputs,
    Visible,
    attend,
    attend_backward,
    choose,
    packed,
    unpacked,
)
from ringspan.torch.mechanisms.chosen_keys.divergence import (
    Attention,
    divergence,
    divergence_backward,
)
from ringspan.torch.mechanisms.chosen_keys.windows import Fetch, Row, visible

INDEX_MESSAGE, KEYS_MESSAGE = 0, MESSAGES_PER_HOP


def indexed_attention(
    q: Tensor, kv: Tensor, index: IndexInputs | None, chosen: Tensor | None, *, values: slice, scale: float, mask: Mask,
    layout: LayoutName | Layout, group: dist.ProcessGroup, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute attention of local queries to chosen keys of all ranks; differentiable by q, kv and sinks; collective.

    q (B, H, T, D), kv (B, T, C) of all heads: a key is the first D numbers, its value in ``values``. Give an ``index``
    or what it has ``chosen`` for the same sequences; masks are causal or of documents. Returns out (B, H, T, E) in q's
    dtype; ``packed`` global positions of each query's keys (B, T, k), with k = 0 for all keys; and the local divergence
    of an index that learns, differentiable by its inputs.

    Raises:
        UnsupportedError, LayoutError, PeerMismatch: as ``ring_attention``.
    """
    keys = kv[:, None]
    k, v = keys[..., : q.shape[-1]], keys[..., values]
    request = Request(
        q=q, k=k, v=v, mask=mask, layout=layout, group=group, scale=scale, sinks=sinks
    )
    q, _, _, spec = checked(request._replace(route="all-gather"))
    inputs = (None, None, None) if index is None or index.real is None else index[:3]
    given = (q, kv.to(q.dtype), sinks, *inputs, index, chosen, values, spec)
    out, _, found, loss = _Indexed.apply(*given)  # pyright: ignore
    return out, found if chosen is None else chosen, loss


class _Indexed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        index_q: Any,
        index_k: Any,
        weights: Any,
        index: Any,
        chosen: Any,
        values: slice,
        spec: Any,
    ) -> tuple[Tensor, ...]:
        """Compute out, lse, packed positions of the chosen keys, and the divergence of an index that learns.

        ``index_q``, ``index_k`` and ``weights`` are the inputs in ``index``, given separately since autograd tracks
        only arguments. ``chosen`` are packed positions of an earlier choice.
        """
        check_differentiation("indexed_attention", q, kv, sinks)

        def compute() -> tuple[Tensor, ...]:
            given = None if chosen is None else unpacked(chosen)

            def run(ring: Ring, _: object) -> tuple[Tensor, ...]:
                out, lse, found, loss = forward(
                    ring, q, kv, sinks, index, given, values
                )
                return out, lse, packed(found, _row_of(ring, q).length), loss

            keys = kv[:, None], kv[:, None]
            return op.in_pass("indexed forward", run, q, *keys, sinks, None, spec)

        out, lse, found, loss = (x.detach() for x in handled(compute))
        ctx.options = values, spec, None if index is None else index[3:]
        chosen = found if chosen is None else chosen
        ctx.save_for_backward(q, kv, sinks, chosen, out, lse, index_q, index_k, weights)
        ctx.mark_non_differentiable(lse, found)
        ctx.set_materialize_grads(False)
        return out, lse, found, loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return gradients of q, kv, sinks and the index's three inputs, given gradients of out and the divergence."""
        (dout, _, _, dloss), (values, spec, rest) = gradients, ctx.options
        q, kv, sinks, chosen, out, lse, *inputs = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        check_differentiation("indexed_attention", dout)
        index = (
            None if inputs[0] is None or dloss is None else IndexInputs(*inputs, *rest)
        )

        def run(ring: Ring, _: object) -> Any:
            return backward(
                ring, dout, q, kv, unpacked(chosen), values, out, lse, index, dloss
            )

        keys = kv[:, None], kv[:, None]
        dq, dkv, *dindex = op.in_pass("indexed backward", run, q, *keys, sinks, None, spec)  # fmt: skip
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq, dkv, dsinks, *dindex, None, None, None, None


def forward(
    ring: Ring,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    index: IndexInputs | None,
    chosen: Any,
    values: slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, the positions that the index chooses (B, T, 0 if ``chosen`` is given), and its divergence."""
    return attend_fetched(
        _row_of(ring, q),
        ring.exchange,
        q,
        kv,
        sinks,
        index,
        chosen,
        values,
        ring.spec.scale,
    )


def attend_fetched(
    row: Row, exchange: Transport, q: Tensor, kv: Tensor, sinks: Tensor | None, index: IndexInputs | None, chosen: Any,
    values: slice, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ``forward`` for a row's local queries, over all keys that they see, fetched from their owners."""
    fetch, first, stop = visible(row)
    index_keys = None
    if index is not None and (index.real is not None or row.most > index.topk > 0):
        index_keys = fetch.start(index.k, exchange, INDEX_MESSAGE)
    keys = fetch.start(kv, exchange, KEYS_MESSAGE)
    if index is not None and index_keys is not None:
        index = index._replace(k=index_keys.finish())
    if index is None:
        columns = _columns(fetch, chosen, first, stop)
    else:
        columns = choose(index, first, stop) if index.topk else Visible(first, stop)
    attended = keys.finish()
    out, lse = attend(q, attended, columns, values, scale, sinks)
    loss = lse.new_zeros(())
    if index is not None and index.real is not None:
        loss = divergence(index, Attention(q, attended, columns, scale, lse))
    found = first.new_empty(*q.shape[:3:2], 0)
    return (
        out,
        lse,
        fetch.at(columns) if isinstance(columns, Tensor) and chosen is None else found,
        loss,
    )


def _row_of(ring: Ring, q: Tensor) -> Row:
    layout, _ = ring.spec.layouts(q.shape[2], q.shape[2], ring.schedule.ranks)
    return Row(ring.spec.mask, layout, ring.schedule.rank, q.device)


def _columns(
    fetch: Fetch, chosen: Tensor, first: Tensor, stop: Tensor
) -> Tensor | Visible:
    return fetch.columns(chosen) if chosen.shape[-1] else Visible(first, stop)


def backward(
    ring: Ring, dout: Tensor, q: Tensor, kv: Tensor, chosen: Tensor, values: slice, out: Tensor, lse: Tensor,
    index: IndexInputs | None = None, dloss: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dkv, and the gradients of queries, keys and weights of an index that learns."""
    fetch, first, stop = visible(_row_of(ring, q))
    keys = fetch.start(kv, ring.exchange, INDEX_MESSAGE)
    index_keys = (
        None if index is None else fetch.start(index.k, ring.exchange, KEYS_MESSAGE)
    )
    attention = Attention(
        q, keys.finish(), _columns(fetch, chosen, first, stop), ring.spec.scale, lse
    )
    dq, dkeys = attend_backward(
        dout, q, *attention[1:3], values, ring.spec.scale, out, lse
    )
    if index is None or index_keys is None:
        # Free the fetched keys before gradients are sent.
        del attention, keys
        return (
            dq,
            fetch.start_back(dkeys, q.shape[2], ring.exchange).finish().to(kv.dtype),
            None,
            None,
            None,
        )
    dkv = fetch.start_back(dkeys, q.shape[2], ring.exchange)
    fetched = index._replace(k=index_keys.finish())
    index_dq, index_dkeys, dweights = divergence_backward(dloss, fetched, attention)
    back = fetch.start_back(index_dkeys, q.shape[2], ring.exchange, KEYS_MESSAGE + 1)
    return (
        dq,
        dkv.finish().to(kv.dtype),
        index_dq,
        back.finish().to(index.k.dtype),
        dweights,
    )
