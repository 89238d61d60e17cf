"""Cross-entropy in blocks of n tokens x v vocabulary entries: each token's loss, their sum, and gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.costs import PRODUCT_ROWS
from ringspan.core.messages.numbers import check_real, check_whole
from ringspan.torch.data.padding import IGNORED


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    chunk_tokens: int = 1024
    chunk_vocabulary: int | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_whole("loss_chunk_tokens", self.chunk_tokens)
        if self.chunk_vocabulary is not None:
            check_whole(
                "loss_chunk_vocabulary",
                self.chunk_vocabulary,
                otherwise="; None is for all",
            )
        check_real("z_loss", self.z_loss, 0)
        check_real("label_smoothing", self.label_smoothing, 0, 1)
        check_real("logit_scale", self.logit_scale, 0, above=True)
        if self.softcap is not None:
            check_real("softcap", self.softcap, 0, above=True)


class Normalizers(NamedTuple):
    """Each token's largest logit and ``sum(exp(logit - largest))``, (T,); their lse would cancel large logits."""

    top: Tensor
    exponentials: Tensor

    def of(self, rows: slice) -> "Normalizers":
        return Normalizers(self.top[rows], self.exponentials[rows])

    @property
    def lse(self) -> Tensor:
        return self.top + self.exponentials.log()


