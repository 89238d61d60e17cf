"""From hidden states to the loss in blocks: the tokens x vocabulary logits never exist whole.

T local tokens, C hidden size, V vocabulary, n tokens of a chunk, v vocabulary entries of a chunk.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.names import LOSS_NAMES, LossName, find_name
from ringspan.core.numbers import check_real, check_whole
from ringspan.torch.attention.arguments import check_loss, find_group
from ringspan.torch.data.batch import IGNORED

# Rows of a weight gradient of lower precision that exist before they are added to the sum of higher precision.
_PRODUCT_ROWS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What is added to a cross-entropy, and in which blocks it is computed."""

    chunk_tokens: int = 1024
    chunk_vocabulary: int | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_whole("loss_chunk_tokens", self.chunk_tokens)
        if self.chunk_vocabulary is not None:
            check_whole("loss_chunk_vocabulary", self.chunk_vocabulary, otherwise="; None is for all")
        check_real("z_loss", self.z_loss, 0)
        check_real("label_smoothing", self.label_smoothing, 0, 1)
        check_real("logit_scale", self.logit_scale, 0, above=True)
        if self.softcap is not None:
            check_real("softcap", self.softcap, 0, above=True)


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
) -> Tensor:
    """Summed cross-entropy of ``hidden @ weight.T + bias`` in float32, a block of tokens x vocabulary at a time.

    Equals, with its gradients,

        logits = logit_scale * (hidden @ weight.T + bias)
        logits = softcap * tanh(logits / softcap)                       # with a softcap
        lse = logits.logsumexp(-1)[targets != -100]
        cross_entropy(logits, targets, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
            + z_loss * (lse ** 2).sum()

    The gradients are computed with the loss, so one backward pass consumes them; the weight's adds up in float32. With
    more than one block of vocabulary the logits are computed twice: once for their log-sum-exp, once for the gradients.
    What it holds beside the gradient of ``hidden`` is ``loss_bytes``, whatever T.

    Args:
        hidden: (T, C); weight (V, C); targets (T,) int64, -100 for none; bias (V,).
        chunk_tokens: tokens whose logits exist at once.
        chunk_vocabulary: vocabulary entries for which they do; all V when None.
        z_loss: factor on the squared log-sum-exp (Chowdhery et al. 2022, section 5).
        label_smoothing: share of the target that is spread over the vocabulary, as in torch.
        logit_scale: factor on what the head computes (Cohere, Granite).
        softcap: largest logit (Gemma 2).
        impl: ``blockwise`` is this file; ``liger`` is Liger's fused kernel, which chooses its own blocks; ``auto``
            takes Liger's on CUDA where it is installed.
        group: ranks that share the vocabulary, each calling with the same hidden and targets: weight and bias are this
            rank's share of V, all of one size and in the order of the ranks. The loss is the whole one on each; the
            gradient of hidden is this rank's part, still to be summed.

    Returns:
        A scalar in float32, or in float64 when hidden is; 0 when no token has a target.

    Raises:
        ConfigError: an option outside of its range, or ``impl="liger"`` where it is not installed, not on CUDA, or has
            a share of the vocabulary.
        UnsupportedError: a target that is no entry of the vocabulary; shapes, dtypes or devices that do not fit.

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
    if fused := _choose_liger(impl, hidden, group, logit_scale):
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
    differentiate = torch.is_grad_enabled()
    return _BlockwiseCrossEntropy.apply(hidden, weight, bias, targets, options, differentiate, group)


def loss_bytes(
    options: LossOptions, vocabulary: int, hidden_size: int, dtype: torch.dtype, *, bias: bool = False
) -> int:
    """Bytes that ``blockwise_cross_entropy`` holds at most, beside its arguments and the gradient of ``hidden``.

    With s bytes per entry and a = max(s, 4) bytes in a sum: ``V C a`` for the weight's gradient, ``n v a`` for the
    logits (twice that with a softcap) and, with several blocks of vocabulary, ``n C a`` for the gradient of hidden. A
    type below float32 adds the logits' gradient rounded to it, ``n v s``, and the product on its way into a sum,
    ``m C (s + a)`` with up to 4096 rows m of the weight or n tokens; or, at the end, the weight's gradient rounded,
    ``V C s``, if that is more. Left out are vectors of n entries and what a matrix product packs, together less than 3%
    of it from blocks of 512 x 8192 on.
    """
    s = dtype.itemsize
    a = max(s, 4)
    v = min(options.chunk_vocabulary or vocabulary, vocabulary)
    block, several = options.chunk_tokens * v, v < vocabulary
    total = (2 if options.softcap else 1) * block * a
    if s < a:
        total += block * s + max(min(_PRODUCT_ROWS, v), options.chunk_tokens if several else 0) * hidden_size * (s + a)
    if several:
        total += options.chunk_tokens * hidden_size * a
    rounded = vocabulary * hidden_size * s if s < a else 0
    return vocabulary * (hidden_size + bias) * a + max(total, rounded)


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    known = (targets == IGNORED) | ((targets >= 0) & (targets < vocabulary))
    if not bool(known.all()):
        raise UnsupportedError(
            f"target {int(targets[~known][0])} is no entry of a vocabulary of {vocabulary}; use {IGNORED} for no target"
        )


def _choose_liger(
    impl: LossName, hidden: Tensor, group: dist.ProcessGroup | None = None, logit_scale: float = 1.0
) -> Callable[..., Tensor] | None:
    """Liger's fused linear cross-entropy when it is wanted and can add the weight's gradient up in float32."""
    find_name("loss", impl, LOSS_NAMES, ConfigError)
    unfit = group is not None or logit_scale != 1 or not _is_cuda(hidden) or hidden.dtype == torch.float64
    if impl == "blockwise" or (impl == "auto" and unfit):
        return None
    if group is not None:
        raise ConfigError("loss 'liger' needs the whole vocabulary on every rank; use 'blockwise'")
    if logit_scale != 1:
        raise ConfigError(f"loss 'liger' knows no logit_scale={logit_scale}; use 'blockwise'")
    if not _is_cuda(hidden):
        raise ConfigError(f"loss 'liger' runs on CUDA, not on {hidden.device.type}; use 'blockwise'")
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

        fused = functional.liger_fused_linear_cross_entropy
        if "accum_dtype" in inspect.signature(fused).parameters:
            return fused
    if impl == "auto":
        return None
    raise ConfigError("loss 'liger' needs liger-kernel 0.6 or newer: pip install liger-kernel; or use 'blockwise'")


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _is_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


class _BlockwiseCrossEntropy(torch.autograd.Function):
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
        total, gradients = _Blocks(hidden, weight, bias, options, group).run(targets, wants)
        # Kept as attributes: the one backward pass takes them away and scales them where they are.
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # for which once_differentiable would return constants: d_total needs no gradient
            raise UnsupportedError(
                "blockwise_cross_entropy is differentiated once; call backward or torch.autograd.grad without "
                "create_graph=True"
            )
        if ctx.gradients is None:
            raise RuntimeError("the blockwise loss keeps its gradients for one backward pass; compute the loss again")
        [d_total] = gradients
        results: list[Tensor | None] = []
        while ctx.gradients:
            gradient, dtype = ctx.gradients.pop(0), ctx.dtypes.pop(0)
            results.append(None if gradient is None else gradient.mul_(d_total).to(dtype))
            del gradient
        ctx.gradients = None
        return (*results, None, None, None, None)


class _Blocks:
    """One pass over the blocks of tokens, and within each over the blocks of vocabulary."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.options, self.group = hidden, weight, bias, options, group
        self.vocabulary = len(weight) * _size(group)
        self.first = 0 if group is None else len(weight) * dist.get_rank(group)
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        size = min(options.chunk_vocabulary or len(weight), len(weight))
        self.columns = list(slices(len(weight), size))
        block = min(options.chunk_tokens, len(hidden)) * size
        self.buffer = self._new(block)
        self.slopes = self._new(block) if options.softcap else None

    def run(self, targets: Tensor, wants: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and of hidden, weight and bias the gradients that are wanted, where the loss's own is 1."""
        hidden, several = self.hidden, len(self.columns) > 1
        d_hidden = torch.empty_like(hidden) if wants[0] else None
        d_weight = self._new(*self.weight.shape).zero_() if wants[1] else None
        d_bias = self._new(len(self.weight)).zero_() if wants[2] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for rows in slices(len(hidden), self.options.chunk_tokens):
            target, chunk = targets[rows] - self.first, hidden[rows]
            valid = (targets[rows] != IGNORED).to(self.dtype)
            top, exponentials, picked, mean = self._scan(chunk, target)
            smoothing, lse = self.options.label_smoothing, top + exponentials.log()
            # From the largest logit, so that large ones do not cancel.
            loss = exponentials.log() + (1 - smoothing) * (top - picked) + smoothing * (top - mean)
            loss += self.options.z_loss * lse.square()
            total += (loss * valid).sum()
            if not any(wants):
                continue
            sums = self._new(*chunk.shape) if several else None
            for columns in self.columns:
                if several:
                    self._logits(chunk, columns).sub_(top.unsqueeze(1)).exp_()
                logits = self._block(self.buffer, chunk, columns).div_(exponentials.unsqueeze(1))
                d_logits = self._differentiate(logits, lse, target, valid, columns).to(hidden.dtype)
                if d_bias is not None:
                    d_bias[columns] += logits.sum(0)
                if d_hidden is not None:
                    _add_product(d_hidden[rows], d_logits, self.weight[columns], sums, first=columns.start == 0)
                if d_weight is not None:
                    _add_outer(d_weight[columns], d_logits, chunk)
                del d_logits
            if d_hidden is not None and sums is not None:
                d_hidden[rows] = sums
        return total.to(self.dtype), [d_hidden, d_weight, d_bias]

    def _scan(self, chunk: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each token: its largest logit, the sum of all ``exp(logit - largest)``, the target's logit (0 without one)
        and the mean of all logits; each (n,). Leaves ``exp(logit - largest)`` of the last block in the buffer.
        """
        top = self._new(len(chunk)).fill_(-torch.inf)
        total, picked, mean = (torch.zeros_like(top) for _ in range(3))
        for columns in self.columns:
            logits = self._logits(chunk, columns)
            index, here = _local(target, columns)
            picked += logits.gather(1, index).squeeze(1) * here
            if self.options.label_smoothing:
                mean += logits.sum(1) / self.vocabulary
            highest = torch.maximum(top, logits.amax(1))
            total.mul_((top - highest).exp_()).add_(logits.sub_(highest.unsqueeze(1)).exp_().sum(1))
            top = highest
        return self._over_ranks(top, total, picked, mean) if self.group else (top, total, picked, mean)

    def _over_ranks(self, top: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What ``_scan`` found in the whole vocabulary, from what it found in this rank's share of it."""
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        shrink = (top - highest).exp_()
        self._block(self.buffer, top, self.columns[-1]).mul_(shrink.unsqueeze(1))
        total, picked, mean = sums
        parts = torch.stack((total * shrink, picked, mean))
        dist.all_reduce(parts, group=self.group)
        return highest, parts[0], parts[1], parts[2]

    def _logits(self, chunk: Tensor, columns: slice) -> Tensor:
        """The block's logits in the buffer, and with a softcap the slopes of the cap beside it."""
        logits = _multiply(chunk, self.weight[columns].T, self._block(self.buffer, chunk, columns))
        if self.bias is not None:
            logits += self.bias[columns]
        if self.options.logit_scale != 1:
            logits.mul_(self.options.logit_scale)
        if self.slopes is not None and self.options.softcap:
            slopes = self._block(self.slopes, chunk, columns)
            logits.div_(self.options.softcap).tanh_()
            torch.mul(logits, logits, out=slopes).neg_().add_(1)
            logits.mul_(self.options.softcap)
        return logits

    def _differentiate(self, softmax: Tensor, lse: Tensor, target: Tensor, valid: Tensor, columns: slice) -> Tensor:
        """The loss's gradient for what the head computed of the block, in the softmax's own memory."""
        smoothing = self.options.label_smoothing
        d_logits = softmax.mul_((valid * (1 + 2 * self.options.z_loss * lse)).unsqueeze(1))
        index, here = _local(target, columns)
        d_logits.scatter_add_(1, index, (-(1 - smoothing) * valid * here).unsqueeze(1))
        if smoothing:
            d_logits.sub_((valid * smoothing / self.vocabulary).unsqueeze(1))
        if self.slopes is not None:
            d_logits.mul_(self._block(self.slopes, d_logits, columns))
        return d_logits if self.options.logit_scale == 1 else d_logits.mul_(self.options.logit_scale)

    def _block(self, buffer: Tensor, chunk: Tensor, columns: slice) -> Tensor:
        shape = len(chunk), columns.stop - columns.start
        return buffer[: shape[0] * shape[1]].view(shape)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.hidden.device)


def slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _local(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Where in a block of vocabulary each target is, (n, 1), and whether it is there at all, (n,)."""
    here = (target >= columns.start) & (target < columns.stop)
    return (target - columns.start).clamp(0, columns.stop - columns.start - 1).unsqueeze(1), here


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)


def _add_product(out: Tensor, d_logits: Tensor, weight: Tensor, sums: Tensor | None, *, first: bool) -> None:
    """``d_logits @ weight``: into ``out``, or added to ``sums`` where it is one of several parts."""
    if sums is None:
        torch.mm(d_logits, weight, out=out)
    elif first:
        _multiply(d_logits, weight, sums)
    elif sums.dtype == weight.dtype:
        sums.addmm_(d_logits, weight)
    else:
        sums += d_logits @ weight


def _add_outer(sums: Tensor, d_logits: Tensor, chunk: Tensor) -> None:
    """``sums += d_logits.T @ chunk``, in parts where the product has a lower precision than the sums."""
    if sums.dtype == chunk.dtype:
        sums.addmm_(d_logits.T, chunk)
        return
    for rows in slices(len(sums), _PRODUCT_ROWS):
        sums[rows] += d_logits[:, rows].T @ chunk
