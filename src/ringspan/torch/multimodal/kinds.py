"""Models that take images on a ring, their inputs, and their blocks of tokens."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ringspan.torch.data.media import Media
from ringspan.torch.layers.decoder import inner_of
from ringspan.torch.layers.view import ModelView, RingModel
from ringspan.torch.multimodal import cuts


def llama4_images(
    model: Any, pixel_values: Tensor, **_: object
) -> BaseModelOutputWithPooling:
    """Compute embeddings (I, tokens, C) of images (I, channels, H, W)."""
    seen = model.get_image_features(
        pixel_values=pixel_values, return_dict=True
    ).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(seen))


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


class Modality(NamedTuple):
    name: str  # name in errors; ``get_NAME_features`` is the tower
    cut: cuts.Cut

    @property
    def token_field(self) -> str:
        return f"{self.name}_token_id"


class Kind(NamedTuple):
    modalities: tuple[Modality, ...]
    blocks: str | None = (
        None  # input whose tokens of type ``block_type`` see each other both ways
    )
    block_type: int = 1
    is_prefix: bool = (
        False  # True if a document's block is its prefix, whatever window a layer has
    )
    has_grid_positions: bool = False  # True if tokens have a time, row and column from ``get_rope_index`` (M-RoPE)
    others: tuple[str, ...] = ()  # further inputs
    features: Callable[..., Any] | None = None
    """Function of model and tower inputs, for models without a method; the ring then places embeddings."""

    @property
    def names(self) -> set[str]:
        named = {name for modality in self.modalities for name in modality.cut.names}
        return named | {*self.others} | ({self.blocks} if self.blocks else set())


_IMAGES: Final = Modality("image", cuts.Cut(("pixel_values",)))
_SIZED: Final = Modality("image", cuts.Cut(("pixel_values", "image_sizes")))
_OF_EXAMPLES: Final = Modality(
    "image", cuts.ImagesOfExamples(("pixel_values", "pixel_attention_mask"))
)
_SOUND: Final = Modality("audio", cuts.WindowsOfSound(("input_features",)))
_QWEN: Final = Kind(
    (
        Modality("image", cuts.FramesOfGrid(("pixel_values", "image_grid_thw"))),
        Modality("video", cuts.FramesOfGrid(("pixel_values_videos", "video_grid_thw"))),
    ),
    has_grid_positions=True,
    others=("mm_token_type_ids", "second_per_grid_ts"),
)
_NEWER_QWEN: Final = _QWEN._replace(others=("mm_token_type_ids",))

# Keys are model types. tests/torch/multimodal compares each with one process.
KINDS: Final[Mapping[str, Kind]] = {
    "audioflamingo3": Kind(
        (
            Modality(
                "audio", cuts.PartsOfSound(("input_features", "input_features_mask"))
            ),
        )
    ),
    "gemma3": Kind((_IMAGES,), blocks="token_type_ids"),
    "idefics3": Kind((_OF_EXAMPLES,)),
    "internvl": Kind((_IMAGES,)),
    "llama4": Kind((_IMAGES,), features=llama4_images),
    "llava": Kind((_SIZED,)),
    "llava_onevision": Kind(
        (
            Modality(
                "image",
                cuts.ImagesOfTiles(("pixel_values", "image_sizes", "batch_num_images")),
            ),
            Modality("video", cuts.FramesOfVideos(("pixel_values_videos",))),
        )
    ),
    "mistral3": Kind((Modality("image", cuts.Cut(_SIZED.cut.names, needs_all=True)),)),
    "paligemma": Kind(
        (_IMAGES,), blocks="token_type_ids", block_type=0, is_prefix=True
    ),
    "qwen2_5_vl": _QWEN,
    "qwen2_audio": Kind(
        (
            Modality(
                "audio", cuts.PartsOfSound(("input_features", "feature_attention_mask"))
            ),
        ),
        features=qwen2_audio_sound,
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
    if kind.features is None and not all(
        hasattr(view.inner, f"get_{each.name}_features") for each in kind.modalities
    ):
        return None
    return kind


def has_grid_positions(model: RingModel) -> bool:
    """Return True if image tokens of a model on a ring have a time, row and column."""
    return model.ring_media is not None and model.ring_media.has_grid_positions


def placeholder(model: RingModel, modality: Modality) -> int:
    """Return the placeholder token; -1 if the config names none (usual for Voxtral)."""
    token = getattr(model.config, modality.token_field)
    return -1 if token is None else token


Blocks = tuple[tuple[int, int], ...]


def blocks_of(kind: Kind, media: Media, lengths: Tensor | None) -> list[Blocks] | None:
    """Return each sequence's blocks [start, stop), whose tokens see each other in both directions.

    None if there are none.
    """
    # ``media`` and ``lengths`` (B, most documents) are the whole batch's; a block ends with its document.
    if kind.blocks is None or kind.blocks not in media.inputs:
        return None
    inside = media.inputs[kind.blocks].cpu() == kind.block_type
    if media.real is not None:
        inside &= media.real
    starts = inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]
    if lengths is not None:
        ends = lengths.cpu().cumsum(1)
        for row, of_row in enumerate(ends.tolist()):
            firsts = [end for end in of_row if end < inside.shape[1]]
            starts[row, firsts] = inside[row, firsts]
    found: list[Blocks] = []
    for row in range(len(inside)):
        firsts = starts[row].nonzero()[:, 0].tolist()
        sizes = torch.bincount(
            starts[row].cumsum(0)[inside[row]], minlength=len(firsts) + 1
        )[1:].tolist()
        found.append(
            tuple(
                (first, first + size) for first, size in zip(firsts, sizes, strict=True)
            )
        )
    return found if any(found) else None


def grid_positions(
    model: RingModel, kind: Kind, media: Media, lengths: Tensor | None
) -> Tensor:
    """Return each token's time, row and column (3, B, S), by the model's ``get_rope_index`` for each document."""
    inner: Any = inner_of(model)
    tokens = media.tokens
    batch, length = tokens.shape
    rows = lengths.tolist() if lengths is not None else [[length]] * batch
    documents: list[tuple[int, int, int]] = []
    for row, of_row in enumerate(rows):
        start = 0
        for each in of_row:
            if each:
                documents.append((row, start, start + each))
            start += each
    longest = max(stop - start for _, start, stop in documents)
    types = media.inputs.get("mm_token_type_ids")
    types = _types(model, kind, tokens) if types is None else types.cpu()
    real = torch.ones_like(tokens)
    if lengths is None and media.real is not None:
        # A sequence of only padding needs positions too.
        real = (media.real | ~media.real.any(1, keepdim=True)).to(tokens)
    # Tokens, types, and a mask of real tokens.
    given = tokens.new_zeros((3, len(documents), longest))
    for number, (row, start, stop) in enumerate(documents):
        given[:, number, : stop - start] = torch.stack(
            [x[row, start:stop].to(tokens) for x in (tokens, types, real)]
        )
    taken = inspect.signature(inner.get_rope_index).parameters
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {
        name: media.inputs[name].cpu()
        for name in names
        if name in taken and name in media.inputs
    }
    found, _ = inner.get_rope_index(
        given[0], mm_token_type_ids=given[1], attention_mask=given[2], **grids
    )
    positions = tokens.new_zeros((3, batch, length))
    for number, (row, start, stop) in enumerate(documents):
        positions[:, row, start:stop] = found[:, number, : stop - start]
    return positions


def _types(model: RingModel, kind: Kind, tokens: Tensor) -> Tensor:
    types = torch.zeros_like(tokens)
    for number, modality in enumerate(kind.modalities, 1):
        types[is_of(model, modality, tokens)] = number
    return types


def is_of(model: RingModel, modality: Modality, tokens: Tensor) -> Tensor:
    """Return the mask of a modality's placeholder tokens."""
    return tokens == placeholder(model, modality)
