"""PyTorch's CPU flash attention: FULL, causal and anticausal tiles, grouped heads as they are."""

from typing import Literal

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches, keys_a_row, pieces
from ringspan.torch.kernels.contract import BackwardInputs, Scores, mirrored_backward, mirrored_forward, one_size
from ringspan.torch.kernels.device import rules_of
from ringspan.torch.kernels.memory import Memory

_ops = torch.ops.aten


def is_slow_at(tiles: tuple[Tile, ...], q: Tensor) -> bool:
    """Return whether plain PyTorch is faster: in float32 with few keys a row, of which the kernel takes 64 at once."""
    short = rules_of(q.device).short_rows
    return short is not None and q.dtype == torch.float32 and short[0] / q.shape[1] <= keys_a_row(tiles) <= short[1]


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; mirrors anticausal tiles, pads heads to one size."""

    name = "cpu"
    memory = Memory()
    adds_in_place: Literal[False] = False

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        if q.device.type != "cpu":
            return f"it needs tensors on the CPU, these are on {q.device.type}"
        return scores.beyond_plain

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return pieces(tiles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores) -> tuple[Tensor, Tensor]:
        tile = launch.tile
        if tile.is_anticausal:
            return mirrored_forward(self, q, k, v, launch, scores)
        value_size = v.shape[-1]
        q, k, v = one_size(q, k, v)
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.is_causal, scale=scores.scale)
        return out[..., :value_size], lse

    def backward(self, given: BackwardInputs, launch: KernelLaunch, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        tile = launch.tile
        if tile.is_anticausal:
            return mirrored_backward(self, given, launch, scores)
        dout, q, k, v, out, lse = given
        size, value_size = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = one_size(dout, q, k, v, out)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=scores.scale
        )
        return dq[..., :size], dk[..., :size], dv[..., :value_size]
