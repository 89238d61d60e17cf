"""Towers of a model that sees or hears, counted on the meta device. C channels, T tokens of the text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.plan.model.kinds import Growth, Tower
from ringspan.plan.model.measured import ATTENTION, Measured, measure
from ringspan.plan.model.media import OPTIONS, Media, Units
from ringspan.plan.model.reader import built, decoder_values
from ringspan.plan.model.shapes import ModelShape
from ringspan.torch.data.media.cuts import (
    Cut,
    FramesOfGrid,
    FramesOfVideos,
    ImagesOfExamples,
    ImagesOfTiles,
    WindowsOfSound,
    image_size_to_num_patches,
)
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.mechanisms.media.kinds import kinds
from ringspan.torch.model.layers.decoder import inner_of, layers_of, towers_of
from ringspan.torch.model.memory.checkpointing import checkpoint_all
from ringspan.torch.runtime.dtypes import dtype_named


def seeing_shape(
    values: Mapping[str, Any], name: str, media: Media, dtype: str
) -> ModelShape | None:
    """Return the shape of a config with towers, in ``dtype``, else None; raise for unknown parts or bad sizes."""
    kind = values["model_type"]
    takes = kinds().get(kind)
    maker = _maker(kind, takes)
    if maker is None:
        return None
    model = built(maker, values, name)
    if takes is not None and takes.is_prefix:
        raise UnsupportedError(
            f"{name}: a {kind} prompt sees itself both ways, and no option says how long it is; the planner does not "
            "count it; use 'ringspan rehearse'"
        )
    of_text = decoder_values(model, name)
    of_text["unsplit"] = "no model with towers is planned with tp; use tp=1"
    shape = ModelShape(name=name, config=json.dumps(dict(values)), sees=True, **of_text)
    if takes is not None:
        return _with_towers(shape, model, media, dtype, has_blocks=bool(takes.blocks))
    # Only the decoder goes on the ring.
    if media:
        raise ConfigError(
            f"{next(iter(media.values())).option}: a ring gives {name} ({kind}) text alone; leave it out"
        )
    return shape


def _maker(kind: str, takes: Kind | None) -> Any:
    """Return the class of transformers that builds a type of model with towers; None if it is a type of text."""
    if takes is None and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    of_sequences = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if kind.endswith("flamingo") or (takes is not None and of_sequences):
        return AutoModelForSeq2SeqLM
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return AutoModelForMultimodalLM
    return None


def _with_towers(
    shape: ModelShape,
    model: PreTrainedModel,
    media: Media,
    dtype: str,
    *,
    has_blocks: bool,
) -> ModelShape:
    """Add a model's towers and what they hold; ``has_blocks``: tokens of one image see each other both ways."""
    parts = towers_of(model)
    in_layers = [
        sum(p.numel() for p in layer.parameters())
        for part in parts
        for layer in layers_of(part).values()
    ]
    whole = sum(p.numel() for part in parts for p in part.parameters())
    shown = [
        (modality, media[modality.name])
        for modality in _shown(model, media, shape.name)
    ]
    in_dtype: Any = dtype_named(dtype)
    model.to(in_dtype).train()
    towers = [_tower(model, modality, units, shape.name) for modality, units in shown]
    return replace(
        shape,
        root=shape.root - sum(in_layers),
        towers=tuple(towers),
        tower_layers=tuple(in_layers),
        tower_root=whole - sum(in_layers),
        later_pairs=sum(_later_pairs(tower) for tower in towers) if has_blocks else 0,
    )


def _later_pairs(tower: Tower) -> int:
    """Count pairs with later tokens of the same image, which all see each other."""
    each = tower.tokens // tower.units
    return tower.units * each * (each - 1) // 2


