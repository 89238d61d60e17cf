"""Memory layouts that kernels can read."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """A kernel's requirements on the layout of q, k, v, dout and out, each (B, H, T, D).

    ``in_rows``: ``x.stride(3) == 1`` and ``x.stride(2) >= D``; else kernels that ignore the last stride, and products
    of overlapping (expanded) rows, are wrong. ``alignment_bytes``: rows of a multiple of this also begin at one, for
    vector loads; the kernel copies other rows to wider ones. ``may_repeat``: batch and heads may be expanded (stride
    0).
    """

    in_rows: bool = True
    alignment_bytes: int = 1
    may_repeat: bool = True

    @staticmethod
    def of_all(memories: Iterable["Memory"]) -> "Memory":
        in_rows, alignments, may_repeat = zip(ANY, *memories, strict=True)
        return Memory(any(in_rows), max(alignments), all(may_repeat))

    def fits(self, x: Tensor) -> bool:
        if self.in_rows and not is_in_rows(x):
            return False
        if not self.may_repeat and any(x.stride(dim) == 0 < x.shape[dim] - 1 for dim in (0, 1)):
            return False
        return self.alignment_bytes == 1 or self._is_aligned(x)

    def laid_out(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, as contiguous copies if they do not fit."""
        return tuple(x if self.fits(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors)

    def _is_aligned(self, x: Tensor) -> bool:
        if x.shape[-1] * x.itemsize % self.alignment_bytes:
            return True
        starts = (x.data_ptr(), *(x.stride(dim) * x.itemsize for dim in range(3) if x.shape[dim] > 1))
        return all(start % self.alignment_bytes == 0 for start in starts)


ANY: Final = Memory(in_rows=False)
FOR_TENSOR_CORES: Final = Memory(alignment_bytes=16, may_repeat=False)  # what CUDA's own kernels load at once


def is_in_rows(x: Tensor) -> bool:
    """Return whether the last two dimensions have contiguous rows that do not overlap."""
    return x.stride(-1) == 1 and (x.shape[-2] == 1 or x.stride(-2) >= x.shape[-1])
