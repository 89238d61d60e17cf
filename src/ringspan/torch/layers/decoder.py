"""Per-layer facts of a decoder's config, and the decoder's place in a model."""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.errors import UnsupportedError


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


def of_layers(config: PreTrainedConfig, field: str) -> list[Any]:
    """Return a config field for each layer; None if absent. Gemma 4's common config cannot be asked."""
    if getattr(config, "is_heterogeneous", False):
        return [getattr(layer, field, None) for layer in config.per_layer_config]
    return [getattr(config, field, None)] * config.num_hidden_layers


# Types of layers that carry a state over tokens, or convolve them; and those that treat each token by itself.
STATEFUL_LAYERS: Final = frozenset(
    {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
)
_WITHOUT_ATTENTION: Final = STATEFUL_LAYERS - {"hybrid", "hybrid_sliding"} | {
    "moe",
    "mlp",
}


# of older transformers
_INDEXED: Final = (
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
)
INDEXED_LAYERS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "axk2",
            "deepseek_v32",
            "dots3_note_text",
            "glm_moe_dsa",
            "hy_v4",
            "hy_v4_vl_text",
        ),
        _INDEXED,
    ),
    **dict.fromkeys(
        ("glm5_next_text", "mistral_large4_text", "qwen4_exp_text"), _INDEXED
    ),
    "deepseek_v4": ("compressed_sparse_attention", "heavily_compressed_attention"),
    "minimax_m3_vl_text": ("minimax_m3_sparse",),
}
"""Layers of each type whose queries attend to keys that an index chooses, or to entries that pool them."""


POOLED_INDEXES: Final = frozenset({"deepseek_v4", "glm5_next_text", "qwen4_exp_text"})
"""Types whose index chooses pools or entries, counted from a row's first real token."""


def has_index(config: PreTrainedConfig) -> bool:
    types = getattr(config, "layer_types", None) or ()
    return any(kind in types for kind in INDEXED_LAYERS.get(config.model_type, ()))


def has_attention(config: PreTrainedConfig) -> bool:
    types = getattr(config, "layer_types", None)
    return not types or any(kind not in _WITHOUT_ATTENTION for kind in types)


def without_attention(config: PreTrainedConfig) -> set[int]:
    types = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(types) if kind in _WITHOUT_ATTENTION}


