"""Small configs of what models that see or hear have around their language model: towers, projectors, codecs."""

import re
from collections.abc import Iterator
from typing import Any, Final

from transformers import PreTrainedConfig

from ringspan.torch.model.layers.decoder import text_config

_SHARE: Final = 16
"""Times that a tower becomes narrower."""
_NARROWEST: Final = 128
"""Width from which one is made narrower."""
_MOST_HEADS: Final = 2
_GROUPED: Final = 32
"""Channels of codecs that have as many groups."""
_DROPOUT: Final = re.compile(
    r"(drop|dropout|dropout_prob|pdrop|layerdrop|jitter_noise)$"
)
_LAYERS: Final = re.compile(r"(num.*layers|depth|num_blocks|n_layers|encoder_layers)$")
_WIDTHS: Final = re.compile(r"(size|dim|width|d_model|out_channels?)$")
_CLIP: Final = {
    "hidden_size": 128,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "model_type": "clip_vision_model",
}
_CODES: Final = {"vocabulary_map": {"<image>": 95}}
# Sizes that have to fit each other in a way of a type's own.
_PARTS: Final[dict[str, dict[str, Any]]] = {
    "apertus1p5": {
        "image_token_offset": 40,
        "audio_token_offset": 56,
        "image_token_id": 90,
        "audio_token_id": 91,
    },
    "apertus1p5_vision_tokenizer": {"codebook_size": 16},
    **dict.fromkeys(("chameleon", "emu3"), _CODES),
    "dots3_note_vision_encoder": {"per_layer_config": {}, "mlp_layer_types": ["dense"]},
    "granite4_vision": {
        "vision_config": _CLIP,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "mimi": {"upsample_groups": 32},
    "muse_spark_audio": {
        "num_hidden_layers": 1,
        "patch_sizes": [16],
        "hidden_sizes": [32],
        "depths": [1],
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "wavtokenizer_encoder": {"decoder_attention_num_groups": 2, "codebook_size": 16},
}


def small_around(usual: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config like the usual one, a sixteenth as wide, around a small config of its language model."""
    given = text_config(usual)
    if type(usual) is type(given):
        return text
    sizes = sizes_of(given, text)
    values = _small_fields(usual, sizes)
    same = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    values |= {name: size for name, size in same.items() if name in values}
    for name, part in parts_of(usual):
        holds_text = any(each is given for each in _nested(part))
        small = small_around(part, text) if holds_text else narrower(part, sizes)
        values[name] = small.to_dict()
    return type(usual)(**values | _PARTS.get(usual.model_type, {}))


def sizes_of(given: PreTrainedConfig, small: PreTrainedConfig) -> dict[int, int]:
    """Return a language model's width and vocabulary, as given and small."""
    names = ("hidden_size", "vocab_size")
    return {getattr(given, name, 0): getattr(small, name, 0) for name in names}


def parts_of(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the configs inside of a config, and their names."""
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield name, part


def _nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for _, part in parts_of(config):
        yield from _nested(part)


def narrower(usual: PreTrainedConfig, sizes: dict[int, int]) -> PreTrainedConfig:
    """Return a tower's config with a layer and a sixteenth of its width."""
    values = _small_fields(usual, sizes)
    for name, part in parts_of(usual):
        values[name] = narrower(part, sizes).to_dict()
    return type(usual)(**values | _PARTS.get(usual.model_type, {}))


def _small_fields(usual: PreTrainedConfig, sizes: dict[int, int]) -> dict[str, Any]:
    """Return a config's own fields, with small numbers of layers, heads and widths: multiples stay multiples.

    ``sizes``: widths and vocabularies of the language model, as given and small.
    """
    values: dict[str, Any] = {}
    for name, value in usual.to_dict().items():
        if not _has(usual, name) or not can_set(usual, name):
            continue
        if _DROPOUT.search(name):
            values[name] = value and type(value)(0)
        elif isinstance(value, list) and name.endswith(("_layer", "_indexes")):
            # The last layer of a tower, which has one, or the first.
            values[name] = [-1 if name.endswith("_layer") else 0] * len(value)
        elif type(value) in (bool, float, str) or name.endswith(("_id", "_index")):
            values[name] = value
        elif type(value) is int:
            values[name] = sizes.get(value) or _small(name, value)
    return values


def _small(name: str, value: int) -> int:
    if _LAYERS.search(name):
        return min(value, 1)
    if name.endswith("heads"):
        return min(value, _MOST_HEADS)
    if name == "base_channels":
        return _GROUPED
    is_width = _WIDTHS.search(name) and not re.search("image|vocab", name)
    return value // _SHARE if is_width and _NARROWEST <= value < 2**16 else value


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # layers differ in it
        return True


def can_set(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a field is no property that others decide."""
    known = getattr(type(config), config.attribute_map.get(name, name), None)
    return not isinstance(known, property) or known.fset is not None
