"""Masks of new tokens, by kind of layer and sequence, with padding anywhere; positions count it, as in transformers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ringspan.core.geometry.mask import UNBOUNDED, Mask, Region, causal, sliding_window
from ringspan.core.geometry.shares import Runs
from ringspan.torch.layers.decoder import LayerKind
from ringspan.torch.multimodal.token_types import Blocks


def real_runs(attention_mask: Tensor) -> tuple[Runs, ...]:
    """Return the runs (start, count) of ones of each sequence of a mask (B, S)."""
    edges = torch.nn.functional.pad(attention_mask.bool().int(), (1, 1)).diff(dim=1)
    found: list[Runs] = []
    for row in edges:
        starts, ends = ((row == sign).nonzero().flatten().tolist() for sign in (1, -1))
        found.append(tuple((start, end - start) for start, end in zip(starts, ends, strict=True)))
    return tuple(found)


def layer_masks(
    kind: LayerKind, start: int, length: int, real: Sequence[Runs] | None, blocks: Sequence[Blocks] | None
) -> tuple[Mask, ...]:
    """Return ``layer_mask`` of each sequence, or one if all agree. Tokens of a block see its later ones too."""
    rows = len(real or blocks or (None,))
    masks: list[Mask] = []
    for runs, of_row in zip(real or [None] * rows, blocks or [()] * rows, strict=True):
        before = layer_mask(kind, start, length, runs)
        masks.append(Mask((*before.regions, *(Region(one, end, one, end, hi=-1) for one, end in of_row))))
    return tuple(masks)


def layer_mask(kind: LayerKind, start: int, length: int, real: Runs | None) -> Mask:
    """Return the mask of queries at [start, length) over keys at [0, length): of ``real`` runs, all if None."""
    if real is None and kind.chunk is None:
        return causal() if kind.window is None else sliding_window(kind.window)
    hi = UNBOUNDED if kind.window is None else kind.window - 1
    regions = [
        Region(q0, q1, max(k0, first), min(k1, first + count), 0, hi)
        for q0, q1, k0, k1 in _chunks(kind.chunk, start, length, real)
        for first, count in (((0, UNBOUNDED),) if real is None else real)
    ]
    return Mask(tuple(region for region in regions if not region.is_empty))


def _chunks(size: int | None, start: int, length: int, real: Runs | None) -> list[tuple[int, int, int, int]]:
    """Return queries and keys by chunk, counted from the first token after left padding."""
    if size is None:
        return [(0, UNBOUNDED, 0, UNBOUNDED)]
    origin = real[0][0] if real else 0
    first = origin + (start - origin) // size * size
    edges = range(first, length + size, size)
    return [(one, other, one, other) for one, other in pairwise(edges)]
