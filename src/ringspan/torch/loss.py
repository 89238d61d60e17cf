"""From hidden states to the loss in blocks: the tokens x vocabulary logits never exist whole.

T local tokens, C hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ringspan.core.errors import ConfigError
from ringspan.torch.batch import IGNORED


def blockwise_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk_tokens: int = 1024
) -> Tensor:
    """Summed cross-entropy of ``hidden @ weight.T + bias`` in float32, computed ``chunk_tokens`` tokens at a time.

    Equals ``cross_entropy(hidden @ weight.T + bias, targets, ignore_index=-100, reduction="sum")`` and its gradients,
    which are computed with the loss, so that no logits are kept or recomputed. The weight's gradient adds up in
    float32.

    Args:
        hidden: (T, C); weight (V, C); targets (T,) int64, -100 for none; bias (V,).
        chunk_tokens: tokens whose V logits exist at once.

    Returns:
        A float32 scalar; 0 when no token has a target.

    Raises:
        ConfigError: ``chunk_tokens`` below one.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"loss_chunk_tokens must be at least 1, got {chunk_tokens}")
    return _BlockwiseCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens)


class _BlockwiseCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wants = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wants[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants[1] else None
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if bias is not None else None
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk, target = hidden[rows], targets[rows]
            logits = (chunk @ weight.T).float()
            if bias is not None:
                logits += bias
            valid = (target != IGNORED).unsqueeze(-1)
            target = target.clamp_min(0).unsqueeze(-1)
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(-1, target)) * valid).sum()
            d_logits = logits.sub_(lse).exp_()  # the softmax, in the logits' own memory
            d_logits.scatter_add_(-1, target, d_logits.new_full((1, 1), -1.0).expand_as(target)).mul_(valid)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight += d_logits.T @ chunk
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [d_total] = gradients
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            d_hidden * d_total.to(d_hidden.dtype) if d_hidden is not None else None,
            (d_weight * d_total).to(weight_dtype) if d_weight is not None else None,
            (d_bias * d_total).to(bias_dtype) if d_bias is not None else None,
            None,
            None,
        )


class GlobalSum(torch.autograd.Function):
    """The sum over ranks of a value to which each rank contributes; its gradient is each rank's own part.

    Every rank sees the whole loss, and since gradients are summed over ranks too, each differentiates only what is its
    own.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        total = value.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
