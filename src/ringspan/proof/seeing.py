"""Small models that see, and a batch with images for them."""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ringspan.proof.around import small_around
from ringspan.proof.batches import Batch, random_tokens
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.model.layers.decoder import decoder_of, layers_of, text_config

IMAGES: Final = "images"
IMAGE_TOKEN: Final = 95
SEEING_VOCABULARY: Final = 90
"""Tokens of text of a small model that sees; those after them stand for images and videos."""
_TOKENS: Final = 4
"""Tokens of an image."""
ABOUT_FILES: Final = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
)
"""Fields of a config that say how it was saved, and not what is computed."""
_LAYERS: Final = {"hidden_size": 16, "intermediate_size": 24}
_CLIP: Final = _LAYERS | {"num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN: Final = {"depth": 2, "num_heads": 2, "patch_size": 4}


class Tower(NamedTuple):
    """A small tower of a model type: its sizes, what changes in the config around it, and the shape of an image."""

    sizes: dict[str, Any]
    image: tuple[int, ...]
    around: dict[str, Any] = {}  # noqa: RUF012
    marks: str = ""
    """The argument that marks tokens of images."""
    is_grid: bool = False
    """True if images come as patches, with a grid."""
    widths: tuple[str, ...] = ()
    """Fields with the width of the language model."""


# A grid of 4 x 4 patches of two frames, three colours and 4 x 4 pixels.
_PATCHES: Final = (16, 96)
_OF_QWEN: Final = {"image": _PATCHES, "marks": "mm_token_type_ids", "is_grid": True}
TOWERS: Final[dict[str, Tower]] = {
    "llava": Tower(_CLIP | {"image_size": 8, "patch_size": 4}, (3, 8, 8)),
    "gemma3": Tower(
        _CLIP | {"image_size": 16, "patch_size": 4},
        (3, 16, 16),
        {"mm_tokens_per_image": _TOKENS},
        "token_type_ids",
    ),
    "qwen2_vl": Tower(
        _QWEN | {"embed_dim": 16, "mlp_ratio": 2},
        **_OF_QWEN,
        widths=("hidden_size",),
    ),
    "qwen2_5_vl": Tower(
        _QWEN
        | _LAYERS
        | {
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_OF_QWEN,
        widths=("out_hidden_size",),
    ),
    "qwen3_vl": Tower(
        _QWEN
        | _LAYERS
        | {
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_OF_QWEN,
        widths=("out_hidden_size",),
    ),
}


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a config is of a model with a tower, whatever the tower is."""
    return type(config) is not type(text_config(config))


def language_layers(model: Any) -> dict[str, nn.Module]:
    """Return the layers of a model's decoder by their paths in the model, without the towers'."""
    own = {*decoder_of(model).modules()}
    return {path: layer for path, layer in layers_of(model).items() if layer in own}


def small_seeing(config: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small config around the small config of its language model; of a type in ``TOWERS`` for images too."""
    if config.model_type not in TOWERS:
        return small_around(config, text)
    tower = TOWERS[config.model_type]
    values = config.to_dict()
    vision = values["vision_config"]
    kept = {name: value for name, value in vision.items() if name not in ABOUT_FILES}
    around = {
        name: _id(name, value)
        for name, value in values.items()
        if name not in (*ABOUT_FILES, "text_config", "vision_config")
    }
    widths = dict.fromkeys(tower.widths, text.hidden_size)
    around |= tower.around | {
        "text_config": text.to_dict(),
        "vision_config": kept | tower.sizes | widths,
    }
    return type(config)(**around)


def _id(name: str, value: Any) -> Any:
    """Return a field of a config, with a token of an image or of anything else that is in the small vocabulary."""
    if not name.endswith(("token_id", "token_index")) or value is None:
        return value
    return IMAGE_TOKEN if name.startswith("image") else IMAGE_TOKEN + 1


def batch_with_images(config: PreTrainedConfig, length: int) -> Batch:
    """Return a row of text with two images in it, as a processor of a small model's type would return it."""
    tower = TOWERS[config.model_type]
    ids = random_tokens(1, length, SEEING_VOCABULARY, 8)
    for start in (3, length // 2):
        ids[0, start : start + _TOKENS] = IMAGE_TOKEN
    is_image = ids == IMAGE_TOKEN
    random = torch.Generator().manual_seed(9)
    images = torch.randn(2, *tower.image, generator=random)
    inputs: dict[str, Tensor] = {
        "input_ids": ids,
        "labels": ids.masked_fill(is_image, IGNORED),
        "pixel_values": images,
    }
    if tower.is_grid:
        inputs["pixel_values"] = images.flatten(0, 1)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    if tower.marks:
        inputs[tower.marks] = is_image.long()
    return Batch(inputs, ((0, range(length)),))
