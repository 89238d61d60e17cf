"""PyTorch's CPU flash attention: FULL, causal and anticausal tiles, grouped heads as they are."""

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunches, keys_a_row, pieces
from ringspan.torch.kernels.contract import BackwardInputs, Scores, Triangles
from ringspan.torch.kernels.device import rules_of
from ringspan.torch.kernels.memory import Memory

_ops = torch.ops.aten


def is_slow_at(tiles: tuple[Tile, ...], q: Tensor) -> bool:
    """Return whether plain PyTorch is faster: in float32 with few keys a row, of which the kernel takes 64 at once."""
    short = rules_of(q.device).short_rows
    return short is not None and q.dtype == torch.float32 and short[0] / q.shape[1] <= keys_a_row(tiles) <= short[1]


class CpuFlash(Triangles):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""

    name = "cpu"
    memory = Memory()

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        if q.device.type != "cpu":
            return f"it needs tensors on the CPU, these are on {q.device.type}"
        return scores.beyond_plain

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return pieces(tiles)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)

    def differentiate(self, given: BackwardInputs, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal, scale=scale)
