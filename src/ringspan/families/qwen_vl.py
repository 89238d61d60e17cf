"""Qwen2-VL to Qwen3.5: image tokens have a time, a row and a column (M-RoPE)."""

from typing import Final

from ringspan.torch.data.media import cuts
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.family import Family

_QWEN: Final = Kind(
    (
        Modality("image", cuts.FramesOfGrid(("pixel_values", "image_grid_thw"))),
        Modality("video", cuts.FramesOfGrid(("pixel_values_videos", "video_grid_thw"))),
    ),
    has_grid_positions=True,
    others=("mm_token_type_ids", "second_per_grid_ts"),
)
_NEWER: Final = _QWEN._replace(others=("mm_token_type_ids",))


FAMILIES: Final = (
    Family(name="Qwen2-VL", types=("qwen2_vl", "qwen2_5_vl"), media=_QWEN),
    Family(
        name="Qwen3-VL",
        types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        media=_NEWER,
    ),
)
