"""Which models see images on a ring, how each of them takes them, and whose tokens see each other."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ringspan.torch.multimodal.cuts import Cut, FramesOfGrid, FramesOfVideos, ImagesOfExamples, ImagesOfTiles


class Modality(NamedTuple):
    """One kind of inputs that a tower makes embeddings of."""

    name: str
    """What errors call one of them; ``get_NAME_features`` is the tower."""
    cut: Cut

    @property
    def token_field(self) -> str:
        """Where the config says which token stands for an embedding."""
        return f"{self.name}_token_id"


class Kind(NamedTuple):
    """How models of one type take images."""

    modalities: tuple[Modality, ...]
    blocks: str | None = None
    """The input whose tokens of type ``block_type`` see each other both ways."""
    block_type: int = 1
    has_grid_positions: bool = False
    """Whether tokens have a time, a row and a column, which the model's ``get_rope_index`` gives (M-RoPE)."""
    first_position: int = 0
    others: tuple[str, ...] = ()
    """Further inputs."""

    @property
    def names(self) -> set[str]:
        """All inputs that it takes."""
        named = {name for modality in self.modalities for name in modality.cut.names}
        return named | {*self.others} | ({self.blocks} if self.blocks else set())


_IMAGES: Final = Modality("image", Cut(("pixel_values",)))
_SIZED: Final = Modality("image", Cut(("pixel_values", "image_sizes")))
_OF_EXAMPLES: Final = Modality("image", ImagesOfExamples(("pixel_values", "pixel_attention_mask")))
_QWEN: Final = Kind(
    (
        Modality("image", FramesOfGrid(("pixel_values", "image_grid_thw"))),
        Modality("video", FramesOfGrid(("pixel_values_videos", "video_grid_thw"))),
    ),
    has_grid_positions=True,
    others=("mm_token_type_ids", "second_per_grid_ts"),
)

# By model type; each is held to one process by tests/torch/multimodal.
KINDS: Final[Mapping[str, Kind]] = {
    "gemma3": Kind((_IMAGES,), blocks="token_type_ids"),
    "idefics3": Kind((_OF_EXAMPLES,)),
    "internvl": Kind((_IMAGES,)),
    "llava": Kind((_SIZED,)),
    "llava_onevision": Kind(
        (
            Modality("image", ImagesOfTiles(("pixel_values", "image_sizes", "batch_num_images"))),
            Modality("video", FramesOfVideos(("pixel_values_videos",))),
        )
    ),
    "mistral3": Kind((_SIZED,)),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN._replace(others=("mm_token_type_ids",)),
    "smolvlm": Kind((_OF_EXAMPLES,)),
}


def kind_of(model: PreTrainedModel) -> Kind | None:
    """How a model takes images on a ring; None for one that takes none there."""
    kind = KINDS.get(model.config.model_type)
    if kind is None or not all(hasattr(inner_of(model), f"get_{each.name}_features") for each in kind.modalities):
        return None
    return kind


def inner_of(model: PreTrainedModel) -> Any:
    """The model below the head, which has the towers and the decoder."""
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def towers_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models beside the decoder."""
    inner = inner_of(model)
    decoder: nn.Module = inner.get_decoder()
    return [child for child in inner.children() if isinstance(child, PreTrainedModel) and child is not decoder]


def placeholder(model: Any, modality: Modality) -> int:
    """The token that stands for an embedding."""
    return getattr(model.config, modality.token_field)
