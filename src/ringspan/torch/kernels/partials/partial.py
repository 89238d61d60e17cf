"""The merge rule of ``ringspan.core.softmax``, in place: the running (out, lse) of a rank's queries.

B batch, H query heads, T local queries, E value head size.
"""

import torch
from torch import Tensor

from ringspan.torch.kernels.device import runs_triton
from ringspan.torch.kernels.partials.merge import merge_into
from ringspan.torch.kernels.partials.written_rows import WrittenRows


class Partial:
    """(out, lse) of the local queries over the keys seen so far, in float32 (float64 for float64 inputs).

    Float32 sums keep the error independent of the number of ranks; they are made in ``out`` and ``lse`` if these fit.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self._result, self._lse = out, lse
        self._out = out
        if out.dtype != lse.dtype:  # tokens before heads, as the flash kernels store what they return
            self._out = torch.empty_like(out.transpose(1, 2), dtype=lse.dtype, memory_format=torch.contiguous_format)
            self._out = self._out.transpose(1, 2)
        self._rows = WrittenRows(out.shape[2])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the partial of rows; out is 0 and lse -inf for a row that saw nothing."""
        mine, mine_lse = self._out[:, :, rows], self._lse[:, :, rows]
        missing = self._rows.touch(rows)
        # Rows that nothing has been written to take the partial as it is; where only some have been, the others become
        # the partial of no keys, which merges like any other.
        if missing == rows.stop - rows.start:
            mine.copy_(out)
            mine_lse.copy_(lse)
            return
        if missing:
            self.running(rows)
        if runs_triton(mine):
            from ringspan.torch.kernels.partials import triton_merge

            triton_merge.merge_into(mine, mine_lse, out, lse)
        else:
            merge_into(mine, mine_lse, out, lse)

    def running(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the running out and lse of rows, for a kernel that adds in place."""
        for start, stop in self._rows.fill():
            self._out[:, :, start:stop].zero_()
            self._lse[:, :, start:stop].fill_(-torch.inf)
        return self._out[:, :, rows], self._lse[:, :, rows]

    def finish(self, sinks: Tensor | None = None) -> None:
        """Leave the result in ``out`` and ``lse``; a row that saw nothing has out 0 and lse -inf.

        ``sinks`` (H,) are logits that take their share of each row's softmax and add nothing to its output: with the
        lse of the keys, ``lse' = logaddexp(lse, sink)`` and ``out' = exp(lse - lse') out``.
        """
        self.running(slice(0, self._out.shape[2]))
        if sinks is not None:
            total = torch.logaddexp(self._lse, sinks.to(self._lse.dtype)[:, None])
            share = (self._lse - total).exp_().masked_fill_(total == -torch.inf, 1)  # no key and no sink: out stays 0
            self._out.mul_(share.unsqueeze(-1))
            self._lse.copy_(total)
        if self._out is not self._result:
            self._result.copy_(self._out)
