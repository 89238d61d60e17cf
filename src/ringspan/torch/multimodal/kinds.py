"""Models that take images on a ring, their inputs, and their blocks of tokens."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ringspan.torch.layers.view import ModelView, RingModel
from ringspan.torch.multimodal.cuts import (
    Cut,
    FramesOfGrid,
    FramesOfVideos,
    ImagesOfExamples,
    ImagesOfTiles,
    PartsOfSound,
    WindowsOfSound,
)
from ringspan.torch.multimodal.features import llama4_images, qwen2_audio_sound


class Modality(NamedTuple):
    name: str
    """Name in errors; ``get_NAME_features`` is the tower."""
    cut: Cut

    @property
    def token_field(self) -> str:
        return f"{self.name}_token_id"


class Kind(NamedTuple):
    modalities: tuple[Modality, ...]
    blocks: str | None = None
    """Input whose tokens of type ``block_type`` see each other both ways."""
    block_type: int = 1
    is_prefix: bool = False
    """True if a document's block is its prefix, whatever window a layer has."""
    has_grid_positions: bool = False
    """True if tokens have a time, row and column from ``get_rope_index`` (M-RoPE)."""
    others: tuple[str, ...] = ()
    """Further inputs."""
    features: Callable[..., Any] | None = None
    """Function of model and tower inputs, for models without a method; the ring then places embeddings."""

    @property
    def names(self) -> set[str]:
        named = {name for modality in self.modalities for name in modality.cut.names}
        return named | {*self.others} | ({self.blocks} if self.blocks else set())


_IMAGES: Final = Modality("image", Cut(("pixel_values",)))
_SIZED: Final = Modality("image", Cut(("pixel_values", "image_sizes")))
_OF_EXAMPLES: Final = Modality("image", ImagesOfExamples(("pixel_values", "pixel_attention_mask")))
_SOUND: Final = Modality("audio", WindowsOfSound(("input_features",)))
_QWEN: Final = Kind(
    (
        Modality("image", FramesOfGrid(("pixel_values", "image_grid_thw"))),
        Modality("video", FramesOfGrid(("pixel_values_videos", "video_grid_thw"))),
    ),
    has_grid_positions=True,
    others=("mm_token_type_ids", "second_per_grid_ts"),
)
_NEWER_QWEN: Final = _QWEN._replace(others=("mm_token_type_ids",))

# By model type; each is held to one process by tests/torch/multimodal.
KINDS: Final[Mapping[str, Kind]] = {
    "audioflamingo3": Kind((Modality("audio", PartsOfSound(("input_features", "input_features_mask"))),)),
    "gemma3": Kind((_IMAGES,), blocks="token_type_ids"),
    "idefics3": Kind((_OF_EXAMPLES,)),
    "internvl": Kind((_IMAGES,)),
    "llama4": Kind((_IMAGES,), features=llama4_images),
    "llava": Kind((_SIZED,)),
    "llava_onevision": Kind(
        (
            Modality("image", ImagesOfTiles(("pixel_values", "image_sizes", "batch_num_images"))),
            Modality("video", FramesOfVideos(("pixel_values_videos",))),
        )
    ),
    "mistral3": Kind((Modality("image", Cut(_SIZED.cut.names, needs_all=True)),)),
    "paligemma": Kind((_IMAGES,), blocks="token_type_ids", block_type=0, is_prefix=True),
    "qwen2_5_vl": _QWEN,
    "qwen2_audio": Kind(
        (Modality("audio", PartsOfSound(("input_features", "feature_attention_mask"))),), features=qwen2_audio_sound
    ),
    "qwen2_vl": _QWEN,
    "qwen3_5": _NEWER_QWEN,
    "qwen3_5_moe": _NEWER_QWEN,
    "qwen3_vl": _NEWER_QWEN,
    "qwen3_vl_moe": _NEWER_QWEN,
    "smolvlm": Kind((_OF_EXAMPLES,)),
    "voxtral": Kind((_SOUND,)),
}


def kind_of(view: ModelView) -> Kind | None:
    kind = KINDS.get(view.model.config.model_type)
    if kind is None or not view.towers:
        return None
    if kind.features is None and not all(hasattr(view.inner, f"get_{each.name}_features") for each in kind.modalities):
        return None
    return kind


def has_grid_positions(model: RingModel) -> bool:
    """Return True if image tokens of a model on a ring have a time, row and column."""
    return model.ring_media is not None and model.ring_media.has_grid_positions


def placeholder(model: RingModel, modality: Modality) -> int:
    """Return the placeholder token; -1 if the config names none (usual for Voxtral)."""
    token = getattr(model.config, modality.token_field)
    return -1 if token is None else token
