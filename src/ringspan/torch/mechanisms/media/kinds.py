"""Models that take images on a ring, their inputs, and their blocks of tokens."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ringspan.core.geometry.layer_mask import Blocks
from ringspan.torch.data.media.inputs import Media
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.decoder import inner_of
from ringspan.torch.model.layers.family import families, family_of
from ringspan.torch.model.layers.view import ModelView, RingModel


def kinds() -> dict[str, Kind]:
    """Return what each model type that sees or hears takes."""
    return {name: family.media for name, family in families().items() if family.media}


def kind_of(view: ModelView) -> Kind | None:
    """Return the images or sound that a model takes on a ring; None if it takes none."""
    kind = family_of(view.model.config).media
    if kind is None or not view.towers:
        return None
    if kind.features is None and not all(
        hasattr(view.inner, f"get_{each.name}_features") for each in kind.modalities
    ):
        return None
    return kind


def has_grid_positions(model: RingModel) -> bool:
    """Return True if image tokens of a model on a ring have a time, row and column."""
    return model.ring_media is not None and model.ring_media.has_grid_positions


def placeholder(model: RingModel, modality: Modality) -> int:
    """Return the placeholder token; -1 if the config names none (usual for Voxtral)."""
    token = getattr(model.config, modality.token_field)
    return -1 if token is None else token


def blocks_of(kind: Kind, media: Media, lengths: Tensor | None) -> list[Blocks] | None:
    """Return each sequence's blocks [start, stop), whose tokens see each other in both directions.

    None if there are none.
    """
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
        sizes = torch.bincount(
            starts[row].cumsum(0)[inside[row]], minlength=len(firsts) + 1
        )[1:].tolist()
        found.append(
            tuple(
                (first, first + size) for first, size in zip(firsts, sizes, strict=True)
            )
        )
    return found if any(found) else None


def grid_positions(
    model: RingModel, kind: Kind, media: Media, lengths: Tensor | None
) -> Tensor:
    """Return each token's time, row and column (3, B, S), by the model's ``get_rope_index`` for each document."""
    inner: Any = inner_of(model)
    tokens = media.tokens
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
        # A sequence of only padding needs positions too.
        real = (media.real | ~media.real.any(1, keepdim=True)).to(tokens)
    # Tokens, types, and a mask of real tokens.
    given = tokens.new_zeros((3, len(documents), longest))
    for number, (row, start, stop) in enumerate(documents):
        given[:, number, : stop - start] = torch.stack(
            [x[row, start:stop].to(tokens) for x in (tokens, types, real)]
        )
    taken = inspect.signature(inner.get_rope_index).parameters
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {
        name: media.inputs[name].cpu()
        for name in names
        if name in taken and name in media.inputs
    }
    found, _ = inner.get_rope_index(
        given[0], mm_token_type_ids=given[1], attention_mask=given[2], **grids
    )
    positions = tokens.new_zeros((3, batch, length))
    for number, (row, start, stop) in enumerate(documents):
        positions[:, row, start:stop] = found[:, number, : stop - start]
    return positions


def _types(model: RingModel, kind: Kind, tokens: Tensor) -> Tensor:
    types = torch.zeros_like(tokens)
    for number, modality in enumerate(kind.modalities, 1):
        types[is_of(model, modality, tokens)] = number
    return types


def is_of(model: RingModel, modality: Modality, tokens: Tensor) -> Tensor:
    """Return the mask of a modality's placeholder tokens."""
    return tokens == placeholder(model, modality)
