"""A layer's attention as one operator for torch.compile: one program for all lengths, masks and routes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layer_mask import LayerMask, Segments
from ringspan.core.geometry.tree import Tree
from ringspan.core.names import BatchLayoutName
from ringspan.torch.engine.attention import op
from ringspan.torch.engine.attention.request import Request, checked, in_autocast
from ringspan.torch.engine.attention.spec import AttentionSpec

_RING: Final = torch.ops.ringspan.ring_attention.default
_RING_BACKWARD: Final = torch.ops.ringspan.ring_attention_backward.default


def layer_attention(
    asked: Request,
    lengths: Tensor | None,
    layout: BatchLayoutName,
    group: dist.ProcessGroup,
    mask: LayerMask,
) -> Tensor:
    """Compute ``ring_attention`` of sequences with ``lengths`` as ``rows_of`` takes them; None if one document."""
    q, k, v = in_autocast(asked.q, asked.k, asked.v)
    spec = AttentionSpec(
        scale=q.shape[-1] ** -0.5 if asked.scale is None else asked.scale,
        softcap=asked.softcap or 0.0,
        layout=layout,
        route=asked.route,
        sent=asked.sent,
        kernel=asked.kernel,
        group=group.group_name,
    )
    out, _ = _forward(q, k, v, asked.sinks, lengths, mask.text, str(spec))
    return out


_MASKS: Final[dict[str, LayerMask]] = {}


def note_masks(masks: Iterable[LayerMask]) -> None:
    """Keep masks of layers, which the operators find again by their texts."""
    _MASKS.update({mask.text: mask for mask in masks})


def rows_of(lengths: Tensor) -> list[Segments]:
    """Return each sequence's documents or tree.

    ``lengths`` is (B, most documents), 0 after the last one, or of trees (B, segments, 2): lengths and parents.
    """
    if lengths.ndim == 3:
        return [Tree(*map(tuple, row)) for row in lengths.mT.tolist()]
    return [tuple(length for length in row if length) for row in lengths.tolist()]


def ends_of(lengths: Tensor) -> Tensor:
    """Return the number of tokens (B, 1) in each sequence's documents or tree."""
    return (lengths if lengths.ndim == 2 else lengths[..., 0]).sum(1, keepdim=True)


def parts_of(rows: int) -> list[slice]:
    """Return each row's part of the batch; one row stands for all."""
    return [slice(None)] if rows == 1 else [slice(row, row + 1) for row in range(rows)]


@torch.library.custom_op("ringspan::layer_attention", mutates_args=(), tags=op.UNSAFE)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None, mask: str, spec: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute a layer's out and lse: one call for the batch if all sequences have one mask, else one for each."""
    parts = [
        (rows, _RING(q[rows], k[rows], v[rows], sinks, None, text))
        for rows, text in _attentions(q, k, v, sinks, lengths, mask, spec)
    ]
    return parts[0][1] if len(parts) == 1 else _joined(parts, op.fake_forward(q, k, v))


@torch.library.custom_op(
    "ringspan::layer_attention_backward", mutates_args=(), tags=op.UNSAFE
)
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None, out: Tensor,
    lse: Tensor, mask: str, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v and sinks, by the same calls as in forward; the sinks' are sums over sequences."""
    parts = [
        (
            rows,
            _RING_BACKWARD(
                dout[rows],
                q[rows],
                k[rows],
                v[rows],
                sinks,
                None,
                out[rows],
                lse[rows],
                text,
            ),
        )
        for rows, text in _attentions(q, k, v, sinks, lengths, mask, spec)
    ]
    if len(parts) == 1:
        return parts[0][1]
    dq, dk, dv, _ = op.fake_backward(dout, q, k, v, sinks)
    _joined([(rows, part[:3]) for rows, part in parts], (dq, dk, dv))
    return dq, dk, dv, torch.stack([part[3] for _, part in parts]).sum(0)


def _attentions(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None, mask: str, spec: str,
) -> Iterator[tuple[slice, str]]:  # fmt: skip
    """Yield the parts of the batch that have one mask and layout, each with the operator's spec as text.

    That is the whole batch if all its sequences have the same documents or tree, else one sequence at a time.
    """
    asked = AttentionSpec.parse(spec)
    group = op.group_of(asked.group)
    length = q.shape[2] * (1 if group is None else dist.get_world_size(group))
    found: list[Any] = [None]
    if lengths is not None:
        found = [*rows_of(lengths)]
        found = found[:1] if len(set(found)) == 1 else found
    for rows, of_row in zip(parts_of(len(found)), found, strict=True):
        layout = asked.layout
        if layout == "balanced":
            assert of_row is not None, "checked when the batch was made"
            layout = batch_layout(
                "balanced", length, dist.get_world_size(group), of_row
            )
        request = Request(
            q=q[rows],
            k=k[rows],
            v=v[rows],
            mask=_MASKS[mask].in_text(length, of_row),
            layout=layout,  # pyright: ignore[reportArgumentType]
            group=group,
            scale=asked.scale,
            softcap=asked.softcap or None,
            sinks=sinks,
            route=asked.route,
            sent=asked.sent,
            kernel=asked.kernel,
        )
        *_, full = checked(request)
        yield rows, str(replace(full, group=asked.group))


def _joined(parts: list[tuple[slice, tuple[Tensor, ...]]], whole: Any) -> Any:
    """Join results of groups of sequences, with the strides that a program expects."""
    for rows, part in parts:
        for each, of_all in zip(part, whole, strict=True):
            of_all[rows] = each
    return whole


_forward.register_fake(op.fake_forward)
_backward.register_fake(op.fake_backward)


op.register_gradient("ring_attention", _forward, 5, _backward)
_backward.register_autograd(op.refuse_again)
