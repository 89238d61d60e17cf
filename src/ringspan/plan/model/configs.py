"""Source of a model's shape: built in by its name, or read from a config.json.

L layers, C hidden size, H query heads, G key/value heads, D head size, I intermediate size, V vocabulary.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.files.named import read_small
from ringspan.core.messages.lines import one_line
from ringspan.plan.model.hub import from_hub
from ringspan.plan.model.media import NO_MEDIA, Media
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.names import normal, unknown


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    *,
    kv_heads: int | None = None,
    vocab: int = 32_000,
    made_for: int = 2048,
    **others: Any,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=others.pop("head_dim", hidden // heads),
        intermediate=intermediate,
        vocab=vocab,
        made_for=made_for,
        **others,
    )


def _llama3(name: str, layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool = False) -> ModelShape:
    return _llama(name, layers, hidden, heads, intermediate, kv_heads=8, vocab=128_256, made_for=131_072, tied=tied)


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool = False) -> ModelShape:
    return _llama(
        name,
        layers,
        hidden,
        heads,
        intermediate,
        kv_heads=8,
        vocab=151_936,
        made_for=40_960,
        tied=tied,
        head_dim=128,
        qk_norm=True,
        model_type="qwen3",
    )


def _gpt(name: str, layers: int, hidden: int, heads: int, *, positions: int = 1024) -> ModelShape:
    return ModelShape(
        name=name,
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        vocab=50_257,
        positions=positions,
        tied=True,
        model_type="gpt2",
    )


# Sizes from each model's published config.json or paper. "llama-3b" is OpenLLaMA 3B, "llama-30b" the 33B of the paper.
_MODELS: Final = (
    _gpt("gpt2", 12, 768, 12),
    _gpt("gpt2-medium", 24, 1024, 16),
    _gpt("gpt2-large", 36, 1280, 20),
    _gpt("gpt2-xl", 48, 1600, 25),
    _gpt("gpt-175b", 96, 12_288, 96, positions=2048),
    _llama("llama-3b", 26, 3200, 32, 8640),
    _llama("llama-7b", 32, 4096, 32, 11_008),
    _llama("llama-13b", 40, 5120, 40, 13_824),
    _llama("llama-30b", 60, 6656, 52, 17_920),
    _llama("llama-65b", 80, 8192, 64, 22_016),
    _llama("llama-2-70b", 80, 8192, 64, 28_672, kv_heads=8, made_for=4096),
    _llama3("llama-3.1-8b", 32, 4096, 32, 14_336),
    _llama3("llama-3.1-70b", 80, 8192, 64, 28_672),
    _llama3("llama-3.1-405b", 126, 16_384, 128, 53_248),
    _llama3("llama-3.2-1b", 16, 2048, 32, 8192, tied=True),
    _llama3("llama-3.2-3b", 28, 3072, 24, 8192, tied=True),
    _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
    _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
    _qwen3("qwen3-8b", 36, 4096, 32, 12_288),
    _qwen3("qwen3-14b", 40, 5120, 40, 17_408),
    _qwen3("qwen3-32b", 64, 5120, 64, 25_600),
)
MODELS: Final = {model.name: model for model in _MODELS}

# What transformers takes where a config.json does not say it.
_MADE_FOR: Final = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_FAMILIES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gpt2": "gpt2"}


def model_shape(text: str, media: Media = NO_MEDIA, dtype: str = "bfloat16") -> ModelShape:
    """Return a built-in shape by name, the config.json at a path (or in a folder), or that of a Hugging Face id.

    ``media`` is what each sequence holds beside text, for towers that compute in ``dtype``.

    Raises:
        ConfigError: an unknown name (near ones are listed), or a config that cannot be read.
        UnsupportedError: a kind of model whose parts this does not know.
    """
    path = Path(text).expanduser()
    if not text.strip():
        raise ConfigError(f"--model {text!r}: give a name such as llama-3.1-8b, a config.json or its folder, or an id")
    if path.exists() or path.suffix == ".json":
        return read_config(path / "config.json" if path.is_dir() else path, media, dtype)
    if normal(text) in MODELS:
        _refuse_media(text, media)
        return MODELS[normal(text)]
    published = normal(text.rpartition("/")[2]).replace("meta-", "").removesuffix("-instruct").removesuffix("-base")
    if "/" in text and published in MODELS:
        _refuse_media(text, media)
        return replace(MODELS[published], name=text)
    if "/" in text:
        return _from_hub(text, media, dtype)
    raise unknown("model", text, MODELS, "; or give a config.json, its folder, or a Hugging Face id")


def _from_hub(repository: str, media: Media, dtype: str) -> ModelShape:
    """Load the config of a Hugging Face id, from the local cache if it is there."""
    from huggingface_hub import hf_hub_download

    try:
        with from_hub(f"--model {repository!r}", repository):
            path = hf_hub_download(repository, "config.json")
    except ConfigError:
        raise
    except Exception as error:  # the Hub's client raises errors of several libraries
        raise ConfigError(f"--model {repository!r}: could not download config.json: {one_line(error)}") from error
    return replace(read_config(Path(path), media, dtype), name=repository)


def read_config(path: Path, media: Media = NO_MEDIA, dtype: str = "bfloat16") -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: a file that cannot be read, or a value that is missing or not a number.
        UnsupportedError: a kind of model whose parts this does not know.
    """
    try:
        values = json.loads(read_small(path))
    except OSError as error:
        raise ConfigError(f"--model {str(path)!r}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--model {str(path)!r}: is not valid JSON ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model {str(path)!r}: should hold a JSON object, the config of a Hugging Face model")
    return from_config(values, path.parent.name or str(path), media, dtype)


