"""Merge of two partials (``ringspan.core.softmax``) as one Triton pass; the eager rule makes three. Requires Triton."""
# Triton compiles this function; as Python it would not type.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.gpu.support import OF_BATCH, OF_ROWS


@triton.jit(do_not_specialize=OF_BATCH, do_not_specialize_on_alignment=OF_ROWS)
def _merge(
    out, lse, new_out, new_lse,
    rows, size, heads,
    out_b, out_h, out_t, lse_b, lse_h, lse_t, new_b, new_h, new_t, new_lse_b, new_lse_h, new_lse_t,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    column = tl.arange(0, SIZE)
    is_row = row < rows
    inside = is_row[:, None] & (column < size)[None, :]
    row = row.to(tl.int64)
    lse_at = lse + batch * lse_b + head * lse_h + row * lse_t
    old = tl.load(lse_at, mask=is_row, other=-float("inf"))
    new = tl.load(new_lse + batch * new_lse_b + head * new_lse_h + row * new_lse_t, mask=is_row, other=-float("inf"))
    top = tl.maximum(old, new)
    base = tl.where(top == -float("inf"), 0.0, top)  # a row that saw nothing on either side
    old_share, new_share = tl.exp(old - base), tl.exp(new - base)
    total = old_share + new_share
    weight = tl.where(total > 0.0, new_share / tl.where(total > 0.0, total, 1.0), 0.0)
    out_at = out + batch * out_b + head * out_h + row[:, None] * out_t + column[None, :]
    a = tl.load(out_at, mask=inside, other=0.0)
    b = tl.load(
        new_out + batch * new_b + head * new_h + row[:, None] * new_t + column[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(out_at, a + weight[:, None] * (b - a), mask=inside)
    tl.store(lse_at, tl.where(total > 0.0, base + tl.log(total), -float("inf")), mask=is_row)


def merge_into(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge (out, lse) <- (out, lse) + (new_out, new_lse) in float32, in place; ``new_out`` in any dtype.

    Shapes: (B, H, rows, E) with a contiguous last dimension, and (B, H, rows), with any other strides.
    """
    assert out.dtype == lse.dtype == new_lse.dtype == torch.float32
    new_out = new_out if new_out.stride(-1) == 1 else new_out.contiguous()
    batch, heads, rows, size = out.shape
    block = max(1, 4096 // triton.next_power_of_2(size))
    _merge[(triton.cdiv(rows, block), batch * heads)](
        out, lse, new_out, new_lse, rows, size, heads,
        *out.stride()[:3], *lse.stride(), *new_out.stride()[:3], *new_lse.stride(),
        ROWS=block, SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