class _Sums(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __bool__(self) -> bool:
        return any(x is not None for x in self)


class LossBlocks:
    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Prepare blocks of ``chunk_tokens`` x ``chunk_vocabulary`` logits, in one buffer that all blocks share.

        With a ``group``, ``weight`` has this rank's part of the vocabulary, whose first entry is ``first``.
        """
        self.hidden, self.weight, self.bias, self.options, self.group = (
            hidden,
            weight,
            bias,
            options,
            group,
        )
        ranks, rank = (
            (1, 0)
            if group is None
            else (dist.get_world_size(group), dist.get_rank(group))
        )
        self.vocabulary = len(weight) * ranks
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.targets, self.first = targets, len(weight) * rank
        size = min(options.chunk_vocabulary or len(weight), len(weight))
        self.columns = list(slices(len(weight), size))
        block = min(options.chunk_tokens, len(hidden)) * size
        self.buffer = self._new(block)
        self.slopes = self._new(block) if options.softcap else None

    def sum(self, wants: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the summed loss and its requested gradients of hidden, weight and bias."""
        sums = self._zeros(wants)
        total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        for rows in self._rows():
            losses, normalizers = self._losses(rows)
            total += losses.sum()
            if sums:
                ones = torch.ones_like(losses)
                self._differentiate(
                    rows, normalizers, ones, sums, is_scanned=len(self.columns) == 1
                )
        return total.to(self.dtype), list(sums)

    def per_token(self) -> tuple[Tensor, Normalizers]:
        """Return each token's loss (T,), and normalizers for ``gradients``."""
        parts = [
            (losses, *normalizers)
            for losses, normalizers in map(self._losses, self._rows())
        ]
        losses, *normalizers = (
            (torch.cat(each) for each in zip(*parts, strict=True))
            if parts
            else self._new(3, 0)
        )
        return losses, Normalizers(*normalizers)

    def gradients(
        self, normalizers: Normalizers, d_losses: Tensor, wants: list[bool]
    ) -> list[Tensor | None]:
        """Return the requested gradients of hidden, weight and bias, given each loss's gradient (T,)."""
        sums = self._zeros(wants)
        for rows in self._rows():
            self._differentiate(
                rows, normalizers.of(rows), d_losses[rows], sums, is_scanned=False
            )
        return list(sums)

    def _rows(self) -> Iterator[slice]:
        return slices(len(self.hidden), self.options.chunk_tokens)

    def _with_target(self, x: Tensor, rows: slice) -> Tensor:
        return x.masked_fill(self.targets[rows] == IGNORED, 0)

    def _target(self, rows: slice) -> Tensor:
        return self.targets[rows] - self.first

    def _zeros(self, wants: list[bool]) -> _Sums:
        return _Sums(
            torch.empty_like(self.hidden)
            if wants[0]
            else None,  # each row is written once
            self._new(*self.weight.shape).zero_() if wants[1] else None,
            self._new(len(self.weight)).zero_() if wants[2] else None,
        )

    def _losses(self, rows: slice) -> tuple[Tensor, Normalizers]:
        top, exponentials, picked, mean = self._scan(
            self.hidden[rows], self._target(rows)
        )
        normalizers, smoothing = (
            Normalizers(top, exponentials),
            self.options.label_smoothing,
        )
        # Relative to the largest logit, so that large ones do not cancel.
        losses = (
            exponentials.log()
            + (1 - smoothing) * (top - picked)
            + smoothing * (top - mean)
        )
        losses += self.options.z_loss * normalizers.lse.square()
        return self._with_target(losses, rows), normalizers

    def _differentiate(
        self,
        rows: slice,
        normalizers: Normalizers,
        d_losses: Tensor,
        sums: _Sums,
        *,
        is_scanned: bool,
    ) -> None:
        """Add a block's gradients, given its losses' (n,); ``is_scanned``: ``_scan``'s buffer has all of V."""
        chunk, target, several = (
            self.hidden[rows],
            self._target(rows),
            len(self.columns) > 1,
        )
        factors = self._with_target(d_losses, rows)
        d_hidden = (
            self._new(*chunk.shape) if several and sums.hidden is not None else None
        )
        for columns in self.columns:
            if not is_scanned:
                self._logits(chunk, columns).sub_(normalizers.top.unsqueeze(1)).exp_()
            softmax = self._block(self.buffer, chunk, columns).div_(
                normalizers.exponentials.unsqueeze(1)
            )
            d_products = self._of_products(
                softmax, normalizers.lse, target, factors, columns
            )
            d_logits = d_products.to(self.hidden.dtype)
            if sums.bias is not None:
                sums.bias[columns] += d_products.sum(0)
            if sums.hidden is not None:
                _add_product(
                    sums.hidden[rows],
                    d_logits,
                    self._entries(columns),
                    d_hidden,
                    first=columns.start == 0,
                )
            if sums.weight is not None:
                _add_outer(sums.weight[columns], d_logits, chunk)
            del d_logits
        if sums.hidden is not None and d_hidden is not None:
            sums.hidden[rows] = d_hidden

    def _scan(
        self, chunk: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return per token (n,): largest logit, ``sum(exp(logit - largest))``, target logit (or 0) and mean logit.

        Leaves ``exp(logit - largest)`` of the last block in the buffer.
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
            total.mul_((top - highest).exp_()).add_(
                logits.sub_(highest.unsqueeze(1)).exp_().sum(1)
            )
            top = highest
        return (
            self._over_ranks(top, total, picked, mean)
            if self.group
            else (top, total, picked, mean)
        )

    def _over_ranks(
        self, top: Tensor, *sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Combine the scans (n,) of all ranks' vocabularies as ``_scan`` does for one.

        The buffer, relative to this rank's largest logit, is scaled to the largest of all ranks.
        """
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        shrink = (top - highest).exp_()
        self._block(self.buffer, top, self.columns[-1]).mul_(shrink.unsqueeze(1))
        total, picked, mean = sums
        parts = torch.stack((total * shrink, picked, mean))
        dist.all_reduce(parts, group=self.group)
        return highest, parts[0], parts[1], parts[2]

    def _logits(self, chunk: Tensor, columns: slice) -> Tensor:
        """Return a block's logits (n, v) in the buffer: product, bias, scale and softcap; keep the softcap's slopes."""
        logits = _multiply(
            chunk, self._entries(columns).T, self._block(self.buffer, chunk, columns)
        )
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

    def _of_products(
        self,
        softmax: Tensor,
        lse: Tensor,
        target: Tensor,
        factors: Tensor,
        columns: slice,
    ) -> Tensor:
        """Return the gradient of the head's product for a block, in the softmax's memory."""
        smoothing = self.options.label_smoothing
        d_logits = softmax.mul_(
            (factors * (1 + 2 * self.options.z_loss * lse)).unsqueeze(1)
        )
        index, here = _local(target, columns)
        d_logits.scatter_add_(
            1, index, (-(1 - smoothing) * factors * here).unsqueeze(1)
        )
        if smoothing:
            d_logits.sub_((factors * smoothing / self.vocabulary).unsqueeze(1))
        if self.slopes is not None:
            d_logits.mul_(self._block(self.slopes, d_logits, columns))
        return (
            d_logits
            if self.options.logit_scale == 1
            else d_logits.mul_(self.options.logit_scale)
        )

    def _entries(self, columns: slice) -> Tensor:
        """Return a block's weights in the dtype of the hidden states, which autocast may have changed."""
        return self.weight[columns].to(self.hidden.dtype)

    def _block(self, buffer: Tensor, chunk: Tensor, columns: slice) -> Tensor:
        shape = len(chunk), columns.stop - columns.start
        return buffer[: shape[0] * shape[1]].view(shape)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.hidden.device)


def slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _local(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return each target's place in a vocabulary block, (n, 1), and if it is there, (n,)."""
    here = (target >= columns.start) & (target < columns.stop)
    return (target - columns.start).clamp(
        0, columns.stop - columns.start - 1
    ).unsqueeze(1), here


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)


def _add_product(
    out: Tensor, d_logits: Tensor, weight: Tensor, sums: Tensor | None, *, first: bool
) -> None:
    """Compute ``d_logits @ weight`` into ``out``, or add it to ``sums``, one of several parts."""
    if sums is None:
        torch.mm(d_logits, weight, out=out)
    elif first:
        _multiply(d_logits, weight, sums)
    elif sums.dtype == weight.dtype:
        sums.addmm_(d_logits, weight)
    else:
        sums += d_logits @ weight


def _add_outer(sums: Tensor, d_logits: Tensor, chunk: Tensor) -> None:
    """Compute ``sums += d_logits.T @ chunk``, in parts if the product is less precise."""
    if sums.dtype == chunk.dtype:
        sums.addmm_(d_logits.T, chunk)
        return
    for rows in slices(len(sums), PRODUCT_ROWS):
        sums[rows] += d_logits[:, rows].T @ chunk
