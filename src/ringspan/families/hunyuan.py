"""HunYuan and BEAM, which normalise rotated queries and keys, or scale queries by their positions."""

from typing import Final

from ringspan.torch.model.layers.family import Family

FAMILIES: Final = (
    Family(name="BEAM", types=("beam",), counts_distances=False),
    Family(
        name="HunYuan",
        types=(
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hunyuan_vl",
            "hunyuan_vl_text",
        ),
        counts_distances=False,
    ),
)
