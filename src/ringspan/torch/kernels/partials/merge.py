"""The merge rule of ``ringspan.core.softmax`` in plain PyTorch; ``triton_merge`` has it as one pass."""

import torch
from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge in place: (out, lse) <- (out, lse) + (new_out, new_lse), shapes (B, H, rows, E) and (B, H, rows)."""
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0).to(out.dtype)  # two rows that saw nothing: -inf less -inf
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)
