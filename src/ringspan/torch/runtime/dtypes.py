"""Dtypes by the names that files and options have for them."""

import torch


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.NAME``, for a name that has been checked."""
    return getattr(torch, name)
