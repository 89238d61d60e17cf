"""Llama 4: queries of layers without rotary positions are scaled by their positions."""

from typing import Any, Final

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ringspan.torch.data.media import cuts
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.family import Factors, Family


def _scales_queries(config: Any) -> bool:
    return bool(getattr(config, "attn_temperature_tuning", False))


def _query_scale(attention: Any) -> Factors | None:
    """Return Llama 4's ``1 + attn_scale log(1 + floor((p + 1) / floor_scale))`` at position p, from 0."""
    if not getattr(attention, "attn_temperature_tuning", False):
        return None
    attention.attn_temperature_tuning = False
    if attention.use_rope:
        return None

    def factors(positions: Tensor) -> Tensor:
        steps = torch.floor((positions + 1.0) / attention.floor_scale)
        return torch.log1p(steps) * attention.attn_scale + 1.0

    return factors


def llama4_images(
    model: Any, pixel_values: Tensor, **_: object
) -> BaseModelOutputWithPooling:
    """Compute embeddings (I, tokens, C) of images (I, channels, H, W)."""
    seen = model.get_image_features(
        pixel_values=pixel_values, return_dict=True
    ).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(seen))


FAMILIES: Final = (
    Family(
        name="Llama 4",
        types=("llama4_text",),
        scales_queries=_scales_queries,
        query_scale=_query_scale,
    ),
    Family(
        name="Llama 4 with images",
        types=("llama4",),
        media=Kind(
            (Modality("image", cuts.Cut(("pixel_values",))),), features=llama4_images
        ),
    ),
)
