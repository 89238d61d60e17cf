"""Digests of tensors, to detect differences between ranks."""

import torch
from torch import Tensor

# Odd 64-bit constants of a multiplicative hash (splitmix64), as signed numbers.
_SPREAD, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def digest_integers(x: Tensor | None) -> Tensor:
    """Return an int64 on x's device that depends on an integer tensor's entries, places and shape; -1 for None."""
    if x is None:
        return torch.tensor(-1)
    place = torch.arange(1, x.numel() + 1, device=x.device).mul_(_SPREAD)
    mixed = place.add_(x.reshape(-1)).mul_(_MIX)
    mixed ^= mixed >> 31
    return mixed.mul_(_SPREAD).sum() + sum(
        size * _MIX ** (i + 1) % (1 << 62) for i, size in enumerate(x.shape)
    )


def described(x: Tensor) -> str:
    return f"{tuple(x.shape)} digest {digest_values(x) % (1 << 64):016x}"


_ROW = 4096


def digest_values(x: Tensor) -> int:
    """Digest a tensor's bytes and places: row and column sums of words, in rows of 4,096."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if (
            not flat.numel() % dtype.itemsize
            and not flat.storage_offset() % dtype.itemsize
        ):
            flat = flat.view(dtype)
            break
    rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = flat[rows.numel() :].to(torch.int64)
    sums = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest
    return int(digest_integers(torch.cat(sums)))
