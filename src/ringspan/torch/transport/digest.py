"""Digests of tensors, by which ranks find out that they do not have the same."""

import torch
from torch import Tensor

# Odd 64-bit constants of a multiplicative hash (splitmix64), as signed numbers.
_SPREAD, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def digest_integers(x: Tensor | None) -> Tensor:
    """A number that depends on every entry of an integer tensor, its place and the shape: int64, on its device.

    -1 when there is no tensor. Computed where the tensor is, so that nothing waits for a device.
    """
    if x is None:
        return torch.tensor(-1)
    place = torch.arange(1, x.numel() + 1, device=x.device).mul_(_SPREAD)
    mixed = place.add_(x.reshape(-1)).mul_(_MIX)
    mixed ^= mixed >> 31
    return mixed.mul_(_SPREAD).sum() + sum(size * _MIX ** (i + 1) % (1 << 62) for i, size in enumerate(x.shape))


def described(x: Tensor) -> str:
    """A tensor as ranks compare it in words: its shape, and a number that depends on its bytes."""
    return f"{tuple(x.shape)} digest {digest_values(x) % (1 << 64):016x}"


_ROW = 4096


def digest_values(x: Tensor) -> int:
    """A number that depends on a tensor's bytes and where they are, made as quickly as memory is read: of the bytes in
    words of eight or less, in rows of 4,096, it is the digest of the sums of rows and of columns.
    """
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not flat.numel() % dtype.itemsize and not flat.storage_offset() % dtype.itemsize:
            flat = flat.view(dtype)
            break
    rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = flat[rows.numel() :].to(torch.int64)
    sums = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest
    return int(digest_integers(torch.cat(sums)))
