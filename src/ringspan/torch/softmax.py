"""The merge rule of ``ringspan.core.softmax``, in place: the running (out, lse) of a rank's queries.

B batch, H query heads, T local queries, E value head size.
"""

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

    def merge(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merge the partial of a tile's rows; every row of a tile sees a key, so ``lse`` is finite."""
        if self._out is None or self._lse is None:
            if tile.num_rows == self._shape[2]:
                self._out, self._lse = out.to(self._dtype), lse.to(self._dtype)
                return
            self._start()
        assert self._out is not None and self._lse is not None
        mine, mine_lse = self._out[:, :, tile.q0 : tile.q1], self._lse[:, :, tile.q0 : tile.q1]
        weight = torch.sigmoid(lse - mine_lse).to(self._dtype)
        mine.lerp_(out.to(self._dtype), weight.unsqueeze(-1))
        torch.logaddexp(mine_lse, lse.to(self._dtype), out=mine_lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The float32 (out, lse); a row that saw nothing has out 0 and lse -inf."""
        if self._out is None or self._lse is None:
            self._start()
        assert self._out is not None and self._lse is not None
        return self._out, self._lse.contiguous()

    def _start(self) -> None:
        self._out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self._lse = torch.full(self._shape[:-1], -torch.inf, dtype=self._dtype, device=self._device)
