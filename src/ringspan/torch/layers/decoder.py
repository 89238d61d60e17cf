"""What a decoder's config says of it, layer by layer, and where it is in a model."""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.errors import UnsupportedError


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """What a config says of the language model: all of it, or its part of a model that takes images or sound too."""
    return config.get_text_config(decoder=True)


def of_layers(config: PreTrainedConfig, field: str) -> list[Any]:
    """What a decoder's config says in a field, for each layer; None where it says nothing.

    Layers that differ have configs of their own in transformers, in which the common one may not be asked (Gemma 4).
    """
    if getattr(config, "is_heterogeneous", False):
        return [getattr(layer, field, None) for layer in config.per_layer_config]
    return [getattr(config, field, None)] * config.num_hidden_layers


# Types of layers that carry a state over tokens, or convolve them; and those that treat each token by itself.
STATEFUL_LAYERS: Final = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"})
_WITHOUT_ATTENTION: Final = STATEFUL_LAYERS - {"hybrid", "hybrid_sliding"} | {"moe", "mlp"}


def has_attention(config: PreTrainedConfig) -> bool:
    """Whether a decoder has layers of attention, as its config says."""
    types = getattr(config, "layer_types", None)
    return not types or any(kind not in _WITHOUT_ATTENTION for kind in types)


def without_attention(config: PreTrainedConfig) -> set[int]:
    """The layers that have no attention, as the config says."""
    types = getattr(config, "layer_types", None) or ()
    return {number for number, kind in enumerate(types) if kind in _WITHOUT_ATTENTION}


def head_counts(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Query heads and key/value heads of each layer; none where no layer has attention.

    Raises:
        UnsupportedError: the model has no attention heads.
    """
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedError(f"{config.model_type} is no language model of layers; use an AutoModelForCausalLM")
    if not has_attention(config):
        return []
    counts = list(zip(*(of_layers(config, f"num_{kind}_heads") for kind in ("attention", "key_value")), strict=True))
    if not all(isinstance(heads, int) for heads, _ in counts):
        raise UnsupportedError(f"{config.model_type} has no attention heads; only models with attention are supported")
    return [(heads, kv_heads or _shared_by(config, heads)) for heads, kv_heads in counts]


def _shared_by(config: PreTrainedConfig, heads: int) -> int:
    """Key/value heads of a config that does not say them as others do (Falcon)."""
    if getattr(config, "new_decoder_architecture", False):
        return getattr(config, "num_kv_heads", heads)
    return 1 if getattr(config, "multi_query", False) else heads


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """Numbers in a query head of each layer; none where no layer has attention."""
    if not has_attention(config):
        return []
    sizes = zip(of_layers(config, "head_dim"), head_counts(config), strict=True)
    return [size or config.hidden_size // heads for size, (heads, _) in sizes]


class LayerKind(NamedTuple):
    """Whom a layer's queries see: everything before them, the last ``window`` keys, or their own chunk."""

    window: int | None = None
    chunk: int | None = None


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """What the config says of each layer's attention."""
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = getattr(config, "use_sliding_window", True)
    if getattr(config, "model_type", "") == "gpt_neo":
        window = config.window_size
        return tuple(LayerKind(window=window if kind == "local" else None) for kind in config.attention_layers)
    windows, chunks = of_layers(config, "sliding_window"), of_layers(config, "attention_chunk_size")
    return tuple(
        {
            "full_attention": LayerKind(),
            "sliding_attention": LayerKind(window=window if slides else None),
            "hybrid_sliding": LayerKind(window=window if slides else None),
            "chunked_attention": LayerKind(chunk=chunk),
        }.get(kind, LayerKind())
        for kind, window, chunk in zip(types, windows, chunks, strict=True)
    )


def cached_kinds(config: PreTrainedConfig) -> tuple[LayerKind | None, ...]:
    """What the config says of each layer's attention; None of one without keys of its own: it has no attention, or
    takes those of an earlier layer (Gemma 3n, Gemma 4), or an image's (Mllama).
    """
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    others = {*range(own, config.num_hidden_layers), *(getattr(config, "cross_attention_layers", None) or ())}
    others |= without_attention(config)
    return tuple(None if number in others else kind for number, kind in enumerate(layer_kinds(config)))


def cached_states(config: PreTrainedConfig) -> tuple[int, ...]:
    """How many convolutions and states of its own each layer has, which a cache holds; 0 of one without any."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    counts = of_layers(config, "number_of_conv_states")
    return tuple((count or 1) if kind in STATEFUL_LAYERS else 0 for kind, count in zip(types, counts, strict=True))


def logit_scale(config: PreTrainedConfig) -> float:
    """The factor that a model's config puts on what its head computes (Cohere, Granite, Inkling, Muse); 1
    for none.
    """
    config = text_config(config)
    divisors = (getattr(config, name, None) or 1.0 for name in ("logits_scaling", "logits_mup_width_multiplier"))
    factors = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "output_multiplier"))
    return math.prod(factors) / math.prod(divisors)


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """The largest logit that a model's config allows (Gemma 2); None for any."""
    return getattr(text_config(config), "final_logit_softcapping", None)


def finished_logits(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """A model's logits from what its head computes: ``softcap tanh(scale x / softcap)``, or ``scale x``."""
    logits = products if scale == 1 else products * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers of a model, by path: each is checkpointed, and its weights are gathered, by itself.

    A layer inside of another one (Zamba's Mamba layer below its attention) is a part of that.
    """
    found: dict[str, nn.Module] = {}
    inside = "."
    for path, module in model.named_modules():  # a module comes before what it holds
        if isinstance(module, GradientCheckpointingLayer) and not path.startswith(inside):
            found[path], inside = module, f"{path}."
    return found or _listed_layers(model)


def _listed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that cannot be checkpointed (the first GPT): the list of as many modules as its config has
    layers.
    """
    config: Any = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{path}.{number}": layer for number, layer in enumerate(module)}
    return {}


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model of its own beside the head that maps tokens to hidden states, that of its text where it takes images
    or sound too; a model that has none beside a head is itself one.
    """
    inner_models = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    inner = inner_models[0] if inner_models else model
    nested: Any = inner if inner is model else inner.get_decoder()
    if len(inner_models) > 1 and isinstance(own := model.get_decoder(), PreTrainedModel) and own is not model:
        return decoder_of(own)  # the towers are beside a whole language model (Llama 4)
    return nested if isinstance(nested, PreTrainedModel) else inner
