"""A model like a given one, small enough to be tried in seconds: one layer of each kind, the ratios of its sizes kept.

Everything that decides what is computed stays: kinds of layers, scalings, caps, biases, ties, the form of positions.
Widths, numbers of layers and experts, and lengths (windows, chunks, the length that positions were trained for) shrink.
"""

import copy
import importlib.util
import inspect
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.proof.around import narrower, parts_of
from ringspan.proof.own_code import has_own_code
from ringspan.proof.seeing import (
    ABOUT_FILES,
    language_layers,
    sees,
    small_seeing,
)
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.support import refuse_config, refuse_unsupported_decoder
from ringspan.torch.model.view import view_of
from ringspan.torch.model.weights.loading import auto_class

VOCABULARY: Final = 97
FEW_TOKENS: Final = 1000
"""Tokens of the vocabulary of a model in its full width."""
MOST_LAYERS: Final = 8
"""Layers of a small model; kinds that come later are named as not tried."""
MOST_PARAMETERS: Final = 30_000_000

_LAYERS: Final = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "layers",
)
_HEADS: Final = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "attention_heads",
)
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads")
# Sizes by the names that configs give them; a field that a config lacks, or has as None or 0, stays as it is.
_SIZES: Final[dict[str, int]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed", "embed_dim"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size",), 32),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 32),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim",), 6),
    "qk_head_dim": 24,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "index_head_dim": 12,
    "indexer_head_dim": 16,
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 3),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    "zero_expert_num": 2,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "decoder_vocab_size": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), VOCABULARY),
    **dict.fromkeys(("shape_embed_dim", "pronunciation_embed_dim"), 16),
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    **dict.fromkeys(("ple_embed_dim", "gated_norm_rank"), 16),
    "ngram_vocab_size_base": 50,
    "hc_lowrank": 8,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
}
# Lengths, in relation to the tokens of a trial.
_LENGTHS: Final[dict[str, int]] = {
    **dict.fromkeys(("sliding_window", "window_size"), 8),
    "attention_chunk_size": 9,
    "index_topk": 7,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "original_max_position_embeddings": 32,
    "floor_scale": 8,
}
# Lengths that tables of weights have.
_TABLES: Final[dict[str, int]] = {
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    "max_seq_len": 512,
}
_NARROW: Final = _SIZES | _LENGTHS | _TABLES
_WIDE: Final = _LENGTHS | dict.fromkeys(
    ("vocab_size", "vocab_size_per_layer_input"), FEW_TOKENS
)
_CHOSEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
)
# Parts of a model by their numbers of layers, in order: the middle one may run several times.
_SECTIONS: Final = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
# Keys that an index chooses, in pools of several.
_POOLED: Final = {"index_kpool": 4, "index_topk": 8}
# Heads, their size, and the factor by which a width grows that they share.
_EXPANDED: Final = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
)
_LEFT_OUT: Final = (*ABOUT_FILES, "auto_map", "quantization_config")
_DROPOUT: Final = (
    "dropout",
    "dropout_prob",
    "drop",
    "pdrop",
    "layerdrop",
    "jitter_noise",
)
_NO_LOSS: Final = ("output_router_logits",)  # one process would add an auxiliary loss
_IDS: Final = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


class Small(NamedTuple):
    """A small config, the layers and parameters of its model, and how many kinds of the given layers it lacks."""

    config: PreTrainedConfig
    layers: int
    parameters: int
    kinds_left_out: int
    kept: tuple[int, ...] = ()
    """The places of its layers among the given ones."""


def small_model(config: PreTrainedConfig, *, is_narrow: bool = True) -> Small:
    """Return a small config with a layer of each kind that comes among the first ``MOST_LAYERS`` different ones.

    One that is not narrow has the given widths, experts and tables, for weights that are there. A model that sees or
    hears has small towers; only its language model is left if these cannot be made.

    Raises:
        UnsupportedError: what a ring refuses of the given model, or a type whose sizes are not known here.
    """
    has_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder and not has_decoder:
        refuse_config(config)
    try:
        return _small_model(config, is_narrow=is_narrow)
    except UnsupportedError:
        text = text_config(config)
        if sees(config) and is_narrow and _writes(text):
            return small_model(text)
        if not config.is_encoder_decoder:
            _refuse_as_given(config)
        raise


