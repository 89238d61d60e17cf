"""Merge of partials (``core.reference.merge``), or a sum, as one Triton pass over all of them. Requires Triton."""
# Triton compiles ``_merge``, which would not type as Python.
# pyright: reportCallIssue=false

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.gpu.support import OF_BATCH, OF_ROWS

MAX_PARTIALS = 8
"""Partials of one program; more are merged in turn."""


@triton.jit(do_not_specialize=OF_BATCH, do_not_specialize_on_alignment=OF_ROWS)
def _merge(
    out, lse, outs, lses, places, sinks,
    rows, size, heads,
    out_b, out_h, out_t, lse_b, lse_h, lse_t,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Merge PARTIALS partials into out and lse for a block of ROWS rows of one head; without lse, sum ``outs``.

    ``places`` has 8 numbers a partial: offset and strides (b, h, t) of its out, then of its lse.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, head = (
        (tl.program_id(1) // heads).to(tl.int64),
        (tl.program_id(1) % heads).to(tl.int64),
    )
    column = tl.arange(0, SIZE)
    is_row = row < rows
    inside = is_row[:, None] & (column < size)[None, :]
    row = row.to(tl.int64)
    # Sums relative to the largest logit so far, as in the online softmax.
    top = tl.full([ROWS], -float("inf"), tl.float32)
    if sinks is not None:
        top = tl.maximum(top, tl.load(sinks + head).to(tl.float32))
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    mixed = tl.zeros([ROWS, SIZE], tl.float32)
    for i in tl.static_range(PARTIALS):
        at = places + 8 * i
        if lse is not None:
            mine = (
                tl.load(at + 4)
                + batch * tl.load(at + 5)
                + head * tl.load(at + 6)
                + row * tl.load(at + 7)
            )
            new = tl.load(lses[i] + mine, mask=is_row, other=-float("inf"))
            higher = tl.maximum(top, new)
            base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet
            old_share, new_share = tl.exp(top - base), tl.exp(new - base)
        mine = (
            tl.load(at)
            + batch * tl.load(at + 1)
            + head * tl.load(at + 2)
            + row * tl.load(at + 3)
        )
        values = tl.load(
            outs[i] + mine[:, None] + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if lse is None:
            mixed += values
        else:
            mixed = mixed * old_share[:, None] + values * new_share[:, None]
            total = total * old_share + new_share
            top = higher
    if lse is not None:
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out + batch * out_b + head * out_h + row[:, None] * out_t + column[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        lse_at = lse + batch * lse_b + head * lse_h + row * lse_t
        tl.store(
            lse_at,
            tl.where(total > 0.0, top + tl.log(total), -float("inf")),
            mask=is_row,
        )


def merge_many(
    out: Tensor,
    lse: Tensor,
    partials: Sequence[tuple[Tensor, ...]],
    sinks: Tensor | None = None,
) -> None:
    """Write the merge of partials in any dtypes into (out, lse), in float32 registers; see ``merge.merge_many``.

    Out (B, H, rows, E) has a contiguous last dimension, lse (B, H, rows) is float32; any other strides.
    """
    assert lse.dtype == torch.float32
    while len(partials) > MAX_PARTIALS:
        sums = torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse)
        merge_many(*sums, partials[:MAX_PARTIALS])
        partials = [sums, *partials[MAX_PARTIALS:]]
    _run(out, lse, *zip(*partials, strict=True), sinks)


def sum_many(total: Tensor, values: Sequence[Tensor]) -> None:
    """Write the sum of values (B, H, rows, E) in any dtypes into ``total``; see ``merge.sum_many``."""
    while len(values) > MAX_PARTIALS:
        some = torch.empty_like(total, dtype=torch.float32)
        _run(some, None, values[:MAX_PARTIALS])
        values = [some, *values[MAX_PARTIALS:]]
    _run(total, None, values)


def _run(
    out: Tensor,
    lse: Tensor | None,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
) -> None:
    """Launch ``_merge`` on at most MAX_PARTIALS partials, or as a sum without ``lse``.

    Tensors are passed as views of their whole storage and read at the offsets in ``places``, since an argument's
    alignment would otherwise compile another program.
    """
    outs = [one if one.stride(-1) == 1 else one.contiguous() for one in outs]
    pairs = zip(outs, lses or outs, strict=True)
    places = tuple(
        place
        for pair in pairs
        for x in pair
        for place in (x.storage_offset(), *x.stride()[:3])
    )
    outs, lses = ([x.as_strided((1,), (1,), 0) for x in each] for each in (outs, lses))
    batch, heads, rows, size = out.shape
    block = max(1, 4096 // triton.next_power_of_2(size))
    _merge[(triton.cdiv(rows, block), batch * heads)](
        out,
        lse,
        tuple(outs),
        tuple(lses),
        _table(places, out.device),
        sinks,
        rows,
        size,
        heads,
        *out.stride()[:3],
        *((0, 0, 0) if lse is None else lse.stride()),
        ROWS=block,
        SIZE=triton.next_power_of_2(size),
        PARTIALS=len(outs),
        num_warps=4,
    )


@lru_cache(maxsize=256)
def _table(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the places of partials as a tensor: as plain arguments, each batch size would compile a program."""
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
