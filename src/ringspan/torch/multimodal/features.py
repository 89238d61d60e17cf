"""Embeddings of models that make them inside their forward pass, without a method."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling


def llama4_images(model: Any, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPooling:
    """Compute embeddings (I, tokens, C) of images (I, channels, H, W)."""
    seen = model.get_image_features(pixel_values=pixel_values, return_dict=True).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(seen))


def qwen2_audio_sound(
    model: Any, input_features: Tensor, feature_attention_mask: Tensor, **_: object
) -> BaseModelOutputWithPooling:
    """Compute embeddings (tokens, C) of sound windows (W, bins, steps), without padding."""
    tower = model.audio_tower
    halved, lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    steps = torch.arange((input_features.shape[-1] - 2) // 2 + 1, device=halved.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_empty((len(input_features), len(steps), 1)),
        attention_mask=(steps < halved[:, None]).long(),
    )
    rows = model.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
    real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    return BaseModelOutputWithPooling(pooler_output=rows[real])
