"""Meaning of token types: blocks that see each other both ways, and places of images."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ringspan.torch.data.media import Media
from ringspan.torch.layers.decoder import inner_of
from ringspan.torch.multimodal.kinds import Kind, Modality, placeholder

Blocks = tuple[tuple[int, int], ...]


def blocks_of(kind: Kind, media: Media, lengths: Tensor | None) -> list[Blocks] | None:
    """Return the blocks [start, stop) of each sequence whose tokens see each other both ways, None if without."""
    # ``media`` and ``lengths`` (B, most documents) are the whole batch's; a block ends with its document.
    if kind.blocks is None or kind.blocks not in media.inputs:
        return None
    inside = media.inputs[kind.blocks].cpu() == kind.block_type
    if media.real is not None:
        inside &= media.real
    starts = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
    if lengths is not None:
        ends = lengths.cpu().cumsum(1)
        for row, of_row in enumerate(ends.tolist()):
            firsts = [end for end in of_row if end < inside.shape[1]]
            starts[row, firsts] = inside[row, firsts]
    found: list[Blocks] = []
    for row in range(len(inside)):
        firsts = starts[row].nonzero()[:, 0].tolist()
        sizes = torch.bincount(starts[row].cumsum(0)[inside[row]], minlength=len(firsts) + 1)[1:].tolist()
        found.append(tuple((first, first + size) for first, size in zip(firsts, sizes, strict=True)))
    return found if any(found) else None


def grid_positions(model: Any, kind: Kind, media: Media, lengths: Tensor | None) -> Tensor:
    """Compute each token's time, row and column (3, B, S) by the model's ``get_rope_index`` of each document."""
    inner, tokens = inner_of(model), media.tokens
    batch, length = tokens.shape
    rows = lengths.tolist() if lengths is not None else [[length]] * batch
    documents: list[tuple[int, int, int]] = []
    for row, of_row in enumerate(rows):
        start = 0
        for each in of_row:
            if each:
                documents.append((row, start, start + each))
            start += each
    longest = max(stop - start for _, start, stop in documents)
    types = media.inputs.get("mm_token_type_ids")
    types = _types(model, kind, tokens) if types is None else types.cpu()
    real = torch.ones_like(tokens)
    if lengths is None and media.real is not None:
        real = (media.real | ~media.real.any(1, keepdim=True)).to(tokens)  # one of padding alone has positions too
    given = tokens.new_zeros((3, len(documents), longest))  # tokens, types, and which are none
    for number, (row, start, stop) in enumerate(documents):
        given[:, number, : stop - start] = torch.stack([x[row, start:stop].to(tokens) for x in (tokens, types, real)])
    taken = inspect.signature(inner.get_rope_index).parameters
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: media.inputs[name].cpu() for name in names if name in taken and name in media.inputs}
    found, _ = inner.get_rope_index(given[0], mm_token_type_ids=given[1], attention_mask=given[2], **grids)
    positions = tokens.new_zeros((3, batch, length))
    for number, (row, start, stop) in enumerate(documents):
        positions[:, row, start:stop] = found[:, number, : stop - start]
    return positions


def _types(model: Any, kind: Kind, tokens: Tensor) -> Tensor:
    """Return 0 for text, else the number of the token's modality."""
    types = torch.zeros_like(tokens)
    for number, modality in enumerate(kind.modalities, 1):
        types[is_of(model, modality, tokens)] = number
    return types


def is_of(model: Any, modality: Modality, tokens: Tensor) -> Tensor:
    """Return the mask of a modality's placeholder tokens."""
    return tokens == placeholder(model, modality)
