"""Attention to keys and values that are expanded from latents where these arrive (multi-head latent attention).

Latents and the rotary part that all heads share travel as keys and values do on any route that sends these; of an
expanded block one group of heads exists at once. In backward it is expanded again, and the gradients of latents travel.
H heads, R numbers of a latent, P of the rotary part, n and v of a head's key (without it) and value.
"""

from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import Hop
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention import op
from ringspan.torch.engine.attention.arguments import check_differentiation
from ringspan.torch.engine.attention.block import (
    Block,
    GradientBlock,
    PartialBlock,
    RunningSum,
)
from ringspan.torch.engine.attention.calls import calls_of
from ringspan.torch.engine.attention.handler import handled
from ringspan.torch.engine.attention.part import (
    Ring,
    accumulation_dtype,
    empty_like,
    result_for,
    run_backward,
    run_forward,
    sink_gradient,
    store,
)
from ringspan.torch.engine.attention.request import Request, checked, in_autocast
from ringspan.torch.engine.attention.ring import hops_and_blocks, send_gradients
from ringspan.torch.engine.attention.spec import AttentionSpec


class Expansion:
    """The matrix (H, n + v, R) that expands latents into the keys and values of heads."""

    def __init__(self, q: Tensor, rotary: Tensor, weight: Tensor) -> None:
        self.weight, self._nope = weight, q.shape[-1] - rotary.shape[-1]

    def like(self, q: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors of the shapes of all keys and values, without memory."""
        shape, number = (*q.shape[:2], latents.shape[2]), latents.new_empty(())
        return number.expand(*shape, q.shape[-1]), number.expand(
            *shape, self.weight.shape[1] - self._nope
        )

    def of(
        self, heads: slice, block: Block, serving: tuple[str, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return a block's keys (B, h, T, n + P) and values (B, h, T, v) of some heads, as kernels can read them."""
        matrix = self.weight[heads]
        expanded = (
            F.linear(block.k[:, 0], matrix.flatten(0, 1))
            .unflatten(-1, matrix.shape[:2])
            .transpose(1, 2)
        )
        rotary = block.v.expand(-1, len(matrix), -1, -1)
        joined = torch.cat((expanded[..., : self._nope], rotary), -1)
        keys, values = kernels.laid_out(serving, joined, expanded[..., self._nope :])
        return keys, values

    def backward(
        self,
        heads: slice,
        latents: Tensor,
        dkeys: Tensor,
        dvalues: Tensor,
        dweight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of latents (B, 1, T, R) and rotary part; add the gradient of some heads' weights."""
        gradient = (
            torch.cat((dkeys[..., : self._nope], dvalues), -1)
            .transpose(1, 2)
            .flatten(2)
        )
        if dweight is not None:
            dweight[heads] += (
                gradient.flatten(0, 1).mT @ latents.flatten(0, 1)
            ).view_as(dweight[heads])
        drotary = dkeys[..., self._nope :].sum(
            1, keepdim=True, dtype=accumulation_dtype(dkeys.dtype)
        )
        return (gradient @ self.weight[heads].flatten(0, 1))[:, None], drotary


def latent_attention(request: Request, weight: Tensor) -> Tensor:
    """Compute ``ring_attention`` of keys and values that are expanded from latents; differentiable and collective.

    Args:
        request: q (B, H, T, n + P), as ``k`` the latents (B, 1, T, R), as ``v`` the rotary part (B, 1, T, P); any route
            but ``pass-q`` and Ulysses; all-gather and ``auto`` take the ring.
        weight: (H, n + v, R); a head's key is the first n numbers of its product with a latent, then the rotary part.

    Returns:
        The local part of the result (B, H, T, v).

    Raises:
        UnsupportedError, LayoutError, PeerMismatch: as ``ring_attention``, and for a route that carries no latents.
    """
    q, latents, rotary, weight = in_autocast(request.q, request.k, request.v, weight)
    k, v = Expansion(q, rotary, weight).like(q, latents)
    route = "ring" if request.route in ("auto", "all-gather") else request.route
    *_, spec = checked(request._replace(q=q, k=k, v=v, route=route))
    ranks = dist.get_world_size(op.group_of(spec.group)) if spec.group else 1
    if not Route.parse(spec.route, ranks).carries_latents:
        raise UnsupportedError(
            f"route {spec.route!r} does not carry latents; expand keys and values, or use ring"
        )
    if request.slopes is not None:
        raise UnsupportedError(
            "slopes are not applied to keys that are expanded from latents; leave them out"
        )
    text = op.text_of(spec)
    out, _ = _attention(q, latents, rotary, weight, request.sinks, text)
    return out


def _forward(
    q: Tensor,
    latents: Tensor,
    rotary: Tensor,
    weight: Tensor,
    sinks: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor]:
    """Compute the operator's out (B, H, T, v) and lse (B, H, T), in one pass that a handler may keep."""
    check_differentiation("latent_attention", q, latents, rotary, weight, sinks)
    asked, expansion = AttentionSpec.parse(spec), Expansion(q, rotary, weight)

    def run(ring: Ring, _: object) -> tuple[Tensor, Tensor]:
        return forward(ring, q, Block.whole(latents, rotary), expansion, sinks)

    like = expansion.like(q, latents)
    given = q, *like, sinks, None, asked
    return handled(partial(op.in_pass, "forward of latents", run, *given))


def _backward(
    dout: Tensor, q: Tensor, latents: Tensor, rotary: Tensor, weight: Tensor, sinks: Tensor | None, out: Tensor,
    lse: Tensor, trains_weight: bool, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, latents, rotary part, weight and sinks, given out and lse of all keys.

    The weight's and the sinks' are this rank's summands; both are empty tensors if they are not needed.
    """
    asked, expansion = AttentionSpec.parse(spec), Expansion(q, rotary, weight)

    def run(ring: Ring, _: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dsinks = (
            q.new_empty(0) if sinks is None else sink_gradient(dout, out, lse, sinks)
        )
        queries, own = (dout, q, out, lse), Block.whole(latents, rotary)
        return *backward(
            ring, queries, own, expansion, trains_weight=trains_weight
        ), dsinks

    like = expansion.like(q, latents)
    return op.in_pass("backward of latents", run, q, *like, sinks, None, asked)


_forward_op: Final = torch.library.custom_op(
    "ringspan::latent_attention", _forward, mutates_args=(), tags=op.UNSAFE
)
_backward_op: Final = torch.library.custom_op(
    "ringspan::latent_attention_backward", _backward, mutates_args=(), tags=op.UNSAFE
)


def forward(
    ring: Ring, q: Tensor, own: Block, expansion: Expansion, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse as ``ringspan.torch.engine.attention.ring.forward``.

    One walk over the hops serves all heads.
    """
    k, v = expansion.like(q, own.k)
    out = result_for(q, v)
    lse = torch.empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype), device=q.device)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    (q,) = kernels.laid_out(serving, q)
    groups = [heads for _, heads, _ in ring.heads(q, k)]
    totals = [
        PartialBlock(Block.whole(out[:, heads], lse[:, heads].unsqueeze(-1)))
        for heads in groups
    ]
    calls = calls_of(ring.schedule, serving, q[:, groups[0]], is_backward=False).calls
    for hop, block in hops_and_blocks(ring, 0, own):
        for heads, total in (
            zip(groups, totals, strict=True) if calls[hop.index][1] else ()
        ):
            keys = expansion.of(heads, block, serving)
            run_forward(
                ring, calls[hop.index], hop.owner, heads, q[:, heads], keys, total
            )
            del keys  # before the next heads'
        del block
    for heads, total in zip(groups, totals, strict=True):
        total.finish(None if sinks is None else sinks[heads])
    return out, lse


def backward(
    ring: Ring, queries: tuple[Tensor, Tensor, Tensor, Tensor], own: Block, expansion: Expansion, *,
    trains_weight: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, latents, rotary part and weight (an empty tensor if it is frozen).

    ``queries`` are dout, q, out and lse. The weight's gradient covers this rank's queries: sum it over all ranks.
    """
    dout, q, out, lse = queries
    dtype, weight = accumulation_dtype(q.dtype), expansion.weight
    dq, dlatents, drotary = (empty_like(x) for x in (q, own.k, own.v))
    dweight = torch.zeros_like(weight, dtype=dtype) if trains_weight else None
    k, v = expansion.like(q, own.k)
    serving = kernels.serving(ring.spec.kernel, q, v, ring.scores)
    dout, q, out = kernels.laid_out(serving, dout, q, out)
    groups = [heads for _, heads, _ in ring.heads(q, k)]
    sums = [RunningSum.to_be(dq[:, heads], dtype) for heads in groups]
    calls = calls_of(ring.schedule, serving, q[:, groups[0]], is_backward=True).calls

    def compute(hop: Hop, block: Block, total: GradientBlock) -> None:
        """Add the gradients of a block's latents and rotary part to ``total``, and of local queries to their sums.

        One group of heads is expanded at a time, so that keys and values of all heads never exist together.
        """
        if not calls[hop.index][1]:
            return
        latents = torch.cat(
            [block.k[:, 0, block.rows(*ends)] for ends in total.ranges], 1
        )
        everything = slice(0, latents.shape[1])
        for heads, dq_sum in zip(groups, sums, strict=True):
            keys = expansion.of(heads, block, serving)
            made = GradientBlock.deferred(
                keys[0][:, :, everything], keys[1][:, :, everything], dtype
            )
            mine = dout[:, heads], q[:, heads], out[:, heads], lse[:, heads]
            run_backward(
                ring, calls[hop.index], hop.owner, heads, mine, keys, dq_sum, made
            )
            if q.dtype == dtype:
                dkeys, dvalues = made.running(everything)
            else:
                dkeys, dvalues = (torch.empty_like(x[:, :, everything]) for x in keys)
                made.write(everything, dkeys, dvalues)
            del keys, made
            total.add(
                everything, *expansion.backward(heads, latents, dkeys, dvalues, dweight)
            )

    send_gradients(ring, 0, own, (dlatents, drotary), compute, [])()
    for heads, dq_sum in zip(groups, sums, strict=True):
        store(dq_sum.finish(), dq[:, heads])
    return (
        dq,
        dlatents,
        drotary,
        q.new_empty(0) if dweight is None else dweight.to(weight.dtype),
    )


@_forward_op.register_fake
def _fake_forward(
    q: Tensor, latents: Tensor, rotary: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return handled(
        partial(op.fake_forward, q, *Expansion(q, rotary, weight).like(q, latents))
    )


@_backward_op.register_fake
def _fake_backward(
    dout: Tensor,
    q: Tensor,
    latents: Tensor,
    rotary: Tensor,
    weight: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    _, _, trains_weight, _ = rest
    dweight = torch.empty_like(weight) if trains_weight else q.new_empty(0)
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(empty_like(x) for x in (q, latents, rotary)), dweight, dsinks


def _gradients(
    dout: Tensor, q: Tensor, latents: Tensor, rotary: Tensor, weight: Tensor, *rest: Any
) -> Any:
    *others, spec = rest
    run = op.last_of(_backward, _backward_op)
    return run(dout, q, latents, rotary, weight, *others, weight.requires_grad, spec)


_attention: Final = op.plain_call(
    _forward,
    _forward_op,
    op.register_gradient("latent_attention", _forward_op, 5, _gradients),
)
_backward_op.register_autograd(op.refuse_again)
