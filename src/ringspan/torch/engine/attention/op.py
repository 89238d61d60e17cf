"""Exact attention over a ring as an operator of torch: traceable, and its results can be kept by checkpointing."""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Never, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]

from ringspan.core.codec import Sent
from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import (
    CommDtypeName,
    GradientCommDtypeName,
    KernelName,
    LayoutName,
)
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention.arguments import (
    check_differentiation,
    is_transformed,
)
from ringspan.torch.engine.attention.handler import handled, handling
from ringspan.torch.engine.attention.part import (
    Ring,
    accumulation_dtype,
    empty_like,
    result_for,
    sink_gradient,
)
from ringspan.torch.engine.attention.prepared import prepared
from ringspan.torch.engine.attention.request import (
    Request,
    checked,
    without_autocast,
)
from ringspan.torch.engine.attention.ring import backward, forward
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.attention.ulysses import Ulysses
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.transport.agreement import agree, one_at_a_time
from ringspan.torch.engine.transport.protocol import transport_of

_Result = TypeVar("_Result")

UNSAFE: Final = (torch.Tag.cudagraph_unsafe,)
"""A replayed CUDA graph would repeat the lengths and messages of another batch: programs run the operator outside."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str | None = None,
    layout: LayoutName | Layout = "zigzag",
    key_layout: Layout | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    route: str = "ring",
    comm_dtype: CommDtypeName = "exact",
    gradient_comm_dtype: GradientCommDtypeName = "exact",
    kernel: KernelName = "auto",
) -> Tensor:
    """Compute exact attention of local queries to the keys of all ranks; differentiable and collective.

    Equals ``scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)`` on gathered tensors,
    also for autocast; a query that may see nothing gives 0.

    Args:
        q: (B, H, T, D), in the order of the layout; float32, float64 or bfloat16, float16 on CUDA.
        k: (B, G, T', D), G dividing H.
        v: (B, G, T', E).
        mask: allowed pairs of global positions, or text for ``Mask.parse``; causal when None.
        layout: how positions are split. A name means N x T tokens; pass a ``Layout`` for padding at the end.
        key_layout: of another sequence's keys (cross-attention); default: the queries'.
        group: the ring, or its 1-D mesh; default: the default group, or a single rank without torch.distributed.
        scale: factor on the scores; ``D ** -0.5`` when None.
        softcap: c > 0 turns a scaled score s into ``c tanh(s / c)`` (Gemma 2).
        slopes: (H,), float32, for ALiBi (Press et al. 2022): scores less ``slope_h |p - p'|``; not differentiated.
        sinks: logits (H,) without value in every row's softmax (gpt-oss). Sum their gradient over the ranks.
        route: ring, bidirectional, double-ring:I, all-gather, pass-q, ulysses or ulysses:U (``core.schedule.route``),
            with equal results; ``auto`` takes the quickest by ``core.schedule.choice`` and logs why.
        comm_dtype: of keys and values in messages: exact, bfloat16, float8 or int8.
        gradient_comm_dtype: of dk and dv in messages: exact (float32) or bfloat16.
        kernel: cudnn, flash, flash2, flash3, flash4, triton, cpu or eager; ``auto`` is the fastest that serves.

    Returns:
        The local part of the result (B, H, T, E), in q's dtype, or autocast's.

    Raises:
        UnsupportedError: shapes, dtypes or a device that this cannot run on, before any communication.
        LayoutError: local tensors that do not fit the layout.
        PeerMismatch: the ranks were given different things; on every rank, before any payload moves.

    Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    request = Request(
        q=q,
        k=k,
        v=v,
        mask=mask,
        layout=layout,
        key_layout=key_layout,
        group=group,
        scale=scale,
        softcap=softcap,
        slopes=slopes,
        sinks=sinks,
        route=route,
        sent=Sent(comm_dtype, gradient_comm_dtype),
        kernel=kernel,
    )
    return attend_to(request)


def attend_to(request: Request) -> Tensor:
    """Compute ``ring_attention`` with the arguments of a request."""
    q, k, v, spec = checked(request)
    out, _ = _attention(q, k, v, request.sinks, request.slopes, text_of(spec))
    return out


def text_of(spec: AttentionSpec) -> str:
    """Return a spec as an operator takes it: a constant of a program; elsewhere made once for all layers."""
    return str(spec) if torch.compiler.is_compiling() else spec.text


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor]:
    # Checked again for callers of the bare operator.
    check_differentiation("ring_attention", q, k, v, sinks)
    return handled(partial(_compute, q, k, v, sinks, slopes, AttentionSpec.parse(spec)))


def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    asked: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    def run(ring: Ring, ulysses: Ulysses | None) -> tuple[Tensor, Tensor]:
        if ulysses is None:
            return forward(ring, q, k, v, sinks)
        return ulysses.forward(ring, q, k, v, sinks)

    return in_pass("forward", run, q, k, v, sinks, slopes, asked)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, out: Tensor,
    lse: Tensor, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the operator's gradients, given out and lse of all keys."""
    inputs = dout, q, k, v, out, lse

    def run(
        ring: Ring, ulysses: Ulysses | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Before there are other gradients: it takes more memory for a moment than they do.
        dsinks = (
            q.new_empty(0) if sinks is None else sink_gradient(dout, out, lse, sinks)
        )
        if ulysses is None:
            return *backward(ring, *inputs), dsinks
        return *ulysses.backward(ring, *inputs), dsinks

    asked = AttentionSpec.parse(spec)
    return in_pass("backward", run, q, k, v, sinks, slopes, asked)


_forward_op: Final = torch.library.custom_op(
    "ringspan::ring_attention", _forward, mutates_args=(), tags=UNSAFE
)
_backward_op: Final = torch.library.custom_op(
    "ringspan::ring_attention_backward", _backward, mutates_args=(), tags=UNSAFE
)


def attend_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the operator's gradients of q, k, v and sinks; the inputs are ``_backward``'s."""
    return last_of(_backward, _backward_op)(*inputs)


def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor]:
    """Return the operator's out and lse without its handler, for callers that compute only a part of an attention."""
    with handling(lambda compute: compute()), torch.no_grad():
        return _attention(q, k, v, sinks, slopes, spec)


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return result_for(q, v), lse


@_forward_op.register_fake
def _handled_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return handled(partial(fake_forward, q, k, v))


@_backward_op.register_fake
def fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return empty_like(q), empty_like(k), empty_like(v), dsinks


def runs_plainly() -> bool:
    """Return whether nothing looks at operators now: no compiler, no mode such as a counter, and no ``torch.func``."""
    if torch.compiler.is_compiling():
        return False
    has_modes = torch._C._len_torch_dispatch_stack()  # pyright: ignore
    return not has_modes and not is_transformed()


def last_of(code: Callable[..., Any], operator: CustomOpDef) -> Callable[..., Any]:
    """Return what computes a gradient: an operator's own code, unless something looks at operators.

    Another derivative would be asked of the operator, which refuses it.
    """
    return code if not torch.is_grad_enabled() and runs_plainly() else operator


class Gradient(NamedTuple):
    """Differentiation of an operator: what its forward pass keeps, and the gradients from it."""

    save: Callable[[Any, tuple[Any, ...], tuple[Tensor, Tensor]], None]
    differentiate: Callable[..., tuple[Tensor | None, ...]]


def register_gradient(
    what: str, operator: CustomOpDef, num_tensors: int, backward: Callable[..., Any]
) -> Gradient:
    """Differentiate an operator from ``num_tensors`` tensors, then options, to (out, lse) by ``backward``.

    This maps dout, the tensors, out, lse and the options to gradients of the first tensors.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[num_tensors:]
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for lse's gradient

    def differentiate(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        check_differentiation(what, dout)
        gradients = backward(dout, *ctx.saved_tensors, *ctx.options)
        return tuple(
            x if is_needed else None
            for x, is_needed in zip_longest(gradients, ctx.needs_input_grad)
        )

    operator.register_autograd(differentiate, setup_context=save)
    return Gradient(save, differentiate)


def plain_call(
    forward: Callable[..., Any], operator: CustomOpDef, gradient: Gradient
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a call of an operator that runs ``forward``, its own code, unless something looks at operators.

    Torch's way to a custom operator takes longer than a small attention.
    """

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
            output = forward(*inputs)
            gradient.save(ctx, inputs, output)
            return output

        backward = staticmethod(gradient.differentiate)

    def call(*inputs: Any) -> tuple[Tensor, Tensor]:
        is_plain = runs_plainly() and not inputs[0].is_meta
        return Plain.apply(*inputs) if is_plain else operator(*inputs)  # pyright: ignore

    return call


def refuse_again(ctx: object, *gradients: Tensor) -> Never:
    raise UnsupportedError(
        "ring_attention is differentiated once; its gradient has no backward pass of its own"
    )


_attention: Final = plain_call(
    _forward,
    _forward_op,
    register_gradient("ring_attention", _forward_op, 5, attend_backward),
)
_backward_op.register_autograd(refuse_again)


def group_of(name: str) -> dist.ProcessGroup | None:
    """Return a group by name, None for an empty one: an operator takes only plain values."""
    return c10d._resolve_process_group(name) if name else None  # pyright: ignore


def in_pass(
    what: str,
    run: Callable[[Ring, Ulysses | None], _Result],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    spec: AttentionSpec,
) -> _Result:
    """Run this rank's part in a pass, after all ranks agree on it; without autocast, so sums stay in float32."""
    group = group_of(spec.group)
    place = (0, 1) if group is None else (group.rank(), group.size())
    found = prepared(
        what,
        place,
        q,
        k,
        v,
        spec,
        has_slopes=slopes is not None,
        has_sinks=sinks is not None,
    )
    with one_at_a_time(group), without_autocast(q):
        refusal = None
        if spec.kernel != "auto":
            scores = Scores(spec.scale, spec.softcap, slopes)
            refusal = kernels.why_not(spec.kernel, q, v, scores)
        facts = found.facts
        if refusal:
            facts = facts | {"kernel": f"{spec.kernel} ({refusal})"}
        agree(group, facts)
        if refusal:
            raise kernels.refused(spec.kernel, refusal)
        return run(*found.over(transport_of(group, found.signature), slopes, q.device))
