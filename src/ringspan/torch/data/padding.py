"""Which tokens of a whole batch are padding, as its attention_mask says.

B batch, S global tokens.
"""

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError


def marked_tokens(attention_mask: Tensor) -> Tensor:
    """Where a mask of zeros and ones, of any dtype, has a one; of booleans.

    Raises:
        UnsupportedError: another value, as in masks that number documents, or that are added to scores.
    """
    real = attention_mask != 0
    if not torch.equal(real.to(attention_mask.dtype), attention_mask):
        other = attention_mask[attention_mask != real][0].item()
        raise UnsupportedError(
            f"attention_mask has {other:g}; it may have 1 for tokens and 0 for padding. Give packed documents by "
            "position_ids that start from 0 for each"
        )
    return real


def beginnings(real: Tensor) -> Tensor:
    """The tokens (B, S) that are the first of a sequence, or the first behind padding."""
    return real & torch.cat((real.new_ones(len(real), 1), ~real[:, :-1]), 1)


def behind_padding(real: Tensor, lengths: Tensor | None, said_by: str | None) -> Tensor | None:
    """The lengths of the documents of each sequence, of which padding on the left is one.

    ``said_by`` names what of the batch has said ``lengths``; None where nothing has.

    Raises:
        UnsupportedError: no document begins behind the padding, and one was to be said.
    """
    left = beginnings(real).int().argmax(1, keepdim=True)
    if not bool(left.any()):
        return lengths
    if said_by is None:
        rest = real.shape[1] - left
        return torch.cat((torch.where(left > 0, left, rest), torch.where(left > 0, rest, 0)), 1)
    if lengths is None or not bool(((lengths.cumsum(1) == left).any(1, keepdim=True) | (left == 0)).all()):
        raise UnsupportedError(
            f"{said_by} must start a document behind padding on the left, as position_ids that are 0 there; leave "
            f"{said_by} out, or the padding"
        )
    return lengths