def _small_model(config: PreTrainedConfig, *, is_narrow: bool) -> Small:
    name = type(config).__name__
    if not _writes(config):
        raise UnsupportedError(
            f"{name}: transformers has no language model of it; use the config of one"
        )
    try:
        kinds = _kinds(_on_meta(config))
    except Exception as error:  # each type of model checks its sizes in its own way
        raise UnsupportedError(
            f"{name}: transformers makes no model of this config ({type(error).__name__}: {one_line(error)}); complete "
            "its fields"
        ) from error
    try:
        small, kept = _small_config(config, kinds, is_narrow=is_narrow)
        model = _on_meta(small)
    except Exception as error:  # each type of model checks its sizes in its own way
        raise UnsupportedError(
            f"{name} cannot be made small: {one_line(error)}; please open an issue with its config"
        ) from error
    count, there = model.num_parameters(), _kinds(model)
    if count > MOST_PARAMETERS and is_narrow:
        raise UnsupportedError(
            f"{name} has {count:,} parameters when made small; please open an issue with its config"
        )
    text = text_config(config)
    small._attn_implementation = plain_of(text._attn_implementation)  # pyright: ignore[reportAttributeAccessIssue]
    left_out = max(0, len({*kinds}) - len({*there}))
    return Small(small, len(there), count, left_out, tuple(kept))


def _small_config(
    config: PreTrainedConfig, kinds: list[Any], *, is_narrow: bool
) -> tuple[PreTrainedConfig, list[int]]:
    """Return a small config and the layers that it keeps: one of each kind, or two if the type takes no fewer."""
    kept = _first_of_each(kinds)
    try:
        small = _with_layers(config, len(kinds), kept, is_narrow=is_narrow)
        _on_meta(small)
    except Exception:  # each type of model checks its layers in its own way
        kept = _first_of_each(kinds, 2)
        small = _with_layers(config, len(kinds), kept, is_narrow=is_narrow)
    return small, kept


def _with_layers(
    config: PreTrainedConfig, layers: int, kept: list[int], *, is_narrow: bool
) -> PreTrainedConfig:
    """Return a small config that has the layers ``kept`` of all."""
    text = _language_of(config)
    values = text.to_dict()
    for field in _LEFT_OUT:
        values.pop(field, None)
    shrunk = _shrunk(values, layers, kept, is_narrow=is_narrow)
    if is_narrow:
        shrunk |= _small_parts(text) | small_rope(text, shrunk)
        shrunk |= _small_share(values, shrunk)
    small = type(text)(**shrunk)
    if has_own_code(text):
        small.auto_map, small.name_or_path = text.auto_map, text.name_or_path
    return small_seeing(config, small) if sees(config) else small


