"""The merge rule of ``ringspan.core.reference.merge`` in plain PyTorch; ``triton_merge`` has it as one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringspan.torch.engine.kernels.device import runs_triton


def merge_into(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge in place: (out, lse) <- (out, lse) + (new_out, new_lse), shapes (B, H, rows, E) and (B, H, rows)."""
    # If neither partial has seen a key, -inf minus -inf is NaN.
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0).to(out.dtype)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)


def sum_many(total: Tensor, values: Sequence[Tensor]) -> None:
    """Write the sum of values of any dtypes, each read once, into ``total``, rounded once; the first may be itself."""
    if not values:
        total.zero_()
    elif len(values) > 1 and runs_triton(total) and total.dtype != torch.float64:
        from ringspan.torch.engine.kernels.partials import triton_merge

        triton_merge.sum_many(total, values)
    else:
        first, *others = values
        is_exact = not others or total.dtype.itemsize >= torch.float32.itemsize
        sums = total if is_exact else torch.empty_like(total, dtype=torch.float32)
        is_there = sums.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not is_there or sums.storage_offset() != first.storage_offset():
            sums.copy_(first)
        for other in others:
            sums.add_(other)
        if sums is not total:
            total.copy_(sums)


def merge_many(
    out: Tensor,
    lse: Tensor,
    partials: Sequence[tuple[Tensor, ...]],
    sinks: Tensor | None = None,
) -> None:
    """Write the merge of partials, each read once, into (out, lse): shapes (B, H, rows, E) and (B, H, rows).

        lse = logsumexp_i(lse_i, sink),  out = sum_i exp(lse_i - lse) out_i

    in the dtype of ``lse``, rounded once to that of ``out``. The first partial may be (out, lse) itself. ``sinks`` (H,)
    are logits without a value. Rows without keys have out 0 and lse -inf.
    """
    if not partials:
        out.zero_()
        lse.fill_(-torch.inf)
        if sinks is not None:
            lse.copy_(sinks.to(lse.dtype)[:, None].expand_as(lse))
    elif len(partials) == 1 and sinks is None:
        out.copy_(partials[0][0])
        lse.copy_(partials[0][1])
    elif runs_triton(lse):
        from ringspan.torch.engine.kernels.partials import triton_merge

        triton_merge.merge_many(out, lse, partials, sinks)
    else:
        _merge_many(out, lse, partials, sinks)


def _merge_many(
    out: Tensor,
    lse: Tensor,
    partials: Sequence[tuple[Tensor, ...]],
    sinks: Tensor | None,
) -> None:
    """Write the merge in plain PyTorch: weights ``exp(lse_i - lse)``, stacked with the sinks', whose value is 0."""
    logits = [each for _, each in partials]
    if sinks is not None:
        logits.append(sinks.to(lse.dtype)[:, None].expand_as(lse))
    shares = torch.stack(logits)
    total = torch.logsumexp(shares, 0)
    # For rows without keys, -inf minus -inf is NaN.
    shares.sub_(total).exp_().nan_to_num_(0.0)
    (first, _), *others = partials
    mixed = first.to(lse.dtype, copy=True).mul_(shares[0].unsqueeze(-1))
    for (other, _), share in zip(others, shares[1:], strict=False):
        mixed.addcmul_(other.to(lse.dtype), share.unsqueeze(-1))
    out.copy_(mixed)
    lse.copy_(total)
