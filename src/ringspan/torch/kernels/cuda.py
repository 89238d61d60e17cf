"""PyTorch's CUDA flash attention: FULL and square causal tiles in half precision."""

import torch
from torch import Tensor

from ringspan.core.tile import Tile
from ringspan.torch.scores import Scores

_ops = torch.ops.aten


class CudaFlash:
    """``aten::_scaled_dot_product_flash_attention``, which returns the log-sum-exp, and its backward.

    Only square causal tiles: for others the operator's triangle has changed its corner between releases. Head sizes are
    multiples of 8 up to 256; key/value heads are repeated for one tile at a time, since the operator's backward does
    not sum them over a group.
    """

    name = "cuda-flash"

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "runs on CUDA devices"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs compute capability 8.0, {device} has {major}.{minor}"

    def serves(self, q: Tensor, v: Tensor, tile: Tile, scores: Scores) -> bool:
        head_size = q.shape[-1]
        return (
            scores.is_plain
            and q.dtype in (torch.bfloat16, torch.float16)
            and head_size == v.shape[-1]
            and head_size % 8 == 0
            and head_size <= 256
            and (tile.is_full or (tile.is_causal and tile.num_rows == tile.num_keys))
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
        k, v = _repeat(k, q), _repeat(v, q)
        out, lse, *_ = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, tile.is_causal, False, scale=scores.scale)
        return out, lse[..., : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_heads, v_heads = _repeat(k, q), _repeat(v, q)
        no_cuts = torch.empty(0, dtype=torch.int32, device=q.device)  # no packed sequences
        no_dropout = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            dout, q, k_heads, v_heads, out, lse.contiguous(), no_cuts, no_cuts, q.shape[2], k.shape[2], 0.0,
            tile.is_causal, no_dropout, no_dropout, scale=scores.scale,
        )  # fmt: skip
        return dq, _sum_groups(dk, k), _sum_groups(dv, v)


def _repeat(kv: Tensor, q: Tensor) -> Tensor:
    return kv if kv.shape[1] == q.shape[1] else kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _sum_groups(gradient: Tensor, kv: Tensor) -> Tensor:
    if gradient.shape == kv.shape:
        return gradient
    return gradient.unflatten(1, (kv.shape[1], -1)).sum(2, dtype=torch.float32)
