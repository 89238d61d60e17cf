"""The one public attention: exact attention of a sequence that is split over a ring, as a custom operator.

Being an operator, it traces under FakeTensor and torch.compile without communicating, and activation checkpointing can
name it to keep its result. B batch, H query heads, G key/value heads, T local tokens, D head size, E value head size.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.layout import Layout, LayoutName
from ringspan.core.mask import Mask, causal
from ringspan.core.schedule import Schedule, plan
from ringspan.torch.exchange import Exchange, agree
from ringspan.torch.ring import Ring, accumulation_dtype, backward, empty_like, forward, num_head_groups


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str | None = None,
    layout: LayoutName | Layout = "zigzag",
    key_layout: Layout | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    route: str = "ring",
) -> Tensor:
    """Exact attention of the local queries to the keys of all ranks; differentiable. Every rank of the group calls it
    alike.

    On the gathered tensors it equals, for GQA too,
    ``scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)``; a query that may see
    nothing gives 0.

    Args:
        q: local queries (B, H, T, D), in the order of the layout. float32, float64 or bfloat16; float16 on CUDA.
        k: local keys (B, G, T', D), G dividing H; they travel unrepeated.
        v: local values (B, G, T', E).
        mask: which pairs of global positions are allowed; causal when None. Text is read by ``Mask.parse``.
        layout: how positions are split over the ring. A name means that the sequence is N x T tokens long; pass a
            ``Layout`` when its end is padding that no query may see.
        key_layout: where the keys live when they are another sequence (cross-attention); default: as the queries.
        group: the ring; the default group when None, a single rank when torch.distributed is not initialised.
        scale: factor on the scores; ``D ** -0.5`` when None.
        route: the order in which blocks visit ranks.

    Returns:
        The local part of the result (B, H, T, E), in q's dtype.

    Raises:
        UnsupportedError: shapes, dtypes or a device that this cannot run on, before any communication.
        LayoutError: local tensors that do not fit the layout.
        PeerMismatch: the ranks were given different things; on every rank, before any payload moves.

    Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    check_tensors(q, k, v)
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    ranks = dist.get_world_size(group) if group is not None else 1
    if isinstance(layout, str):
        layout = Layout(layout, ranks * q.shape[2], ranks)
        if key_layout is None and k.shape[2] != q.shape[2]:
            key_layout = Layout(layout.name, ranks * k.shape[2], ranks)
    _check_layout("queries", layout, ranks, q.shape[2])
    _check_layout("keys", key_layout or layout, ranks, k.shape[2])
    mask = causal() if mask is None else Mask.parse(mask) if isinstance(mask, str) else mask
    out, _ = _forward(
        q,
        k,
        v,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        mask.spec,
        layout.name,
        layout.length,
        (key_layout or layout).length,
        route,
        group.group_name if group is not None else "",
    )
    return out


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what no kernel computes, naming the value."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise UnsupportedError(f"{name} must be (batch, heads, tokens, head_dim), got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape:
            raise UnsupportedError(f"{name} is empty: its shape is {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; make them alike"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise UnsupportedError(
            f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; batch must agree, "
            "q and k in head_dim, k and v in heads and tokens"
        )
    if q.shape[1] % k.shape[1]:
        raise UnsupportedError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")
    if q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise UnsupportedError(f"dtype {q.dtype} is not supported; use float32 or bfloat16")
    if q.dtype == torch.float16 and q.device.type == "cpu":
        raise UnsupportedError("float16 on CPU is not supported; use float32 or bfloat16")


def _check_layout(what: str, layout: Layout, ranks: int, tokens: int) -> None:
    if layout.ranks != ranks:
        raise LayoutError(f"the layout of the {what} is for {layout.ranks} ranks, the ring has {ranks}")
    if layout.tokens_per_rank != tokens:
        hint = "; zigzag needs an even number of local tokens" if layout.name == "zigzag" and tokens % 2 else ""
        raise LayoutError(
            f"{what}: {tokens} local tokens, but {layout.name} over {ranks} ranks for {layout.length} tokens "
            f"holds {layout.tokens_per_rank} a rank{hint}; pad with rs.shard or rs.shard_batch"
        )


@torch.library.custom_op("ringspan::ring_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: str,
    layout: str,
    length: int,
    key_length: int,
    route: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    return forward(_prepare("forward", q, k, v, scale, mask, layout, length, key_length, route, group), q, k, v)


@torch.library.custom_op("ringspan::ring_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: str,
    layout: str,
    length: int,
    key_length: int,
    route: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _prepare("backward", q, k, v, scale, mask, layout, length, key_length, route, group)
    return backward(ring, dout, q, k, v, out, lse)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return empty_like(q, v.shape[-1]), lse


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _backward(dout, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None for _ in ctx.options))


_forward.register_autograd(_differentiate, setup_context=_save)


def _prepare(
    what: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: str,
    layout: str,
    length: int,
    key_length: int,
    route: str,
    group: str,
) -> Ring:
    """This rank's part in a pass on which all ranks agree."""
    # The operator's arguments are plain values, so a group is a name; torch's own functional collectives look it up
    # alike.
    ring_group = c10d._resolve_process_group(group) if group else None  # pyright: ignore
    ranks, rank = (dist.get_world_size(ring_group), dist.get_rank(ring_group)) if ring_group is not None else (1, 0)
    facts = {
        "queries": tuple(q.shape),
        "keys": tuple(k.shape),
        "values": tuple(v.shape),
        "dtype": str(q.dtype),
        "layout": f"{layout} over {ranks} ranks for {length} tokens and {key_length} keys",
        "mask": mask,
        "route": route,
    }
    agree(ring_group, facts)
    schedule = _schedule(layout, length, key_length, ranks, mask, rank, route)
    return Ring(schedule, Exchange(ring_group, f"{what} {facts}"), scale, num_head_groups(q, k))


@lru_cache(maxsize=64)
def _schedule(layout: Any, length: int, key_length: int, ranks: int, mask: str, rank: int, route: str) -> Schedule:
    queries, keys = Layout(layout, length, ranks), Layout(layout, key_length, ranks)
    return plan(queries, Mask.parse(mask), rank, keys, route)
