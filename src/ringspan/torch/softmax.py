"""The merge rule of ``ringspan.core.softmax``, in place: the running (out, lse) of a rank's queries.

B batch, H query heads, T local queries, E value head size.
"""

import numpy as np
import torch
from torch import Tensor

from ringspan.core.tile import Tile


class Partial:
    """(out, lse) of the local queries against the keys seen so far, in float32 (float64 for float64 inputs).

    Accumulating in float32 over the whole ring is what keeps the error independent of the number of ranks.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._seen = np.zeros(shape[2], dtype=np.bool_)  # rows that have seen a key; the others are uninitialised

    def merge(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merge the partial of a tile's rows; every row of a tile sees a key, so ``lse`` is finite."""
        if self._out is None and tile.num_rows == self._shape[2]:
            self._out, self._lse = out.to(self._dtype), lse.to(self._dtype)
            self._seen[:] = True
            return
        whole_out, whole_lse = self._state()
        rows, seen = slice(tile.q0, tile.q1), self._seen[tile.q0 : tile.q1]
        mine, mine_lse = whole_out[:, :, rows], whole_lse[:, :, rows]
        if not seen.any():
            mine.copy_(out)
            mine_lse.copy_(lse)
            seen[:] = True
            return
        if not seen.all():
            self._clear(rows)
        weight = torch.sigmoid(lse - mine_lse).to(self._dtype)
        mine.lerp_(out.to(self._dtype), weight.unsqueeze(-1))
        torch.logaddexp(mine_lse, lse.to(self._dtype), out=mine_lse)

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The float32 (out, lse); a row that saw nothing has out 0 and lse -inf.

        ``sinks`` (H,) are logits that take their share of each row's softmax and add nothing to its output: with the
        lse of the keys alone, ``lse' = logaddexp(lse, sink)`` and ``out' = exp(lse - lse') out``.
        """
        if not self._seen.all():
            self._clear(slice(0, len(self._seen)))
        out, lse = self._state()
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(self._dtype)[:, None])
            out, lse = out.mul_((lse - total).exp_().unsqueeze(-1)), total
        return out, lse.contiguous()

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._lse = torch.empty(self._shape[:-1], dtype=self._dtype, device=self._device)
        return self._out, self._lse

    def _clear(self, rows: slice) -> None:
        """Give rows that have seen nothing the partial of no keys."""
        out, lse = self._state()
        unseen = torch.from_numpy(np.flatnonzero(~self._seen[rows]) + rows.start).to(self._device)
        out.index_fill_(2, unseen, 0.0)
        lse.index_fill_(2, unseen, -torch.inf)
        self._seen[rows] = True
