"""Per-layer facts of a decoder's config, and the decoder's place in a model."""

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.torch.model.layers.family import family_of


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


# Names of a decoder's own fields, if the usual ones are of an encoder (BART).
_OF_DECODERS: Final = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
}


def of_decoder(config: PreTrainedConfig, field: str) -> Any:
    """Return a config field of the decoder's layers; None if absent."""
    name = _OF_DECODERS.get(field, field)
    own = getattr(config, name, None)
    return getattr(config, field, None) if own is None else own


def num_layers(config: PreTrainedConfig) -> Any:
    return of_decoder(config, "num_hidden_layers")


def of_layers(config: PreTrainedConfig, field: str) -> list[Any]:
    """Return a config field for each layer; None if absent. Gemma 4 has it only in a config per layer."""
    if getattr(config, "is_heterogeneous", False):
        return [getattr(layer, field, None) for layer in config.per_layer_config]
    return [of_decoder(config, field)] * num_layers(config)


# Types of layers that carry a state over tokens or convolve them; some of these have attention too.
STATEFUL_LAYERS: Final = frozenset(
    {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
)
_WITHOUT_ATTENTION: Final = STATEFUL_LAYERS - {"hybrid", "hybrid_sliding"} | {
    "moe",
    "mlp",
}


def has_attention(config: PreTrainedConfig) -> bool:
    types = getattr(config, "layer_types", None)
    return not types or any(kind not in _WITHOUT_ATTENTION for kind in types)


def without_attention(config: PreTrainedConfig) -> set[int]:
    types = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(types) if kind in _WITHOUT_ATTENTION}


def head_counts(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return each layer's query and key/value heads; empty without attention; UnsupportedError without heads."""
    if not isinstance(num_layers(config), int):
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
    """Return the number of key/value heads that a config names in another way."""
    kv_heads = family_of(config).kv_heads
    if kv_heads is not None:
        return kv_heads(config)
    return 1 if getattr(config, "multi_query", False) else heads


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """Return each layer's query head size; empty if no layer has attention."""
    if not has_attention(config):
        return []
    sizes = zip(of_layers(config, "head_dim"), head_counts(config), strict=True)
    return [size or config.hidden_size // heads for size, (heads, _) in sizes]


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerMask, ...]:
    """Return each layer's mask, from its family or from ``layer_types`` and the fields for windows and chunks."""
    masks = family_of(config).layer_masks
    if masks is not None:
        return tuple(masks(config))
    usual = ["sliding_attention"] * num_layers(config)
    slides = getattr(config, "use_sliding_window", True)
    windows = of_layers(config, "sliding_window")
    chunks = of_layers(config, "attention_chunk_size")
    return tuple(
        {
            "sliding_attention": LayerMask(window=window if slides else None),
            "hybrid_sliding": LayerMask(window=window if slides else None),
            "chunked_attention": LayerMask(chunk=chunk),
        }.get(kind, CAUSAL)
        for kind, window, chunk in zip(
            getattr(config, "layer_types", None) or usual, windows, chunks, strict=True
        )
    )


def cached_kinds(config: PreTrainedConfig) -> tuple[LayerMask | None, ...]:
    """Return each layer's mask; None for layers without keys of their own (no attention, or those of another layer)."""
    own = num_layers(config) - (getattr(config, "num_kv_shared_layers", None) or 0)
    others = {*range(own, num_layers(config)), *without_attention(config)}
    others |= {*family_of(config).keyless_layers(config)}
    sharing = getattr(config, "kv_sharing_modes", ())
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
    types = getattr(config, "layer_types", None) or [""] * num_layers(config)
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
    # Modules come before those inside them, so a path that begins with the last one found is nested.
    for path, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not path.startswith(
            inside
        ):
            found[path], inside = module, f"{path}."
    return found or _listed_layers(model)


def _listed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return layers that do not support checkpointing (GPT-1): the list of ``num_hidden_layers`` modules."""
    config: Any = getattr(model, "config", None)
    count = num_layers(config)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{path}.{number}": layer for number, layer in enumerate(module)}
    return {}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the submodel from tokens to hidden states (of the text, in a multimodal model), or the model itself."""
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
        # The towers are next to a whole language model (Llama 4).
        return decoder_of(own)
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