def _small_parts(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the parts of a language model that have configs of their own, such as a tower inside of it."""
    names = ("hidden_size", "vocab_size")
    sizes = {getattr(text, name, 0): _SIZES[name] for name in names}
    parts = parts_of(text)
    return {name: narrower(part, sizes).to_dict() for name, part in parts}


def small_rope(text: PreTrainedConfig, small: dict[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings whose times, rows and columns have their shares of half a small head's numbers."""
    if "mrope_section" not in _source(text):
        return {}
    rope = small.get("rope_parameters") or {}
    if any(
        isinstance(each, dict) for each in rope.values()
    ):  # a table for each type of layers
        parts = {name: each and _in_shares(each, small) for name, each in rope.items()}
        return {"rope_parameters": parts}
    return {"rope_parameters": _in_shares(rope, small)}


def _small_share(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings with the share of a small head that latent attention rotates, if they say one."""
    rope = small.get("rope_parameters") or {}
    size, part = values.get("head_dim"), values.get("qk_rope_head_dim")
    share = rope.get("partial_rotary_factor")
    if not (size and part and share) or share * size != part:
        return {}
    share = small["qk_rope_head_dim"] / small["head_dim"]
    return {"rope_parameters": rope | {"partial_rotary_factor": share}}


def _in_shares(rope: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    heads = next(small[name] for name in _HEADS if name in small)
    size = small.get("head_dim") or small["hidden_size"] // heads
    part = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1
    half = int(size * part) // 2
    share = max(1, 3 * half // 8)
    return rope | {"mrope_section": [share, share, half - 2 * share]}


def _source(config: PreTrainedConfig) -> str:
    """Return the source of the models of a type."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    found = importlib.util.find_spec(name)
    return inspect.getsource(importlib.import_module(name)) if found else ""


def _refuse_as_given(config: PreTrainedConfig) -> None:
    """Raise UnsupportedError if a ring refuses the model as it is, whatever its sizes."""
    config = copy.deepcopy(config)
    for each in (config, text_config(config)):
        for field, value in vars(each).items():
            if field.endswith(_DROPOUT) and isinstance(value, float):
                setattr(each, field, 0.0)
    refuse_config(config)
    try:
        view = view_of(_on_meta(config))
    except Exception:  # whatever transformers raises of it
        return
    # Layers with a state cannot be tried without numbers, and those after them would seem to be none of a ring's.
    if not view.stateful:
        refuse_unsupported_decoder(view)


def _language_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model: an encoder-decoder's own, which makes its decoder."""
    return config if config.is_encoder_decoder else text_config(config)


def _writes(config: PreTrainedConfig) -> bool:
    """Return whether there is a language model of a config."""
    auto = auto_class(config, sees=sees(config))
    return type(config) in auto._model_mapping or has_own_code(config)


def plain_of(implementation: str | None) -> str | None:
    """Return an attention implementation if transformers computes it on any device in any dtype, else "eager"."""
    return implementation if implementation in (None, "eager", "sdpa") else "eager"


def _kinds(model: Any) -> list[tuple[Any, ...]]:
    """Return the kind of each layer, which is another one in each section of a model."""
    kinds = [_kind_of(layer) for layer in language_layers(model).values()]
    sections = [
        name
        for name in _SECTIONS
        for _ in range(getattr(text_config(model.config), name, 0))
    ]
    if len(sections) != len(kinds):
        return kinds
    return [*zip(sections, kinds, strict=True)]


def _on_meta(config: PreTrainedConfig) -> Any:
    """Make a model without memory."""
    config = copy.deepcopy(config)
    config._attn_implementation = plain_of(config._attn_implementation)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.device("meta"):
        return auto_class(config, sees=sees(config)).from_config(
            config, trust_remote_code=has_own_code(config)
        )


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers with the same code and settings, whatever their place and sizes."""
    return tuple(
        (path, type(module).__name__, *_settings(module))
        for path, module in layer.named_modules()
        if not path.rpartition(".")[2].isdecimal()
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own switches: a window by whether there is one, and words; sizes and places left out."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, bool | str):
            yield name, value
        elif "window" in name or "chunk" in name:
            yield name, value is None


def _first_of_each(kinds: list[Any], count: int = 1) -> list[int]:
    """Return the first layers of each kind, and a second layer if there is only one kind."""
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:MOST_LAYERS]
    if len(firsts) == 1 and len(kinds) > 1:
        return [firsts[0], 1]
    if count == 1:
        return firsts
    known = {kinds[place] for place in firsts}
    places = range(len(kinds))
    return [
        place
        for place in places
        if kinds[place] in known and kinds[:place].count(kinds[place]) < count
    ]


def _shrunk(
    values: dict[str, Any], layers: int, kept: list[int], *, is_narrow: bool
) -> dict[str, Any]:
    """Return the fields of a config with ``layers`` layers that keeps the layers ``kept``."""
    sizes = _NARROW if is_narrow else _WIDE
    small = {
        name: _small_value(name, value, layers, kept, sizes)
        for name, value in values.items()
    }
    set_ones = {name: value for name, value in values.items() if value}
    if is_narrow:
        small |= _small_heads(set_ones) | _small_experts(set_ones)
        small |= _small_expanded(set_ones)
    return (
        small
        | _small_layers(set_ones, layers, kept, sizes)
        | {name: number for name, number in _IDS.items() if name in values}
        | {name: False for name in _NO_LOSS if name in values}
    )


def _small_heads(values: dict[str, Any]) -> dict[str, Any]:
    """Return four heads, key/value heads in their ratio, and the size that some configs call a head's."""
    heads = next((values[name] for name in _HEADS if name in values), 4)
    small = {name: 4 for name in _HEADS if name in values}
    small |= {
        name: {1: 1, heads: 4}.get(values[name], 2)
        for name in _KV_HEADS
        if name in values
    }
    # Latent attention rotates a part of each head, which some configs call the head.
    rotated, name = values.get("qk_rope_head_dim", 0), "qk_nope_head_dim"
    if rotated and "head_dim" in values:
        layers = [values, *values.get("per_layer_config", {}).values()]
        sizes = {rotated + layer[name]: 24 for layer in layers if name in layer}
        small["head_dim"] = (sizes | {rotated: 8}).get(values["head_dim"], 16)
    if "index_kpool" in values:
        small |= _POOLED
    # An index may have a head for each head of keys.
    keys = small.get("num_key_value_heads")
    if keys and values.get("index_n_heads") == values["num_key_value_heads"]:
        small["index_n_heads"] = keys
    return small


def _small_expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Return eight heads of layers with a state, whose sizes add up to a multiple of the hidden size."""
    small: dict[str, Any] = {}
    for heads, size, factor in _EXPANDED:
        # Falcon H1 gives that width by itself.
        if {heads, size, factor} <= values.keys() and "mamba_d_ssm" not in values:
            small |= {heads: 8, size: int(values[factor] * _SIZES["hidden_size"]) // 8}
    return small


def _small_experts(values: dict[str, Any]) -> dict[str, Any]:
    """Return at most two experts of a token, and two groups of them if there are several."""
    small = {name: min(2, values[name]) for name in _CHOSEN if name in values}
    for name in ("n_group", "num_expert_group"):
        if values.get(name, 1) > 1:
            small |= {name: 2, "topk_group": 1}
    return small


def _small_layers(
    values: dict[str, Any], layers: int, kept: list[int], sizes: dict[str, int]
) -> dict[str, Any]:
    """Return how many layers stay, how many of the dense first and the sharing last, and fields of single layers."""
    small: dict[str, Any] = {name: len(kept) for name in _LAYERS if name in values}
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if name in values:
            small[name] = sum(place < values[name] for place in kept)
    if "num_layers_per_stack" in values:  # found from the layers of a stack (HRM)
        small["num_layers_per_stack"] = None
    if values.keys() >= {*_SECTIONS}:
        small |= _small_sections(values, layers, kept)
    if "num_kv_shared_layers" in values:
        first = layers - values["num_kv_shared_layers"]
        small["num_kv_shared_layers"] = sum(place >= first for place in kept)
    if "per_layer_config" in values:
        small["per_layer_config"] = {
            kept.index(int(place)): _small_value("", each, layers, kept, sizes)
            for place, each in values["per_layer_config"].items()
            if int(place) in kept
        }
    return small


def _small_sections(
    values: dict[str, Any], layers: int, kept: list[int]
) -> dict[str, Any]:
    """Return how much stays of each section of a model, whose config may list several entries for a layer."""
    ends = [*accumulate(values[name] for name in _SECTIONS)]
    entries = ends[-1] // layers
    places = [place * entries + entry for place in kept for entry in range(entries)]
    sections = [sum(place >= end for end in ends) for place in places]
    counts = {name: sections.count(at) for at, name in enumerate(_SECTIONS)}
    types = [values["layer_types"][place] for place in places]
    return counts | {"num_hidden_layers": len(places), "layer_types": types}


def _small_value(
    name: str, value: Any, layers: int, kept: list[int], sizes: dict[str, int]
) -> Any:
    """Return one field of a small config."""
    if isinstance(value, dict):
        return {
            key: _small_value(str(key), each, layers, kept, sizes)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return _small_list(name, value, layers, kept, sizes)
    if name.endswith(_DROPOUT) and isinstance(value, int | float):
        return type(value)(0)
    is_size = type(value) is int and value != 0
    # Layers with a window may have heads of their own sizes.
    name = name.removeprefix("swa_")
    if name in _WIDE and sizes is _WIDE and is_size:
        return min(value, _WIDE[name])
    return sizes.get(name, value) if is_size else value


def _small_list(
    name: str, value: list[Any], layers: int, kept: list[int], sizes: dict[str, int]
) -> list[Any]:
    """Return a list of a small config: of the layers that stay, of their places, or of the factors of positions."""
    if name in sizes and all(type(each) is int for each in value):
        value = [sizes[name] * each // max(value) for each in value]
    if len(value) == layers:
        return [value[place] for place in kept]
    if name.endswith(("_layers", "_layer_ids", "_indices")):
        return [kept.index(place) for place in value if place in kept]
    is_narrow = sizes is _NARROW
    if (
        is_narrow and name.endswith("_factor") and value
    ):  # one for each pair of a head's numbers
        return value[:: max(1, len(value) // 8)][:8]
    return value