def head_counts(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return each layer's query and key/value heads; empty without attention; UnsupportedError without heads."""
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedError(
            f"{config.model_type} is no language model of layers; use an AutoModelForCausalLM"
        )
    if not has_attention(config):
        return []
    counts = list(
        zip(
            *(
                of_layers(config, f"num_{kind}_heads")
                for kind in ("attention", "key_value")
            ),
            strict=True,
        )
    )
    if not all(isinstance(heads, int) for heads, _ in counts):
        raise UnsupportedError(
            f"{config.model_type} has no attention heads; use a model with attention"
        )
    return [
        (heads, kv_heads or _shared_by(config, heads)) for heads, kv_heads in counts
    ]


def _shared_by(config: PreTrainedConfig, heads: int) -> int:
    if getattr(config, "new_decoder_architecture", False):
        return getattr(config, "num_kv_heads", heads)
    return 1 if getattr(config, "multi_query", False) else heads


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """Return each layer's query head size; empty if no layer has attention."""
    if not has_attention(config):
        return []
    sizes = zip(of_layers(config, "head_dim"), head_counts(config), strict=True)
    return [size or config.hidden_size // heads for size, (heads, _) in sizes]


class LayerKind(NamedTuple):
    """Visible keys of a layer's queries: all earlier ones, the last ``window``, or their own chunk."""

    window: int | None = None
    chunk: int | None = None


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    types = (
        getattr(config, "layer_types", None)
        or ["sliding_attention"] * config.num_hidden_layers
    )
    slides = getattr(config, "use_sliding_window", True)
    if getattr(config, "model_type", "") == "gpt_neo":
        window = config.window_size
        return tuple(
            LayerKind(window=window if kind == "local" else None)
            for kind in config.attention_layers
        )
    windows, chunks = (
        of_layers(config, "sliding_window"),
        of_layers(config, "attention_chunk_size"),
    )
    return tuple(
        {
            "full_attention": LayerKind(),
            "sliding_attention": LayerKind(window=window if slides else None),
            "hybrid_sliding": LayerKind(window=window if slides else None),
            "chunked_attention": LayerKind(chunk=chunk),
            **dict.fromkeys(INDEXED_LAYERS["deepseek_v4"], LayerKind(window=window)),
        }.get(kind, LayerKind())
        for kind, window, chunk in zip(types, windows, chunks, strict=True)
    )


def cached_kinds(config: PreTrainedConfig) -> tuple[LayerKind | None, ...]:
    """Return each layer's kind; None without own keys (no attention, shared ones, Mllama's images)."""
    own = config.num_hidden_layers - (
        getattr(config, "num_kv_shared_layers", None) or 0
    )
    others = {
        *range(own, config.num_hidden_layers),
        *(getattr(config, "cross_attention_layers", None) or ()),
    }
    others |= without_attention(config)
    sharing = getattr(config, "kv_sharing_modes", ())  # Mistral Large 4
    others |= {
        number
        for number, mode in enumerate(sharing)
        if mode in ("reuse", "reuse_but_indexer")
    }
    return tuple(
        None if number in others else kind
        for number, kind in enumerate(layer_kinds(config))
    )


def cached_states(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return each layer's number of cached convolutions and states, 0 if none."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    counts = of_layers(config, "number_of_conv_states")
    return tuple(
        (count or 1) if kind in STATEFUL_LAYERS else 0
        for kind, count in zip(types, counts, strict=True)
    )


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the config's factor on the head's output (Cohere, Granite, Inkling, Muse); 1 if none."""
    config = text_config(config)
    divisors = (
        getattr(config, name, None) or 1.0
        for name in ("logits_scaling", "logits_mup_width_multiplier")
    )
    factors = (
        getattr(config, name, None) or 1.0
        for name in ("logit_scale", "output_multiplier")
    )
    return math.prod(factors) / math.prod(divisors)


def logit_softcap(config: PreTrainedConfig) -> float | None:
    return getattr(text_config(config), "final_logit_softcapping", None)


def finished_logits(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute logits from the head's output: ``softcap tanh(scale x / softcap)``, or ``scale x``."""
    logits = products if scale == 1 else products * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers, units of checkpointing and gathering, by path; without nested ones (Zamba)."""
    found: dict[str, nn.Module] = {}
    inside = "."
    for path, module in model.named_modules():  # a module comes before what it holds
        if isinstance(module, GradientCheckpointingLayer) and not path.startswith(
            inside
        ):
            found[path], inside = module, f"{path}."
    return found or _listed_layers(model)


def _listed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's layers without checkpointing (GPT-1): the list as long as its config says."""
    config: Any = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{path}.{number}": layer for number, layer in enumerate(module)}
    return {}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the submodel from tokens to hidden states, of a multimodal model the text's; else the model."""
    inner_models = [
        child for child in model.children() if isinstance(child, PreTrainedModel)
    ]
    inner = inner_models[0] if inner_models else model
    nested: Any = inner if inner is model else inner.get_decoder()
    if (
        len(inner_models) > 1
        and isinstance(own := model.get_decoder(), PreTrainedModel)
        and own is not model
    ):
        return decoder_of(own)  # the towers are beside a whole language model (Llama 4)
    return nested if isinstance(nested, PreTrainedModel) else inner


def inner_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model below the head, with towers and decoder; the model itself if it has them."""
    below = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return below[0] if len(below) == 1 else model


def towers_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    decoder: nn.Module = decoder_of(model)
    below = [
        child
        for child in inner_of(model).children()
        if isinstance(child, PreTrainedModel)
    ]
    return [
        child
        for child in below
        if all(module is not decoder for module in child.modules())
    ]
