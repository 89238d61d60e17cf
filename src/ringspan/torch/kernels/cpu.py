"""PyTorch's CPU flash attention: FULL, causal and anticausal tiles, grouped heads as they are."""

import torch
from torch import Tensor

from ringspan.core.tile import Tile

_ops = torch.ops.aten


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``, the operator that returns the log-sum-exp, and its
    backward.

    Its causal triangle starts at the top left corner, also when there are more rows than keys. An anticausal tile runs
    as its mirror image: rows and keys in reverse order.
    """

    name = "cpu-flash"

    def serves(self, q: Tensor, v: Tensor, tile: Tile) -> bool:
        return (
            q.device.type == "cpu"
            and q.shape[-1] == v.shape[-1]
            and (tile.is_full or tile.is_causal or tile.is_anticausal)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if tile.is_anticausal:
            mirrored = tile.mirrored(tile.q1, tile.k1)
            out, lse = self.forward(q.flip(2), k.flip(2), v.flip(2), mirrored, scale)
            return out.flip(2), lse.flip(2)
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.is_causal, scale=scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if tile.is_anticausal:
            mirrored = tile.mirrored(tile.q1, tile.k1)
            dout, q, k, v, out, lse = (x.flip(2) for x in (dout, q, k, v, out, lse))
            dq, dk, dv = self.backward(dout, q, k, v, out, lse, mirrored, scale)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=scale
        )
        return dq, dk, dv
