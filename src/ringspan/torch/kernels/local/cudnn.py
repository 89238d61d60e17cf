"""cuDNN's attention as PyTorch calls it: FULL and square causal tiles in half precision."""

from typing import Final, Literal

import torch
from torch import Tensor

from ringspan.core.geometry.tile import Tile
from ringspan.core.schedule.kernel_launches import KernelLaunch, KernelLaunches, squares
from ringspan.torch.kernels.contract import (
    BackwardInputs,
    Scores,
    mirrored_backward,
    mirrored_forward,
    one_size,
    too_large,
)
from ringspan.torch.kernels.device import half_precision_on_cuda, rules_of
from ringspan.torch.kernels.local.eager import Eager
from ringspan.torch.kernels.memory import FOR_TENSOR_CORES

_ops = torch.ops.aten
_LARGEST_HEAD: Final = 128
_HEAD_MULTIPLE: Final = 8
_FEWEST: Final = 2  # rows and keys: the operator has no backward for one of them


class Cudnn:
    """``aten::_scaled_dot_product_cudnn_attention``, since torch 2.11; it has no backward for a single row or key."""

    name = "cudnn"
    memory = FOR_TENSOR_CORES
    adds_in_place: Literal[False] = False

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: KernelLaunch, scores: Scores) -> tuple[Tensor, Tensor]:
        if min(launch.num_rows, launch.num_keys) < _FEWEST:
            out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32, device=q.device)
            lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
            self._thin.forward_into(q, k, v, launch, scores, out, lse)
            return out, lse
        if launch.tile.is_anticausal:
            return mirrored_forward(self, q, k, v, launch, scores)
        value_size = v.shape[-1]
        q, k, v = one_size(q, k, v, multiple=_HEAD_MULTIPLE)
        out, lse, *_ = _ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, launch.tile.is_causal, False, scale=scores.scale
        )
        return out[..., :value_size], lse.squeeze(-1) if lse.dim() == q.dim() else lse

    def backward(self, given: BackwardInputs, launch: KernelLaunch, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = given
        if min(launch.num_rows, launch.num_keys) < _FEWEST:
            dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
            self._thin.backward_into(given, launch, scores, dq, dk, dv)
            return dq, dk, dv
        if launch.tile.is_anticausal:
            return mirrored_backward(self, given, launch, scores)
        size, value_size = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = one_size(dout, q, k, v, out, multiple=_HEAD_MULTIPLE)
        # The seed and offset of a random generator, which are read only where there is dropout.
        no_dropout = [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)]
        dq, dk, dv = _ops._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous().unsqueeze(-1), *no_dropout, None, None, None, q.shape[2], k.shape[2],
            0.0, launch.tile.is_causal, scale=scores.scale,
        )  # fmt: skip
        return dq[..., :size], dk[..., :size], dv[..., :value_size]
