"""Blockwise attention in plain PyTorch: any tile, dtype, device and pair of head sizes, in bounded memory.

The maths of FlashAttention (Dao et al. 2022) over chunks of rows and keys; it is what runs where no fast kernel serves.
B batch, H query heads, G key/value heads, P = H / G query heads a group, D head size, E value head size.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ringspan.core.tile import Tile
from ringspan.torch.kernels.launch import Launch, Launches, bands
from ringspan.torch.scores import Scores

_ROWS: Final = 256
_KEYS: Final = 1024


class Blockwise:
    """Scores of at most ``_ROWS x _KEYS`` a head exist at any time; chunks outside of the band are never touched."""

    name = "reference"

    def why_not(self, q: Tensor, v: Tensor, scores: Scores) -> str | None:
        return None

    def launches(self, tiles: tuple[Tile, ...]) -> Launches:
        return bands(tiles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> tuple[Tensor, Tensor]:
        tile = launch.tile
        dtype = torch.promote_types(q.dtype, torch.float32)
        grouped = _group(q, k)
        out = torch.zeros(*grouped.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.full(grouped.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        for rows, keys in _chunks(tile):
            s, _ = _scores(grouped[..., rows, :], k[:, :, None, keys], tile, rows, keys, scores, dtype)
            new_lse = torch.logaddexp(lse[..., rows], s.logsumexp(-1))
            # A row may see nothing in this chunk, and nothing so far: exp(-inf - 0) is the 0 that it should be.
            base = new_lse.masked_fill(new_lse == -torch.inf, 0.0).unsqueeze(-1)
            kept = (lse[..., rows].unsqueeze(-1) - base).exp_()
            out[..., rows, :] *= kept
            out[..., rows, :] += (s - base).exp_() @ v[:, :, None, keys].to(dtype)
            lse[..., rows] = new_lse
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        tile = launch.tile
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_groups, dout_groups, out_groups = _group(q, k), _group(dout, k), _group(out, k)
        lse_groups = lse.unflatten(1, q_groups.shape[1:3]).unsqueeze(-1)
        dq, dk, dv = (torch.zeros(like.shape, dtype=dtype, device=q.device) for like in (q_groups, k, v))
        for rows, keys in _chunks(tile):
            q_rows, dout_rows = q_groups[..., rows, :].to(dtype), dout_groups[..., rows, :].to(dtype)
            k_keys, v_keys = k[:, :, None, keys].to(dtype), v[:, :, None, keys].to(dtype)
            s, slope = _scores(q_rows, k_keys, tile, rows, keys, scores, dtype)
            p = (s - lse_groups[..., rows, :]).exp_()
            delta = (dout_rows * out_groups[..., rows, :].to(dtype)).sum(-1, keepdim=True)
            ds = (dout_rows @ v_keys.mT).sub_(delta).mul_(p).mul_(scores.scale)
            if slope is not None:
                ds *= slope
            dq[..., rows, :] += ds @ k_keys
            dk[:, :, keys] += (ds.mT @ q_rows).sum(2)
            dv[:, :, keys] += (p.mT @ dout_rows).sum(2)
        return dq.flatten(1, 2), dk, dv


def _chunks(tile: Tile) -> Iterator[tuple[slice, slice]]:
    """Chunks of rows and keys that the band touches."""
    for row in range(0, tile.num_rows, _ROWS):
        stop = min(row + _ROWS, tile.num_rows)
        first, last = max(0, row - tile.hi), min(tile.num_keys, stop - tile.lo)
        for key in range(first, last, _KEYS):
            yield slice(row, stop), slice(key, min(key + _KEYS, last))


def _group(heads: Tensor, kv: Tensor) -> Tensor:
    """(B, H, rows, D) -> (B, G, P, rows, D)."""
    return heads.unflatten(1, (kv.shape[1], -1))


def _scores(
    q: Tensor, k: Tensor, tile: Tile, rows: slice, keys: slice, scores: Scores, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scores of a chunk with -inf outside of the band, and their derivative by the scaled product unless it is 1.

    Shape (B, G, P, rows, keys).
    """
    s = (q.to(dtype) @ k.to(dtype).mT).mul_(scores.scale)
    slope = None
    if scores.softcap:
        s = s.div_(scores.softcap).tanh_()
        slope = 1 - s * s
        s = s.mul_(scores.softcap)
    if scores.slopes is not None:
        assert scores.query_positions is not None and scores.key_positions is not None, "slopes need positions"
        distance = (scores.query_positions[rows, None] - scores.key_positions[keys]).abs_()
        slopes = scores.slopes.to(dtype).view(k.shape[1], -1, 1, 1)
        s = s.sub_(distance.to(dtype) * slopes)
    if not tile.is_full:
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)
        s = s.masked_fill_((i - j < tile.lo) | (i - j > tile.hi), -torch.inf)
    return s, slope
