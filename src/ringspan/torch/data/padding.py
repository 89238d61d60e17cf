"""Padding tokens of a whole batch, from its attention_mask."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError

# The label of a token without a target, as in transformers and torch.
IGNORED: Final = -100
FILLER: Final = 1  # the token of padding: an embedding of 0 may begin as a zero vector, where lengths have no gradient


def marked_tokens(attention_mask: Tensor) -> Tensor:
    """Convert a mask of zeros and ones to booleans; UnsupportedError for others (documents, additive)."""
    real = attention_mask != 0
    if not torch.equal(real.to(attention_mask.dtype), attention_mask):
        other = attention_mask[attention_mask != real][0].item()
        raise UnsupportedError(
            f"attention_mask has {other:g}; it may have 1 for tokens and 0 for padding. Give packed documents by "
            "position_ids that start from 0 for each"
        )
    return real


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tokens (B, S) that are not padding, None if all; UnsupportedError for holes."""
    mask, shape = batch.get("attention_mask"), tuple(batch["input_ids"].shape)
    if mask is None:
        return None
    if mask.shape != shape:
        raise UnsupportedError(
            f"attention_mask has shape {tuple(mask.shape)}, a ring takes {shape} as of input_ids: 1 for tokens, 0 for "
            "padding. Give packed documents by position_ids that start from 0 for each; other masks are for attention "
            "by itself, rs.ring_attention(q, k, v, mask=...)"
        )
    real = marked_tokens(mask)
    again = beginnings(real).int()
    if bool((again.sum(1) > 1).any()):
        row = int((again.sum(1) > 1).int().argmax())
        first, then = again[row].nonzero()[:2, 0].tolist()
        hole = first + int(real[row, first:].int().argmin())
        raise UnsupportedError(
            f"attention_mask[{row}, {hole}:{then}] is 0 between tokens, and it may only mark padding left or right of "
            "the tokens of each sequence; leave these tokens out of the row, or give them 1 and, where they are not "
            "to be learnt, labels of -100. Keep documents apart by position_ids that start from 0 for each"
        )
    return real


def refuse_targets_of_padding(
    has_target: Tensor, real: Tensor | None, name: str, shift: int
) -> None:
    """Raise UnsupportedError for targets (B, S) of padding.

    The error names the key ``name``, whose entries are ``shift`` on.
    """
    if real is None or not bool((of_padding := has_target & ~real).any()):
        return
    row, place = of_padding.nonzero()[0].tolist()
    remedy = f"set {name}[attention_mask == 0] = -100"
    if shift and bool(real[row, place:].any()):
        remedy = (
            f"pad on the right (tokenizer.padding_side = 'right'), or set {name} to -100 up to the first token behind "
            "padding"
        )
    raise UnsupportedError(
        f"{name}[{row}, {place + shift}] would be predicted from padding: attention_mask[{row}, {place}] is 0; {remedy}"
    )


def beginnings(real: Tensor) -> Tensor:
    """Return the tokens (B, S) that are first in a sequence or after padding."""
    return real & torch.cat((real.new_ones(len(real), 1), ~real[:, :-1]), 1)


def behind_padding(
    real: Tensor, lengths: Tensor | None, said_by: str | None
) -> Tensor | None:
    """Return document lengths with left padding as a document; UnsupportedError if ``lengths`` lack its end."""
    left = beginnings(real).int().argmax(1, keepdim=True)
    if not bool(left.any()):
        return lengths
    if said_by is None:
        rest = real.shape[1] - left
        return torch.cat(
            (torch.where(left > 0, left, rest), torch.where(left > 0, rest, 0)), 1
        )
    if lengths is None or not bool(
        ((lengths.cumsum(1) == left).any(1, keepdim=True) | (left == 0)).all()
    ):
        raise UnsupportedError(
            f"{said_by} must start a document behind padding on the left, as position_ids that are 0 there; leave "
            f"{said_by} out, or the padding"
        )
    return lengths
