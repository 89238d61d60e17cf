"""Rotary positions on a ring: tables made block by block, with the frequencies of the whole sequence.

Dynamic and longrope scaling choose frequencies by the largest position, so a rank is shown the whole sequence's last.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringspan.torch.model.layers.modules import mix_in

# Positions per block: only one block's float32 tables exist at a time.
_CHUNK_TOKENS: Final = 4096


def chunk_rotary_tables(model: PreTrainedModel) -> None:
    """Let the modules from ``(x, position_ids)`` to cosines and sines (B, T, D) run in blocks of tokens, in place."""
    found = [module for module in model.modules() if is_rotary(module)]
    for module in found:
        mix_in(module, _ChunkedTables, rotary_length=None)
    # Every pass tells them the length: a list saves it a walk through all modules.
    vars(model)["ring_rotary"] = found


def set_global_length(model: PreTrainedModel, length_tokens: int) -> None:
    """Tell the tables of a decoder on a ring the length of the whole sequence."""
    for module in vars(model)["ring_rotary"]:
        module.rotary_length = length_tokens


def is_rotary(module: nn.Module) -> bool:
    """Return True if a module maps positions (B, T) to cosines and sines (B, T, D) and is not chunked yet.

    It has a buffer of inverse frequencies, and is called on three positions to see what it returns.
    """
    names = [
        name
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    if not names or isinstance(module, _ChunkedTables):
        return False
    buffer = getattr(module, names[0])
    # A module on the meta device cannot be tried; its buffer decides.
    if buffer.is_meta:
        return True
    # Gemma 3 has a table for each kind of layer, and takes the kind's name as an argument.
    kinds = {
        name.removesuffix("original_inv_freq")
        .removesuffix("inv_freq")
        .removesuffix("_")
        for name in names
    }
    positions = torch.arange(3, device=buffer.device).unsqueeze(0)
    try:
        for kind in kinds:
            tables = module(
                torch.zeros(1, device=buffer.device),
                positions,
                *([kind] if kind else []),
            )
            if len(tables) != 2 or any(
                table.ndim != 3 or table.shape[:2] != (1, 3) for table in tables
            ):
                return False
    except Exception:  # It takes other arguments.
        return False
    return True


class _ChunkedTables(nn.Module):
    rotary_length: int | None

    def forward(
        self: Any, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D) of positions (B, T), or (3, B, T) in Qwen 3.5; equal rows share memory."""
        rows = position_ids.shape[-2]
        # All sequences usually have the same positions, and share one table.
        alike = rows > 1 and bool((position_ids == position_ids[..., :1, :]).all())
        positions = position_ids[..., :1, :] if alike else position_ids
        length = (
            int(positions.max()) + 1
            if self.rotary_length is None
            else self.rotary_length
        )
        # Dynamic scaling and longrope choose frequencies by the largest position they see: the whole sequence's last.
        last = positions.new_full((*positions.shape[:-1], 1), length - 1)
        tables: list[Tensor] = []
        for start in range(0, max(1, positions.shape[-1]), _CHUNK_TOKENS):
            # Padding has positions after the end, which would pass for a longer sequence.
            part = positions[..., start : start + _CHUNK_TOKENS].clamp_max(length - 1)
            made = super().forward(x, torch.cat((part, last), -1), *args, **kwargs)
            tables = tables or [
                table.new_empty((*positions.shape[-2:], table.shape[-1]))
                for table in made
            ]
            for table, new in zip(tables, made, strict=True):
                table[:, start : start + part.shape[-1]] = new[:, :-1]
        cos, sin = (table.expand(rows, -1, -1) if alike else table for table in tables)
        return cos, sin
