"""Loss of hidden states in blocks of n tokens and v vocabulary entries, without whole logits."""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.names import (
    LOSS_NAMES,
    REDUCTION_NAMES,
    LossName,
    ReductionName,
    find_name,
)
from ringspan.torch.data.loss_blocks import LossBlocks, LossOptions, Normalizers
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.engine.attention.arguments import check_loss, find_group
from ringspan.torch.engine.transport.agreement import agree


def blockwise_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    chunk_vocabulary: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    impl: LossName = "auto",
    group: dist.ProcessGroup | None = None,
    reduction: ReductionName = "sum",
) -> Tensor:
    """Compute cross-entropy of ``hidden @ weight.T + bias`` in float32, a block of tokens x vocabulary at a time.

    Equals, with its gradients,

        logits = logit_scale * (hidden @ weight.T + bias)
        logits = softcap * tanh(logits / softcap)                       # with a softcap
        lse = logits.logsumexp(-1)[targets != -100]
        cross_entropy(logits, targets, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
            + z_loss * (lse ** 2).sum()

    The sum's gradients are computed with it, for one backward pass. With several blocks of vocabulary, or
    ``reduction="none"``, logits are computed twice. It holds the gradient of ``hidden`` and
    ``ringspan.core.costs.loss_bytes``, for any T.

    Args:
        hidden: (T, C); weight (V, C), of its dtype or a narrower one; targets (T,) int64, -100 for none; bias (V,).
        chunk_tokens: tokens whose logits exist at once.
        chunk_vocabulary: vocabulary entries whose logits exist at once; all V if None.
        z_loss: factor on the squared log-sum-exp (Chowdhery et al. 2022, section 5).
        label_smoothing: share of the target that is spread over the vocabulary, as in torch.
        logit_scale: factor on the head's output (Cohere, Granite).
        softcap: largest logit (Gemma 2).
        impl: ``blockwise``; ``liger``, Liger's fused kernel, which chooses its blocks; ``auto``: Liger's if it can.
        group: ranks with equal hidden and targets, and each an equal share of the vocabulary, in rank order. Each gets
            the whole loss, and its part of hidden's gradient, to be summed.
        reduction: ``sum``; or ``none`` for the loss of each token, not with Liger's.

    Returns:
        A scalar, or (T,) without a reduction, in float32, or in float64 when hidden is; 0 if no token has a target.

    Raises:
        ConfigError: an option out of range, or ``impl="liger"`` where Liger is missing or cannot serve.
        UnsupportedError: a target outside the vocabulary; shapes, dtypes or devices that do not fit.
        PeerMismatch: the ranks of the group have other shapes, dtypes or options; on every rank.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Liu and Abbeel 2023, "Blockwise
    Parallel Transformer", section 3.
    """
    options = LossOptions(
        chunk_tokens=chunk_tokens,
        chunk_vocabulary=chunk_vocabulary,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    check_loss(hidden, weight, targets, bias)
    group = None if group is None else find_group(group)
    _check_targets(targets, len(weight) * _size(group))
    find_name("reduction", reduction, REDUCTION_NAMES, ConfigError)
    if group is not None:
        shapes = f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        agree(
            group,
            {
                "blockwise_cross_entropy": shapes,
                "options": f"{options}, reduction {reduction}",
            },
        )
    if fused := _choose_liger(
        impl, hidden, group, logit_scale, reduction, weight.dtype
    ):
        return fused(
            hidden,
            weight,
            targets,
            bias,
            ignore_index=IGNORED,
            lse_square_scale=z_loss,
            label_smoothing=label_smoothing,
            reduction="sum",
            softcap=softcap,
            accum_dtype=torch.float32,
        ).float()
    if reduction == "none":
        return _PerToken.apply(hidden, weight, bias, targets, options, group)
    return _Summed.apply(
        hidden, weight, bias, targets, options, torch.is_grad_enabled(), group
    )


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    known = (targets == IGNORED) | ((targets >= 0) & (targets < vocabulary))
    if not bool(known.all()):
        raise UnsupportedError(
            f"target {int(targets[~known][0])} is no entry of a vocabulary of {vocabulary}; use {IGNORED} for no target"
        )


def _choose_liger(
    impl: LossName, hidden: Tensor, group: dist.ProcessGroup | None = None, logit_scale: float = 1.0,
    reduction: ReductionName = "sum", dtype: torch.dtype | None = None,
) -> Callable[..., Tensor] | None:  # fmt: skip
    """Return Liger's fused loss if wanted and able to sum the weight's gradient in float32, else None."""
    find_name("loss", impl, LOSS_NAMES, ConfigError)
    reasons = {
        "adds up the losses of all tokens; use 'blockwise' for reduction='none'": reduction
        == "none",
        "needs the whole vocabulary on every rank; use 'blockwise'": group is not None,
        f"knows no logit_scale={logit_scale}; use 'blockwise'": logit_scale != 1,
        f"multiplies no {hidden.dtype} by a weight of {dtype}; use 'blockwise'": (
            dtype not in (None, hidden.dtype)
            and not torch.is_autocast_enabled(hidden.device.type)
        ),
        f"runs on CUDA, not on {hidden.device.type}; use 'blockwise'": not _is_cuda(
            hidden
        ),
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    if impl == "blockwise" or (
        impl == "auto" and (why is not None or hidden.dtype == torch.float64)
    ):
        return None
    if why is not None:
        raise ConfigError(f"loss 'liger' {why}")
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

        fused = functional.liger_fused_linear_cross_entropy
        if "accum_dtype" in inspect.signature(fused).parameters:
            return fused
    if impl == "auto":
        return None
    raise ConfigError(
        "loss 'liger' needs liger-kernel 0.6 or newer: pip install liger-kernel; or use 'blockwise'"
    )


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _is_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        differentiate: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        wants = [differentiate and wanted for wanted in ctx.needs_input_grad[:3]]
        total, gradients = LossBlocks(
            hidden, weight, bias, targets, options, group
        ).sum(wants)
        # Kept as attributes, so that the only backward pass can scale them in place and free them one by one.
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second_derivative()
        if ctx.gradients is None:
            raise RuntimeError(
                "the blockwise loss keeps its gradients for one backward pass; compute the loss again"
            )
        [d_total] = gradients
        results: list[Tensor | None] = []
        while ctx.gradients:
            gradient, dtype = ctx.gradients.pop(0), ctx.dtypes.pop(0)
            results.append(
                None if gradient is None else gradient.mul_(d_total).to(dtype)
            )
            del gradient
        ctx.gradients = None
        return (*results, None, None, None, None)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        losses, normalizers = LossBlocks(
            hidden, weight, bias, targets, options, group
        ).per_token()
        ctx.save_for_backward(hidden, weight, bias, targets, *normalizers)
        ctx.options, ctx.group = options, group
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of hidden, weight and bias, given each loss's gradient; logits are computed again."""
        _refuse_second_derivative()
        [d_losses], (hidden, weight, bias, targets, *normalizers) = (
            gradients,
            ctx.saved_tensors,
        )
        blocks = LossBlocks(hidden, weight, bias, targets, ctx.options, ctx.group)
        found = blocks.gradients(
            Normalizers(*normalizers), d_losses, ctx.needs_input_grad[:3]
        )
        like = hidden, weight, bias
        results = (
            None if g is None or x is None else g.to(x.dtype)
            for g, x in zip(found, like, strict=True)
        )
        return (*results, None, None, None)


def _refuse_second_derivative() -> None:
    """Raise for second derivatives; torch's ``once_differentiable`` might return constants instead."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "blockwise_cross_entropy is differentiated once; call backward or torch.autograd.grad without "
            "create_graph=True"
        )