def _shown(model: PreTrainedModel, media: Media, name: str) -> list[Modality]:
    modalities = {
        modality.name: modality
        for modality in kinds()[model.config.model_type].modalities
    }
    for modality, units in media.items():
        if modality not in modalities:
            takes = " and ".join(OPTIONS[each] for each in modalities)
            raise ConfigError(
                f"{units.option}: {name} ({model.config.model_type}) does not take it; it takes {takes}"
            )
    return [modalities[modality] for modality in media]


def _tower(
    model: PreTrainedModel, modality: Modality, given: Units, name: str
) -> Tower:
    """Measure the tower on a few units and extrapolate to all."""
    parts = towers_of(model)
    for part in parts:
        part.set_attn_implementation(ATTENTION)
    compute = _features(model, modality)
    units, inputs = _inputs(model, modality.cut, given)

    def run(count: int, *, count_flops: bool = False) -> Measured:
        try:
            made = {
                name: x.to(model.dtype) if x.is_meta else x
                for name, x in inputs(count).items()
            }
            return measure(model, compute, made, count_flops=count_flops)
        except (
            NotImplementedError,
            RuntimeError,
        ) as error:
            # The code asks for values, which the meta device lacks.
            raise UnsupportedError(
                f"{name}: the planner cannot run the tower of {model.config.model_type} without values: "
                f"{one_line(error)}"
            ) from error

    one = run(1, count_flops=True)
    assert one.flops is not None
    # Pixtral joins its images to one sequence under a mask, so its cost has a quadratic term.
    counts, flops = (2, 3), Growth(units=one.flops)
    if "pixtral" in [part.config.model_type for part in parts]:
        counts, two = (2, 3, 4), run(2, count_flops=True).flops
        assert two is not None
        pairs = (two - 2 * one.flops) // 2
        flops = Growth(units=one.flops - pairs, pairs=pairs)
    saved = Growth.through(*(run(count).saved_bytes for count in counts))
    for part in parts:
        if part.supports_gradient_checkpointing:
            checkpoint_all(part, {"use_reentrant": False})
    checkpointed = Growth.through(*(run(count).saved_bytes for count in counts))
    for part in parts:  # transformers before 5.2x has another name
        getattr(
            part,
            "activation_checkpointing_disable",
            part.gradient_checkpointing_disable,
        )()
    pixels = sum(each.numel() for each in inputs(1).values() if each.is_meta)
    # Only the last frame of a video is followed by a break.
    breaks = int(isinstance(modality.cut, FramesOfVideos))
    return Tower(
        modality=modality.name,
        units=units,
        tokens=units * (one.rows - breaks) + breaks,
        row=one.row,
        pixels=units * pixels,
        flops=flops,
        saved=saved,
        checkpointed=checkpointed,
        layers=sum(len(layers_of(part)) for part in parts),
    )


def _features(model: PreTrainedModel, modality: Modality) -> Callable[..., Any]:
    inner, kind = inner_of(model), kinds()[model.config.model_type]
    if isinstance(modality.cut, ImagesOfExamples):
        return partial(_idefics_images, inner)
    return (
        getattr(inner, f"get_{modality.name}_features")
        if kind.features is None
        else partial(kind.features, inner)
    )


def _idefics_images(
    inner: Any, pixel_values: Tensor, **_: object
) -> BaseModelOutputWithPooling:
    """Compute embeddings without Idefics' method, which looks at pixels for padding images."""
    side = inner.config.vision_config.patch_size
    height, width = pixel_values.shape[-2:]
    mask = torch.ones(
        len(pixel_values), height // side, width // side, dtype=torch.bool, device="cpu"
    )
    seen = inner.vision_model(
        pixel_values=pixel_values, patch_attention_mask=mask, return_dict=True
    )
    return BaseModelOutputWithPooling(
        pooler_output=inner.connector(seen.last_hidden_state)
    )


