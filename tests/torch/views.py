"""Every way in which a tensor (B, heads, T, size) may lie in memory, for tests of what reads it."""

from collections.abc import Callable

import torch
from torch import Tensor

_FUSED = 3  # tensors that a projection writes into one


def _slot(x: Tensor, dim: int) -> Tensor:
    """``x`` as one of several tensors stacked along a new dimension, the others NaN."""
    fused = torch.stack([torch.full_like(x, torch.nan)] * _FUSED, dim)
    fused.select(dim, 1).copy_(x)
    return fused.select(dim, 1)


def _transposed(x: Tensor, a: int, b: int) -> Tensor:
    return x.transpose(a, b).contiguous().transpose(a, b)


def _strided(x: Tensor, dim: int) -> Tensor:
    return x.repeat_interleave(2, dim)[
        (slice(None),) * (dim % x.ndim) + (slice(None, None, 2),)
    ]


def _offset(x: Tensor) -> Tensor:
    """Behind a number of other data: neither aligned nor at the start of its storage."""
    return torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape)


# By name: a view with the same numbers as ``x``. What is constant along a dimension is a view expanded along it.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x, "tokens before heads": lambda x: _transposed(x, 1, 2),
    "tokens last": lambda x: _transposed(x, 2, 3), "heads last": lambda x: _transposed(x, 1, 3),
    "batch last": lambda x: _transposed(x, 0, 3),
    "fused projection": lambda x: _slot(x.transpose(1, 2), 2).transpose(1, 2),
    "fused, numbers interleaved": lambda x: _slot(x, 4), "every other number": lambda x: _strided(x, -1),
    "every other token": lambda x: _strided(x, 2), "every other head": lambda x: _strided(x, 1), "offset": _offset,
    "expanded sequences": lambda x: x[:1].clone().expand(x.shape),
    "expanded heads": lambda x: x[:, :1].clone().expand(x.shape),
    "expanded tokens": lambda x: x[:, :, :1].clone().expand(x.shape),
    "expanded numbers": lambda x: x[..., :1].clone().expand(x.shape),
    "expanded scalar": lambda x: x[:1, :1, :1, :1].clone().expand(x.shape),
}  # fmt: skip
# The same for one number per head (H,).
VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "every other": lambda x: _strided(x, 0),
    "offset": _offset,
    "expanded": lambda x: x[:1].clone().expand(x.shape),
}


def numbers_for(view: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The numbers of ``view(x)``, which differ from those of ``x`` where it is expanded."""
    return view(x).clone(memory_format=torch.contiguous_format)
