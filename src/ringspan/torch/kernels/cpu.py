"""PyTorch's CPU flash attention: FULL, causal and anticausal tiles, grouped heads as they are."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringspan.core.tile import Tile
from ringspan.torch.scores import Scores

_ops = torch.ops.aten


class CpuFlash:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``, the operator that returns the log-sum-exp, and its
    backward.

    Its causal triangle starts at the top left corner, also when there are more rows than keys. An anticausal tile runs
    as its mirror image: rows and keys in reverse order. It knows one head size, so the smaller ones get zeros (MLA: 192
    and 128).
    """

    name = "cpu-flash"

    def why_not(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "runs on CPUs"

    def serves(self, q: Tensor, v: Tensor, tile: Tile, scores: Scores) -> bool:
        return scores.is_plain and (tile.is_full or tile.is_causal or tile.is_anticausal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
        if tile.is_anticausal:
            mirrored = tile.mirrored(tile.q1, tile.k1)
            out, lse = self.forward(q.flip(2), k.flip(2), v.flip(2), mirrored, scores)
            return out.flip(2), lse.flip(2)
        value_size = v.shape[-1]
        q, k, v = _one_size(q, k, v)
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.is_causal, scale=scores.scale)
        return out[..., :value_size], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        if tile.is_anticausal:
            mirrored = tile.mirrored(tile.q1, tile.k1)
            dout, q, k, v, out, lse = (x.flip(2) for x in (dout, q, k, v, out, lse))
            dq, dk, dv = self.backward(dout, q, k, v, out, lse, mirrored, scores)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        size, value_size = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = _one_size(dout, q, k, v, out)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile.is_causal, scale=scores.scale
        )
        return dq[..., :size], dk[..., :size], dv[..., :value_size]


def _one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All with the largest head size, filled up with zeros."""
    size = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors)
