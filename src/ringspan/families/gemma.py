"""Gemma 3 and PaliGemma, whose image tokens see each other both ways, and Gemma 3n."""

from typing import Final

from ringspan.torch.data.media import cuts
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.family import Family

_IMAGES: Final = Modality("image", cuts.Cut(("pixel_values",)))


FAMILIES: Final = (
    Family(
        name="Gemma 3",
        types=("gemma3",),
        media=Kind((_IMAGES,), blocks="token_type_ids"),
    ),
    Family(
        name="PaliGemma",
        types=("paligemma",),
        media=Kind((_IMAGES,), blocks="token_type_ids", block_type=0, is_prefix=True),
    ),
    Family(
        name="Gemma 3n",
        types=("gemma3n_text",),
        no_tp="its AltUp reads the weights of a projection itself",
    ),
)
