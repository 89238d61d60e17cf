"""PyTorch's own fused attention: its flash attention on CPUs, and cuDNN on GPUs in half precision."""

from typing import Final

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import (
    KernelLaunch,
    KernelLaunches,
    keys_a_row,
    pieces,
    squares,
)
from ringspan.torch.engine.kernels.contract import (
    FOR_TENSOR_CORES,
    BackwardInputs,
    Memory,
    Scores,
    Triangles,
    too_large,
)
from ringspan.torch.engine.kernels.device import half_precision_on_cuda, rules_of
from ringspan.torch.engine.kernels.local.eager import Eager

_ops = torch.ops.aten
_LARGEST_HEAD: Final = 128
_FEWEST: Final = 2  # rows and keys: the operator has no backward for one of them


class Cudnn(Triangles):
    """``aten::_scaled_dot_product_cudnn_attention``, since torch 2.11; it has no backward for a single row or key."""

    name = "cudnn"
    memory = FOR_TENSOR_CORES
    head_multiple = 8

    def __init__(self) -> None:
        self._thin = Eager()

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        if reason := half_precision_on_cuda(q, (8, 0)):
            return reason
        if not rules_of(q.device).has_cudnn:
            return "this build of PyTorch has no cuDNN"
        if reason := too_large(q, v, _LARGEST_HEAD):
            return reason
        return scores.beyond_plain

    def launches(self, tiles: tuple[Tile, ...]) -> KernelLaunches:
        return squares(tiles)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of a launch; a single row or key, which has no backward here, goes to ``Eager``."""
        if min(launch.num_rows, launch.num_keys) >= _FEWEST:
            return super().forward(q, k, v, launch, scores)
        out = torch.zeros(
            *q.shape[:-1], v.shape[-1], dtype=torch.float32, device=q.device
        )
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        self._thin.forward_into(q, k, v, launch, scores, out, lse)
        return out, lse

    def backward(
        self, given: BackwardInputs, launch: KernelLaunch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        if min(launch.num_rows, launch.num_keys) >= _FEWEST:
            return super().backward(given, launch, scores)
        dq, dk, dv = (
            torch.zeros_like(x, dtype=given.lse.dtype)
            for x in (given.q, given.k, given.v)
        )
        self._thin.backward_into(given, launch, scores, dq, dk, dv)
        return dq, dk, dv

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        operator = _ops._scaled_dot_product_cudnn_attention
        out, lse, *_ = operator(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
        return out, lse.squeeze(-1) if lse.dim() == q.dim() else lse

    def differentiate(
        self, given: BackwardInputs, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        *heads, lse = given
        # The seed and offset of a random generator, which are read only for dropout.
        no_dropout = [
            torch.zeros((), dtype=torch.int64, device=lse.device) for _ in range(2)
        ]
        return _ops._scaled_dot_product_cudnn_attention_backward(
            *heads,
            lse.contiguous().unsqueeze(-1),
            *no_dropout,
            None,
            None,
            None,
            given.q.shape[2],
            given.k.shape[2],
            0.0,
            is_causal,
            scale=scale,
        )


_ops = torch.ops.aten


def is_slow_at(tiles: tuple[Tile, ...], q: Tensor) -> bool:
    """Return whether plain PyTorch is faster: in float32 with few keys a row, of which the kernel computes hidden ones.

    With fewer still, starting its many operations takes longer than the kernel; rectangles have no hidden keys.
    """
    short = rules_of(q.device).short_rows
    return (
        short is not None
        and q.dtype == torch.float32
        and short[0] <= keys_a_row(tiles) <= short[1]
        and not all(tile.is_full for tile in tiles)
    )


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

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )

    def differentiate(
        self, given: BackwardInputs, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, is_causal, scale=scale
        )
