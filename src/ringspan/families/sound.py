"""Models that hear: Audio Flamingo 3, Qwen2-Audio and Voxtral."""

from typing import Any, Final

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ringspan.torch.data.media import cuts
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.family import Family

_PARTS: Final = Modality(
    "audio", cuts.PartsOfSound(("input_features", "input_features_mask"))
)
_MASKED: Final = Modality(
    "audio", cuts.PartsOfSound(("input_features", "feature_attention_mask"))
)
_WINDOWS: Final = Modality("audio", cuts.WindowsOfSound(("input_features",)))


def qwen2_audio_sound(
    model: Any, input_features: Tensor, feature_attention_mask: Tensor, **_: object
) -> BaseModelOutputWithPooling:
    """Compute embeddings (tokens, C) of sound windows (W, bins, steps), without padding."""
    tower = model.audio_tower
    halved, lengths = tower._get_feat_extract_output_lengths(
        feature_attention_mask.sum(-1)
    )
    steps = torch.arange((input_features.shape[-1] - 2) // 2 + 1, device=halved.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_empty((len(input_features), len(steps), 1)),
        attention_mask=(steps < halved[:, None]).long(),
    )
    rows = model.multi_modal_projector(
        tower(input_features, attention_mask=mask).last_hidden_state
    )
    real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    return BaseModelOutputWithPooling(pooler_output=rows[real])


FAMILIES: Final = (
    Family(name="Audio Flamingo 3", types=("audioflamingo3",), media=Kind((_PARTS,))),
    Family(
        name="Qwen2-Audio",
        types=("qwen2_audio",),
        media=Kind((_MASKED,), features=qwen2_audio_sound),
    ),
    Family(name="Voxtral", types=("voxtral",), media=Kind((_WINDOWS,))),
)