def from_config(values: Mapping[str, Any], name: str, media: Media = NO_MEDIA, dtype: str = "bfloat16") -> ModelShape:
    """Return the shape that the values of a Hugging Face config describe; see ``read_config``.

    Raises:
        UnsupportedError: a model type that the planner does not know, packed weights, or heads that do not divide.
    """
    kind = values.get("model_type")
    if isinstance(packed := values.get("quantization_config"), dict):
        raise UnsupportedError(
            f"{name}: is quantised ({packed.get('quant_method')}), and plans count weights of 16 or 32 bits, which are "
            "trained; take quantization_config out of a copy of its config.json to plan without"
        )
    if kind not in _FAMILIES:
        return _built(values, name, media, dtype)
    _refuse_media(name, media)
    if kind == "gpt2":
        return _gpt2_config(values, name)

    number = partial(_number, values, name)
    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedError(
            f"{name}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}, but must"
        )
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number("head_dim", 128 if kind == "qwen3" else hidden // heads),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        made_for=int(number("max_position_embeddings", _MADE_FOR[kind]) * _dynamic_factor(values, name)),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(values.get("attention_bias", False)),
        output_bias=kind != "qwen2" and bool(values.get("attention_bias", False)),
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        windows=_windows(values, layers, name),
        model_type=kind,
    )


def _built(values: Mapping[str, Any], name: str, media: Media, dtype: str) -> ModelShape:
    """Return the shape of a model that transformers must build to be counted: states, convolutions or towers."""
    if isinstance(values.get("model_type"), str):
        from ringspan.plan.model.hybrids import hybrid_values
        from ringspan.plan.model.towers import seeing_shape

        if (shape := seeing_shape(values, name, media, dtype, _text_shape)) is not None:
            return shape
        if (sizes := hybrid_values(values, name)) is not None:
            _refuse_media(name, media)
            return ModelShape(name=name, **sizes)
    raise UnsupportedError(
        f"{name}: model_type={values.get('model_type')!r} is not known to the planner; it knows "
        f"{', '.join(_FAMILIES)}, models with states or convolutions such as qwen3_next, nemotron_h and lfm2, and "
        "models that see or hear such as qwen2_5_vl, gemma3 and voxtral"
    )


def _text_shape(values: Mapping[str, Any], name: str) -> ModelShape | None:
    """Return the shape of a language model whose layers are alike, else None."""
    return from_config(values, name) if values["model_type"] in _FAMILIES else None


def _refuse_media(name: str, media: Media) -> None:
    for units in media.values():
        raise ConfigError(f"{units.option}: {name} is a model of text alone; leave it out")


def _number(values: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    value = values.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {field}={value!r} should be a positive integer")
    return value


def _gpt2_config(values: Mapping[str, Any], name: str) -> ModelShape:
    number = partial(_number, values, name)
    layers, hidden, heads, vocab, positions = map(number, ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"))
    intermediate = number("n_inner", 4 * hidden)
    return replace(
        _gpt(name, layers, hidden, heads, positions=positions),
        vocab=vocab,
        intermediate=intermediate,
        tied=bool(values.get("tie_word_embeddings", True)),
    )


def _dynamic_factor(values: Mapping[str, Any], name: str) -> float:
    """Return the factor of dynamic scaling on max_position_embeddings, which other kinds include.

    Mirrors ``ringspan.torch.layers.positions.num_trained_positions`` without importing a framework.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{name}: rope_parameters={rope!r} should be a JSON object")
    tables = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    factors = [each.get("factor", 1.0) for each in tables if each.get("rope_type", each.get("type")) == "dynamic"]
    for factor in factors:
        if not (isinstance(factor, int | float) and 1 <= factor < math.inf):
            raise ConfigError(f"{name}: factor={factor!r} of rope_parameters should be a number of at least 1")
    return max(factors, default=1.0)


def _windows(values: Mapping[str, Any], layers: int, name: str) -> tuple[int | None, ...]:
    """Read windows like ``ringspan.torch.model.support.layer_kinds``, without importing a framework."""
    kind = values["model_type"]
    window = values.get("sliding_window") if values.get("use_sliding_window", kind == "mistral") else None
    if window is None:
        return ()
    window = _number(values, name, "sliding_window")
    kinds = values.get("layer_types")
    if kinds is None:
        dense_layers = values.get("max_window_layers", 0) if kind != "mistral" else 0
        if not isinstance(dense_layers, int):
            raise ConfigError(f"{name}: max_window_layers={dense_layers!r} should be an integer")
        return tuple(window if layer >= dense_layers else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"{name}: layer_types={kinds!r} should be a list of {layers} kinds, one for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
