"""Local attention kernels behind one contract, a file each. The first one that serves a tile computes it."""

from typing import Final, Protocol

import torch
from torch import Tensor

from ringspan.core.tile import Tile
from ringspan.torch.kernels.cpu import CpuFlash
from ringspan.torch.kernels.cuda import CudaFlash
from ringspan.torch.kernels.reference import Blockwise
from ringspan.torch.scores import Scores


class Kernel(Protocol):
    """Attention of one tile's rows and keys.

    q (B, H, rows, D), k (B, G, keys, D), v (B, G, keys, E), already cut to the tile; G divides H. ``lse`` is the
    natural log-sum-exp in float32. ``scores`` says what a product q . k becomes, with the tile's positions where they
    count. ``backward`` takes the GLOBAL out and lse of the rows and gives this tile's share of dq, dk, dv.
    """

    name: str

    def why_not(self, device: torch.device) -> str | None:
        """What keeps this kernel from running on a device; None when nothing does."""
        ...

    def serves(self, q: Tensor, v: Tensor, tile: Tile, scores: Scores) -> bool:
        """Whether this kernel, where it runs, computes such a tile for such tensors (dtype, head sizes) and scores."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]: ...


KERNELS: Final[tuple[Kernel, ...]] = (CpuFlash(), CudaFlash(), Blockwise())


def choose(q: Tensor, v: Tensor, tile: Tile, scores: Scores) -> Kernel:
    """The kernel for a tile: the fastest that serves it; ``Blockwise`` serves everything."""
    return next(k for k in KERNELS if k.why_not(q.device) is None and k.serves(q, v, tile, scores))
