"""DeepSeek-V3.2 and its kin: an index over latent attention (DSA)."""

from typing import Final

from ringspan.torch.model.layers.family import ChosenKeys, Family

FAMILIES: Final = (
    Family(
        name="DeepSeek-V3.2",
        types=("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa"),
        index=ChosenKeys(learns=True),
    ),
    Family(
        name="HY-V4",
        types=("hy_v4",),
        index=ChosenKeys(learns=True, rotates_last=True),
    ),
    Family(
        name="HY-V4-VL",
        types=("hy_v4_vl_text",),
        index=ChosenKeys(rotates_last=True),
    ),
)
