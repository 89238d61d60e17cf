"""Dory: queries scaled by channel after they are rotated, and layers that run several times in a pass."""

from typing import Final

from transformers import PreTrainedConfig

from ringspan.torch.model.layers.family import Family


def _no_cache(config: PreTrainedConfig) -> str:
    if getattr(config, "n_recurrent_loops", 1) == 1:
        return ""
    return "layers run several times in a pass, with keys of their own each time"


FAMILIES: Final = (
    Family(name="Dory", types=("dory",), counts_distances=False, no_cache=_no_cache),
)