def _inputs(
    model: PreTrainedModel, cut: Cut, given: Units
) -> tuple[int, Callable[[int], dict[str, Tensor]]]:
    """Return a sequence's units, and a function from a number of units to inputs; ConfigError for a bad size."""
    config = model.config
    if isinstance(cut, WindowsOfSound):
        return given.count, partial(_windows, cut, config.audio_config)
    tower = config.vision_config
    if isinstance(cut, FramesOfGrid):
        return _frames_of_grid(cut, tower, given)
    whole = tower.image_size
    whole = (whole, whole) if isinstance(whole, int) else (*whole,)
    size = given.size or whole
    if tower.model_type == "pixtral":
        _check_multiple(
            given, size, tower.patch_size * getattr(config, "spatial_merge_size", 1)
        )
        whole = size
    elif not isinstance(cut, ImagesOfTiles) and size != whole:
        raise ConfigError(
            f"{given.option} {_shown_size(given)}: {config.model_type} takes images, or tiles, of "
            f"{whole[0]} x {whole[1]}; give their number alone"
        )
    shape = getattr(tower, "num_channels", 3), *whole
    if isinstance(cut, FramesOfVideos):
        return given.count, lambda count: {cut.pixels: _pixels(count, 1, *shape)}
    if isinstance(cut, ImagesOfTiles):
        tiles = image_size_to_num_patches(
            list(size), config.image_grid_pinpoints, whole[0]
        )
        return given.count, lambda count: {
            cut.pixels: _pixels(count, tiles, *shape),
            "image_sizes": torch.tensor([size] * count),
            "batch_num_images": torch.ones(count, dtype=torch.int64),
        }
    sizes = {"image_sizes": size} if tower.model_type == "pixtral" else {}
    return given.count, lambda count: {
        cut.pixels: _pixels(count, *shape),
        **{name: torch.tensor([each] * count) for name, each in sizes.items()},
    }


def _frames_of_grid(
    cut: FramesOfGrid, tower: PreTrainedConfig, given: Units
) -> tuple[int, Callable[[int], dict[str, Tensor]]]:
    """Return the units of images or frames of any size, and a function that gives a number of them as inputs.

    An image of h x w pixels is a grid of (h / patch) x (w / patch) patches, merged by ``spatial_merge_size``; a unit of
    a video joins ``temporal_patch_size`` frames.
    """
    side, merged = tower.patch_size, tower.patch_size * tower.spatial_merge_size
    if given.size is None:
        raise ConfigError(
            f"{given.option} {given.count}: {tower.model_type} takes any size that {merged} divides; give it too, "
            f"{given.count}x{16 * merged}x{16 * merged} say"
        )
    _check_multiple(given, given.size, merged)
    rows, columns = given.size[0] // side, given.size[1] // side
    values = getattr(tower, "in_channels", 3) * tower.temporal_patch_size * side**2
    is_video = given.option == OPTIONS["video"]
    units = -(-given.count // tower.temporal_patch_size) if is_video else given.count

    def inputs(count: int) -> dict[str, Tensor]:
        grid = [[count, rows, columns]] if is_video else [[1, rows, columns]] * count
        return {
            cut.pixels: _pixels(count * rows * columns, values),
            cut.grid: torch.tensor(grid),
        }

    return units, inputs


def _windows(
    cut: WindowsOfSound, tower: PreTrainedConfig, count: int
) -> dict[str, Tensor]:
    steps = 2 * tower.max_source_positions
    masks = {
        name: torch.ones(count, steps, dtype=torch.int64) for name in cut.names[1:]
    }
    return {cut.pixels: _pixels(count, tower.num_mel_bins, steps), **masks}


def _pixels(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _check_multiple(given: Units, size: Sequence[int], side: int) -> None:
    if any(number % side for number in size):
        near = "x".join(str(max(1, round(number / side)) * side) for number in size)
        raise ConfigError(
            f"{given.option} {_shown_size(given)}: the tower takes heights and widths that {side} divides; processors "
            f"scale to them, here to about {near}"
        )


def _shown_size(given: Units) -> str:
    return "x".join(map(str, (given.count, *(given.size or ()))))
