"""PyTorch's CPU flash attention: FULL and causal tiles, grouped heads as they are, float32, float64 and bfloat16."""

import torch
from torch import Tensor

from ringspan.core.tile import Tile

_ops = torch.ops.aten


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``, the operator that returns the log-sum-exp, and its
    backward.

    Its causal triangle starts at the top left corner, also when there are more rows than keys.
    """

    name = "cpu-flash"

    def serves(self, q: Tensor, v: Tensor, tile: Tile) -> bool:
        return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and (tile.is_full or tile.is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.is_causal, scale=scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=scale
        )
        return dq, dk, dv
